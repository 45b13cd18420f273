// Pass 1: dense attention of each segment's queries to their own keys and to the window before them
// (the paper's Algorithm 2). One block computes kBlockM consecutive queries of one head.
//
//   q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k, head_dim]
//   -> out, normalised; state (m, l), which pass 2 resumes with acc = out * l; lse
//
// A segment that has no candidates for pass 2 is finished here.
#include "attention.cuh"

namespace s2o {

// The queries of a block: row r is query first + r.
template <class Traits>
struct ConsecutiveRows : QueryTile {
  int first, count;
  __device__ __forceinline__ explicit ConsecutiveRows(const AttentionParams& p)
      : QueryTile(query_tile(p.chunk, p.tiles, block_index())),
        first(p.geometry.query_begin(segment) + tile * Traits::kBlockM),
        count(min(Traits::kBlockM, p.geometry.query_count(segment) - tile * Traits::kBlockM)) {}
  __device__ __forceinline__ int operator()(int r) const { return r < count ? first + r : -1; }
};

template <class Traits>
__device__ __forceinline__ void pass1(const AttentionParams& params, typename Traits::Shared& shared) {
  const Geometry& g = params.geometry;
  AttentionTile<Traits> attention(shared, params);
  {
    const ConsecutiveRows<Traits> rows(params);
    if (rows.count <= 0) return;
    attention.load_queries(rows);
    const int begin = g.dense_begin(rows.segment);
    attention.point_to_keys(rows, begin, nullptr);
    // Row r stands at key position first + r + offset and sees the keys up to it.
    const int causal_limit = rows.first + g.offset() - begin + 1;
    const int count = g.is_causal ? causal_limit + rows.count - 1 : g.dense_end(rows.segment) - begin;
    attention.template walk<true, false>(ContiguousKeys<Traits>{shared, count}, g.is_causal ? causal_limit : count,
                                         rows.count);
  }
  attention.template store<true>(ConsecutiveRows<Traits>(params));
}

}  // namespace s2o
