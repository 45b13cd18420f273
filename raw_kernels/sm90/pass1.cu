// Pass 1 on Hopper: dense attention of each segment's queries to their own keys and to the window before them
// (the paper's Algorithm 2). With a segment that covers the sequence it is plain causal attention.
//
//   q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k, head_dim] or
//   [pages, kv_heads, page_size, head_dim]
//   -> out, normalised; state (m, l), which pass 2 resumes with acc = out * l; lse
#include "sm90/attention.cuh"

namespace s2o {

template <class Traits>
__device__ __forceinline__ void pass1_sm90(const MappedAttentionParams& params, typename Traits::Shared& shared) {
  sm90::attend_first<Traits, ConsecutiveRows<Traits::kBlockM>>(params, shared);
}

// The same of packed sequences that are attended densely: one launch for all.
template <class Traits>
__device__ __forceinline__ void pass1_packed_sm90(const MappedPackedAttentionParams& params,
                                                  typename Traits::Shared& shared) {
  sm90::attend_first<Traits, PackedRows<Traits::kBlockM, Traits::kPaged>>(params, shared);
}

// The same of a paged cache, of which the copy engine brings whole rows: small pages.
template <class Traits>
__device__ __forceinline__ void pass1_whole_rows_sm90(const MappedAttentionParams& params,
                                                      typename Traits::Shared& shared) {
  pass1_sm90<Traits>(params, shared);
}

template <class Traits>
__device__ __forceinline__ void pass1_packed_whole_rows_sm90(const MappedPackedAttentionParams& params,
                                                             typename Traits::Shared& shared) {
  pass1_packed_sm90<Traits>(params, shared);
}

}  // namespace s2o
