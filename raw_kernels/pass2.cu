// Pass 2: each q tile resumes its rows' states and walks its segment's candidates in descending importance until a
// key tile adds less than tau of the softmax mass to every row (the paper's Algorithm 3). One block computes kBlockM
// consecutive entries of q_order; rows of q, k and v are gathered through q_order and k_order as they are loaded,
// and outputs scattered; nothing is permuted in memory.
//
//   q_order [batch * heads, segments, segment]: offsets in the segment
//   k_order [chunk rows, k_order_stride]: key positions of a (head, segment) pair
//   -> out and lse of every row that has candidates; visited [batch * heads, segments, tiles]
#include "attention.cuh"

namespace s2o {

// The queries of a block: row r is query begin + order[r].
template <class Traits>
struct OrderedRows : QueryTile {
  const int* order;
  int begin, count;
  __device__ __forceinline__ explicit OrderedRows(const AttentionParams& p)
      : QueryTile(query_tile(p.chunk, p.tiles, block_index())),
        order(p.q_order + order_row(p) * p.geometry.segment + tile * Traits::kBlockM),
        begin(p.geometry.query_begin(segment)),
        count(min(Traits::kBlockM, p.geometry.query_count(segment) - tile * Traits::kBlockM)) {}
  __device__ __forceinline__ int64 order_row(const AttentionParams& p) const {
    return static_cast<int64>(head) * p.geometry.segments() + segment;
  }
  __device__ __forceinline__ int operator()(int r) const { return r < count ? begin + order[r] : -1; }
};

template <class Traits>
__device__ __forceinline__ void pass2(const AttentionParams& params, typename Traits::Shared& shared) {
  AttentionTile<Traits> attention(shared, params);
  int visited;
  {
    const OrderedRows<Traits> rows(params);
    const int count = params.geometry.candidates(rows.segment);
    if (rows.count <= 0 || count == 0) return;
    attention.load_queries(rows);
    attention.resume(rows);
    attention.point_to_keys(
        rows, 0, params.k_order + params.chunk.row(rows.head, rows.segment) * params.k_order_stride);
    visited = attention.template walk<false, true>(OrderedKeys<Traits>{shared, count}, count, rows.count);
  }
  const OrderedRows<Traits> rows(params);
  if (threadIdx.x == 0) params.visited[rows.order_row(params) * params.tiles + rows.tile] = visited;
  attention.template store<false>(rows);
}

}  // namespace s2o
