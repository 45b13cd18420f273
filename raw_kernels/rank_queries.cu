// What ordering needs of the queries (the paper's Algorithm 1, lines 6-14), in float32.
//
//   guides:       mean of the leading keys of each KV head           -> guide [batch * kv_heads, 2, kHeadDim]
//   rank_queries: means of runs of consecutive queries of a segment  -> means [batch * heads, segments,
//                 representatives, kHeadDim], rounded to the input's dtype;
//                 queries of a segment by their dot product with the guide, descending, ties ascending
//                                                                    -> q_order [batch * heads, segments, segment]
//                 scores of the mean candidate (remainder.cu)        -> remainder [batch * heads, seqlen_q]
#include "row_sums.cuh"
#include "sortable.cuh"

namespace s2o {

struct RankQueriesParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim]
  float* guide;            // [batch * kv_heads, 2, kHeadDim]: of segment 0 and of the others
  uint16* means;           // [batch * heads, segments, representatives, kHeadDim]
  int* q_order;            // [batch * heads, segments, segment]
  const float* candidate_means;  // [batch * kv_heads, segments, (k, v), kHeadDim], or null
  float* remainder;        // [batch * heads, seqlen_q] in log2 units
  Geometry geometry;
  int heads, kv_heads;
  int representatives, run;
  int sort_slots;          // segment rounded up to a power of two
  int aligned;             // every row of q and k starts on 16 bytes
  float sign;              // -1 where scale < 0: importance then falls with the dot product
  float scale_log2;        // |scale| * log2(e)
};

template <class Element, int kHeadDim>
struct RankTraits : RowTraits<Element, kHeadDim> {
  struct Shared {
    float sums[RowTraits<Element, kHeadDim>::kSums];
    uint64 slots[1];  // [sort_slots] of rank_queries
  };
};

// Block: a KV head and a guide.
template <class Traits>
__device__ __forceinline__ void guides(const RankQueriesParams& p, typename Traits::Shared& shared) {
  const int kv_head = blockIdx.x / 2, which = blockIdx.x % 2;
  if (which >= p.geometry.segments()) return;
  const int count = p.geometry.guide_keys(which), lane = threadIdx.x % Traits::kLanes;
  const uint16* k = p.k.at(kv_head / p.kv_heads, kv_head % p.kv_heads);
  float total[8] = {};
#pragma unroll 4
  for (int r = threadIdx.x / Traits::kLanes; r < count; r += Traits::kRows) {
    float x[8];
    read_row<Traits>(x, k + r * p.k.row, lane, p.geometry.head_dim, p.aligned);
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] += x[e];
  }
  const float sum = block_sum<Traits>(total, shared.sums);
  if (threadIdx.x < Traits::kHeadDim)
    p.guide[static_cast<int64>(blockIdx.x) * Traits::kHeadDim + threadIdx.x] = count == 0 ? 0.f : sum / count;
}

// Block: a head and a segment; its queries are read once.
template <class Traits>
__device__ __forceinline__ void rank_queries(const RankQueriesParams& p, typename Traits::Shared& shared) {
  const Geometry& g = p.geometry;
  const int n = blockIdx.x % g.segments(), head = blockIdx.x / g.segments();
  const int batch = head / p.heads, kv_head = head % p.heads / (p.heads / p.kv_heads);
  const int count = g.query_count(n), lane = threadIdx.x % Traits::kLanes;
  const uint16* q = p.q.at(batch, head % p.heads) + g.query_begin(n) * p.q.row;
  const float* guide = p.guide + ((static_cast<int64>(batch) * p.kv_heads + kv_head) * 2 + (n > 0)) * Traits::kHeadDim;
  uint64* slots = shared.slots;  // (inverted score, offset): ascending is the order

  float weight[8], mean_key[8] = {};
#pragma unroll
  for (int e = 0; e < 8; ++e) weight[e] = guide[lane * 8 + e] * p.sign;
  const bool remainder = p.candidate_means && g.candidates(n) > 0;
  if (remainder) {
    const float* mean = p.candidate_means +
                        ((static_cast<int64>(batch) * p.kv_heads + kv_head) * g.segments() + n) * 2 * Traits::kHeadDim;
#pragma unroll
    for (int e = 0; e < 8; ++e) mean_key[e] = mean[lane * 8 + e] * p.sign;
  }
  for (int run = 0; run < p.representatives; ++run) {
    const int begin = run * p.run, end = min(begin + p.run, count);
    if (begin >= end) break;  // a run that the short last segment leaves empty is no representative
    float total[8] = {};
#pragma unroll 4
    for (int base = begin; base < end; base += Traits::kRows) {
      const int r = base + static_cast<int>(threadIdx.x) / Traits::kLanes;
      float x[8] = {}, score = 0.f, of_mean = 0.f;
      if (r < end) read_row<Traits>(x, q + r * p.q.row, lane, g.head_dim, p.aligned);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        total[e] += x[e];
        score += x[e] * weight[e];
        of_mean += x[e] * mean_key[e];
      }
#pragma unroll
      for (int step = Traits::kLanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(kFullWarp, score, step);
      if (lane == 0 && r < end) slots[r] = static_cast<uint64>(~sortable(score)) << 32 | r;
      if (remainder) {
#pragma unroll
        for (int step = Traits::kLanes / 2; step > 0; step /= 2)
          of_mean += __shfl_xor_sync(kFullWarp, of_mean, step);
        if (lane == 0 && r < end)
          p.remainder[static_cast<int64>(head) * g.seqlen_q + g.query_begin(n) + r] = of_mean * p.scale_log2;
      }
    }
    const float sum = block_sum<Traits>(total, shared.sums);
    if (threadIdx.x < Traits::kHeadDim) {
      const float mean = sum / (end - begin) * p.sign;
      const int64 target = (static_cast<int64>(blockIdx.x) * p.representatives + run) * Traits::kHeadDim + threadIdx.x;
      p.means[target] = static_cast<uint16>(Traits::Element::pack(mean, 0.f));
    }
  }
  for (int i = count + threadIdx.x; i < p.sort_slots; i += kRankThreads) slots[i] = ~0ull;
  __syncthreads();
  bitonic_sort(slots, p.sort_slots);
  int* order = p.q_order + static_cast<int64>(blockIdx.x) * g.segment;
  for (int i = threadIdx.x; i < count; i += kRankThreads) order[i] = static_cast<int>(slots[i]);
}

}  // namespace s2o
