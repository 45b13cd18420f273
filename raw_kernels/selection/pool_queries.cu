// Pooled queries of segments that are one q tile, and so need no order of their queries (rank_queries.cu finds both): means
// of runs of consecutive queries of a segment, rounded to the input's dtype.
#include "common/row_sums.cuh"

namespace s2o {

struct PoolQueriesParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  uint16* means;           // [batch * heads, segments, pooled queries, kHeadDim]
  Geometry geometry;
  int heads;
  int pooled_queries, run;
  float sign;              // -1 where scale < 0: importance then falls with the dot product
};

template <class Element, int kHeadDim, bool kAligned_>
struct PoolTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kAligned = kAligned_;
  struct Shared {
    float sums[RowTraits<Element, kHeadDim>::kSums];  // of runs that all warps share
  };
};

// Block: a head and a segment. A warp takes a run at a time, and reads 32 / kLanes of its queries at once; of few runs
// all warps share each.
template <class Traits>
__device__ __forceinline__ void pool_queries(const PoolQueriesParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kWarps = kRankThreads / 32;
  const Geometry& g = p.geometry;
  const int n = blockIdx.x % g.segments(), head = blockIdx.x / g.segments(), count = g.query_count(n);
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x % 32 / kLanes;
  const uint16* q = p.q.at(head / p.heads, head % p.heads) + g.query_begin(n) * p.q.row;
  uint16* means = p.means + static_cast<int64>(blockIdx.x) * p.pooled_queries * Traits::kHeadDim;
  const auto add = [&](float (&total)[8], int first, int end, int stride) {
#pragma unroll 4
    for (int r = first; r < end; r += stride) {
      float x[8];
      read_row<Traits>(x, q + r * p.q.row, lane, g.head_dim, Traits::kAligned);
#pragma unroll
      for (int e = 0; e < 8; ++e) total[e] += x[e];
    }
  };
  const bool shares = p.pooled_queries < kWarps;
  for (int run = shares ? 0 : threadIdx.x / 32; run < p.pooled_queries; run += shares ? 1 : kWarps) {
    const int begin = run * p.run, end = min(begin + p.run, count);
    if (begin >= end) break;  // a run that the short last segment leaves empty is no pooled query
    const float factor = p.sign / (end - begin);
    uint16* mean = means + run * Traits::kHeadDim;
    float total[8] = {};
    if (shares) {
      add(total, begin + threadIdx.x / kLanes, end, Traits::kRows);
      const float sum = block_sum<Traits>(total, shared.sums);
      if (threadIdx.x < Traits::kHeadDim) mean[threadIdx.x] = static_cast<uint16>(Element::pack(sum * factor, 0.f));
      continue;
    }
    add(total, begin + slot, end, 32 / kLanes);
#pragma unroll
    for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
      for (int e = 0; e < 8; ++e) total[e] += __shfl_xor_sync(kFullWarp, total[e], step);
    uint32 packed[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) packed[i] = Element::pack(total[2 * i] * factor, total[2 * i + 1] * factor);
    if (slot == 0) store_global_16(mean + lane * 8, packed[0], packed[1], packed[2], packed[3]);
  }
}

}  // namespace s2o
