// Pass 1: dense attention of each segment's queries to their own keys and to the window before them
// (the paper's Algorithm 2). One block computes kBlockM consecutive queries of one head.
//
//   q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k, head_dim] or
//   [pages, kv_heads, page_size, head_dim]
//   -> out, normalised; state (m, l), which pass 2 resumes with acc = out * l; lse
//
// A segment that has no candidates for pass 2 is finished here.
#include "sm80/attention.cuh"
#include "common/rows.cuh"

namespace s2o {

template <class Traits, class Rows, class Params>
__device__ __forceinline__ void attend_first(const Params& params, typename Traits::Shared& shared) {
  const Geometry& g = params.geometry;
  AttentionTile<Traits> attention(shared, params);
  {
    const Rows rows(params, block_index());
    if (rows.count <= 0) return;
    attention.point_to_keys(rows, rows.first_key(g), nullptr, rows.limit(g));
    attention.template walk<true, false>(ContiguousKeys<Traits>{shared, rows.keys(g), params.pages}, rows.limit(g),
                                         rows.count, [&] { attention.load_queries(rows); });
  }
  attention.template store<Rows::kResumed>(Rows(params, block_index()));
}

template <class Traits>
__device__ __forceinline__ void pass1(const AttentionParams& params, typename Traits::Shared& shared) {
  attend_first<Traits, ConsecutiveRows<Traits::kBlockM>>(params, shared);
}

// The same of packed sequences that are attended densely: one launch for all.
template <class Traits>
__device__ __forceinline__ void pass1_packed(const PackedAttentionParams& params, typename Traits::Shared& shared) {
  attend_first<Traits, PackedRows<Traits::kBlockM, Traits::kPaged>>(params, shared);
}

}  // namespace s2o
