// Pass 1 on Hopper of a paged cache; but for the copies it is sm90/pass1.cu's, bit for bit.
//
//   q [batch, heads, seqlen_q, head_dim], k and v [pages, kv_heads, page_size, head_dim] through pages.table
//   -> out, normalised; state (m, l), which pass 2 resumes with acc = out * l; lse
#include "sm90/attention.cuh"

namespace s2o {

template <class Traits>
__device__ __forceinline__ void pass1_gathered_sm90(const AttentionParams& params, typename Traits::Shared& shared) {
  sm90::attend_first_in_pages<Traits, ConsecutiveRows<Traits::kBlockM>>(params, shared);
}

// The same of packed sequences that are attended densely, each with a row of the page table: one launch for all.
template <class Traits>
__device__ __forceinline__ void pass1_packed_gathered_sm90(const PackedAttentionParams& params,
                                                           typename Traits::Shared& shared) {
  sm90::attend_first_in_pages<Traits, PackedRows<Traits::kBlockM, true>>(params, shared);
}

}  // namespace s2o
