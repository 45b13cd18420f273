// What ordering needs of the queries (the paper's Algorithm 1, lines 6-14), in float32.
//
//   guides:          mean of the leading keys of each KV head           -> guide [batch * kv_heads, 2, kHeadDim]
//   representatives: means of runs of consecutive queries of a segment  -> high, low [batch * heads, segments,
//                    representatives, kHeadDim], two 16-bit parts whose sum is the mean to 16 bits or more
//   query_order:     queries of a segment by their dot product with the guide, descending, ties ascending
//                                                                       -> q_order [batch * heads, segments, segment]
#include "geometry.cuh"
#include "sortable.cuh"

namespace s2o {

constexpr int kRankThreads = 256;

struct RankQueriesParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim]
  float* guide;            // [batch * kv_heads, 2, kHeadDim]: of segment 0 and of the others
  uint16* high;            // [batch * heads, segments, representatives, kHeadDim]
  uint16* low;
  int* q_order;            // [batch * heads, segments, segment]
  Geometry geometry;
  int heads, kv_heads;
  int representatives, run;
  int sort_slots;          // segment rounded up to a power of two
  int aligned;             // every row of q and k starts on 16 bytes
  float sign;              // -1 where scale < 0: importance then falls with the dot product
};

template <class Element_, int kHeadDim_>
struct RankTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kLanes = kHeadDim / 8;           // threads of a row, 8 elements each
  static constexpr int kRows = kRankThreads / kLanes;   // rows that a block reads at a time
  static constexpr int kSumsBytes = kRows * kHeadDim * 4;
};

// Elements 8 * lane .. 8 * lane + 7 of a row as float32; zeros past head_dim.
template <class Traits>
__device__ __forceinline__ void read_row(float (&x)[8], const uint16* row, int lane, int head_dim, bool aligned) {
  uint4 packed = make_uint4(0, 0, 0, 0);
  if (aligned && lane * 8 + 8 <= head_dim) {
    packed = *reinterpret_cast<const uint4*>(row + lane * 8);
  } else {
    packed = load_unaligned(row, lane * 8, head_dim);
  }
  const uint32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = Traits::Element::low(pairs[i]);
    x[2 * i + 1] = Traits::Element::high(pairs[i]);
  }
}

// Sum of `count` rows, element d in thread d < kHeadDim. Every thread adds its rows in order and the partial sums
// are added in order: the result is the same on every run.
template <class Traits>
__device__ float sum_rows(const uint16* first, int64 stride, int count, int head_dim, bool aligned, float* sums) {
  const int lane = threadIdx.x % Traits::kLanes, slot = threadIdx.x / Traits::kLanes;
  float total[8] = {};
#pragma unroll 4
  for (int r = slot; r < count; r += Traits::kRows) {
    float x[8];
    read_row<Traits>(x, first + r * stride, lane, head_dim, aligned);
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] += x[e];
  }
#pragma unroll
  for (int e = 0; e < 8; ++e) sums[slot * Traits::kHeadDim + lane * 8 + e] = total[e];
  __syncthreads();
  float sum = 0.f;
  if (threadIdx.x < Traits::kHeadDim) {
    for (int s = 0; s < Traits::kRows; ++s) sum += sums[s * Traits::kHeadDim + threadIdx.x];
  }
  return sum;
}

// Block: a KV head and a guide.
template <class Traits>
__device__ __forceinline__ void guides(const RankQueriesParams& p, unsigned char* shared) {
  const int kv_head = blockIdx.x / 2, which = blockIdx.x % 2;
  if (which >= p.geometry.segments()) return;
  const int count = p.geometry.guide_keys(which);
  const float sum = sum_rows<Traits>(p.k.at(kv_head / p.kv_heads, kv_head % p.kv_heads), p.k.row, count,
                                     p.geometry.head_dim, p.aligned, reinterpret_cast<float*>(shared));
  if (threadIdx.x < Traits::kHeadDim)
    p.guide[static_cast<int64>(blockIdx.x) * Traits::kHeadDim + threadIdx.x] = count == 0 ? 0.f : sum / count;
}

// Block: a head, a segment and a run of its queries.
template <class Traits>
__device__ __forceinline__ void representatives(const RankQueriesParams& p, unsigned char* shared) {
  const int run = blockIdx.x % p.representatives, segments = p.geometry.segments();
  const int n = blockIdx.x / p.representatives % segments;
  const int head = blockIdx.x / p.representatives / segments;
  const int first = run * p.run, count = min(p.run, p.geometry.query_count(n) - first);
  if (count <= 0) return;  // a run that the short last segment leaves empty is no representative
  const uint16* q = p.q.at(head / p.heads, head % p.heads) + (p.geometry.query_begin(n) + first) * p.q.row;
  const float sum = sum_rows<Traits>(q, p.q.row, count, p.geometry.head_dim, p.aligned,
                                     reinterpret_cast<float*>(shared));
  if (threadIdx.x < Traits::kHeadDim) {
    const float mean = sum / count * p.sign;
    const uint16 high = static_cast<uint16>(Traits::Element::pack(mean, 0.f));
    const float kept = Traits::Element::to_float(high);
    const float rest = fabsf(kept) < infinity() ? mean - kept : 0.f;  // infinity less itself is NaN
    const int64 target = static_cast<int64>(blockIdx.x) * Traits::kHeadDim + threadIdx.x;
    p.high[target] = high;
    p.low[target] = static_cast<uint16>(Traits::Element::pack(rest, 0.f));
  }
}

// Block: a head and a segment.
template <class Traits>
__device__ __forceinline__ void query_order(const RankQueriesParams& p, unsigned char* shared) {
  const Geometry& g = p.geometry;
  const int n = blockIdx.x % g.segments(), head = blockIdx.x / g.segments();
  const int batch = head / p.heads, kv_head = head % p.heads / (p.heads / p.kv_heads);
  const int count = g.query_count(n);
  const uint16* q = p.q.at(batch, head % p.heads) + g.query_begin(n) * p.q.row;
  const float* guide = p.guide + ((static_cast<int64>(batch) * p.kv_heads + kv_head) * 2 + (n > 0)) * Traits::kHeadDim;
  uint64* slots = reinterpret_cast<uint64*>(shared);  // [sort_slots] (inverted score, offset): ascending is the order

  const int lane = threadIdx.x % Traits::kLanes;
  float weight[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) weight[e] = guide[lane * 8 + e] * p.sign;
  for (int base = 0; base < p.sort_slots; base += Traits::kRows) {
    const int r = base + threadIdx.x / Traits::kLanes;
    float score = 0.f;
    if (r < count) {
      float x[8];
      read_row<Traits>(x, q + r * p.q.row, lane, g.head_dim, p.aligned);
#pragma unroll
      for (int e = 0; e < 8; ++e) score += x[e] * weight[e];
    }
#pragma unroll
    for (int step = Traits::kLanes / 2; step > 0; step /= 2) score += __shfl_xor_sync(kFullWarp, score, step);
    if (lane == 0 && r < p.sort_slots)
      slots[r] = r < count ? static_cast<uint64>(~sortable(score)) << 32 | r : ~0ull;
  }
  __syncthreads();
  bitonic_sort(slots, p.sort_slots);
  int* order = p.q_order + static_cast<int64>(blockIdx.x) * g.segment;
  for (int i = threadIdx.x; i < count; i += kRankThreads) order[i] = static_cast<int>(slots[i]);
}

}  // namespace s2o
