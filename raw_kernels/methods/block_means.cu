// Mean rows of blocks of q and k, and how alike the rows of a block are.
//
//   x [batch, heads / shared_heads, seqlen, head_dim] -> means [batch * heads, blocks, 2, kHeadDim], 0 past head_dim
//                                                        similarity [batch * heads, blocks], of alike_block_means
//
// A mean is kept as two numbers of x's dtype: the nearest to it, and the nearest to what that leaves. One that is not
// finite is NaN. The similarity is the mean cosine of all pairs of rows: the square of the mean of unit vectors.
#include "common/geometry.cuh"

namespace s2o {

struct MeansOf {
  Tensor<const uint16> x;
  const int* order;    // [batch * heads, seqlen]: block c has the rows order[c * block ..]; null: as they lie
  int64 order_row;     // from one head's order to the next one's
  uint16* means;       // [batch * heads, blocks, 2, kHeadDim]
  float* similarity;   // [batch * heads, blocks]
  int heads;           // of a sequence
  int shared_heads;    // of these that read one head of x
  int seqlen, block, blocks;
};

struct BlockMeansParams {
  MeansOf q, k;
  int of_q, of_k;      // blocks of rows of all heads
  int head_dim;
  int aligned;         // every row of x starts on 16 bytes
};

template <class Element_, int kHeadDim_>
struct BlockMeansTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256, kWarps = kThreads / 32;
  static constexpr int kLanes = kHeadDim / 8;  // of a row, 8 elements each
  static constexpr int kRows = 32 / kLanes;    // that a warp reads at a time
};

// Over neighbouring lanes, kCount of them from a stride of kFirst on.
template <int kCount, int kFirst = 1>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int stride = kFirst; stride < kFirst * kCount; stride *= 2) x += __shfl_xor_sync(kFullWarp, x, stride);
  return x;
}
// The eight elements of 16 bytes, each time anew: the compiler would hold them in registers.
template <class Element>
__device__ __forceinline__ void unpack(float (&y)[8], const uint4& packed) {
  uint32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
  asm volatile("" : "+r"(pairs[0]), "+r"(pairs[1]), "+r"(pairs[2]), "+r"(pairs[3]));
#pragma unroll
  for (int e = 0; e < 8; ++e) y[e] = e % 2 ? Element::high(pairs[e / 2]) : Element::low(pairs[e / 2]);
}

// 1 / |y| of rows that kLanes neighbouring lanes have 8 elements each of; 0 of a row of zeros, NaN of one that has one.
// All lanes of a warp call it. In float64, which squares do not leave.
template <class Element, int kLanes>
__device__ __forceinline__ float inverse_norm(const uint4& packed) {
  float y[8];
  unpack<Element>(y, packed);
  double squares = 0.;
#pragma unroll
  for (int e = 0; e < 8; ++e) squares = fma(static_cast<double>(y[e]), static_cast<double>(y[e]), squares);
#pragma unroll
  for (int stride = 1; stride < kLanes; stride *= 2) squares += __shfl_xor_sync(kFullWarp, squares, stride);
  double inverse;
  asm("rsqrt.approx.ftz.f64 %0, %1;" : "=d"(inverse) : "d"(squares));
  return static_cast<float>(squares > 0. ? inverse : squares);
}

constexpr int kBatch = 4;  // rows whose elements are on their way at once

// Of four rows at a time, which takes fewer shuffles than four times one row: a quarter of the lanes has each row's sum.
template <class Element, int kLanes>
__device__ __forceinline__ void inverse_norms(float (&inverse)[kBatch], const uint4 (&packed)[kBatch]) {
  static_assert(kBatch == 4 && kLanes >= 8);
  float squares[kBatch] = {};
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    float y[8];
    unpack<Element>(y, packed[i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) squares[i] = fmaf(y[e], y[e], squares[i]);
  }
  const int lane = threadIdx.x % 32;
  const bool upper = lane & kLanes / 2, odd = lane & kLanes / 4;
  float half[2];
#pragma unroll
  for (int i = 0; i < 2; ++i)
    half[i] = (upper ? squares[i + 2] : squares[i]) +
              __shfl_xor_sync(kFullWarp, upper ? squares[i] : squares[i + 2], kLanes / 2);
  float mine = (odd ? half[1] : half[0]) + __shfl_xor_sync(kFullWarp, odd ? half[0] : half[1], kLanes / 4);
  mine = lanes_sum<kLanes / 4>(mine);
  if (__all_sync(kFullWarp, mine > 1e-30f && mine < infinity())) {
    mine = rsqrtf(mine);
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      inverse[i] = __shfl_sync(kFullWarp, mine, (lane & 32 - kLanes) + i * (kLanes / 4));
  } else {
#pragma unroll 1
    for (int i = 0; i < kBatch; ++i) {
      uint4 row = packed[0];
#pragma unroll
      for (int j = 1; j < kBatch; ++j)
        if (i == j) row = packed[j];
      const float x = inverse_norm<Element, kLanes>(row);
#pragma unroll
      for (int j = 0; j < kBatch; ++j) inverse[j] = i == j ? x : inverse[j];
    }
  }
}

// Warp: a block of rows of a head; heads that share rows stand side by side.
template <class Traits, bool kAlike>
__device__ __forceinline__ void means_of_block(const MeansOf& p, uint32 index, int head_dim, bool aligned) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kRows = Traits::kRows;
  const int member = index % p.shared_heads;
  index /= p.shared_heads;
  const int c = index % p.blocks, source = index / p.blocks, head = source * p.shared_heads + member;
  const int of_sequence = p.heads / p.shared_heads;
  const uint16* x = p.x.at(source / of_sequence, source % of_sequence);
  const int begin = c * p.block, count = min(p.block, p.seqlen - begin);
  const int* order = p.order ? p.order + head * p.order_row + begin : nullptr;
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x % 32 / kLanes;
  const bool inside = lane * 8 < head_dim;
  const auto row = [&](int r) { return x + static_cast<int64>(order ? order[r] : begin + r) * p.x.row + lane * 8; };
  const float factor = 1.f / count;  // of each row, as a sum of large ones may be too large

  float total[8] = {}, units[8] = {};
  const auto take = [&](const uint4 (&packed)[kBatch]) {
    float inverse[kBatch];
    if constexpr (kAlike) inverse_norms<Element, kLanes>(inverse, packed);  // all lanes of a warp take part
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      float y[8];
      unpack<Element>(y, packed[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        total[e] = fmaf(y[e], factor, total[e]);
        if constexpr (kAlike) units[e] = fmaf(y[e], inverse[i], units[e]);
      }
    }
  };
  if (aligned) {
#pragma unroll 1
    for (int first = slot; first < p.block; first += kBatch * kRows) {
      uint4 packed[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int r = first + i * kRows;
        packed[i] = load_16_or_zeros(row(min(r, count - 1)), inside && r < count);
      }
      take(packed);
    }
  } else {
#pragma unroll 1
    for (int r = slot; r < p.block; r += kRows) {
      uint4 packed[kBatch] = {};
      packed[0] = load_unaligned(row(min(r, count - 1)), 0, r < count ? head_dim - lane * 8 : 0);
      take(packed);
    }
  }
  const auto over_rows = [](float (&x)[8]) {  // of the warp, in all of its lanes
#pragma unroll
    for (int e = 0; e < 8; ++e) x[e] = lanes_sum<32 / kLanes, kLanes>(x[e]);
  };
  over_rows(total);
  const int64 at = static_cast<int64>(head) * p.blocks + c;
  if (slot == 0) {
    uint32 high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float rest[2];
      uint32 nearest[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float mean = total[2 * e + i];
        nearest[i] = fabsf(mean) < infinity() ? Element::pack(mean, 0.f) & 0xffffu : 0x7fffu;
        rest[i] = mean - Element::low(nearest[i]);
        rest[i] = fabsf(rest[i]) < infinity() ? rest[i] : 0.f;
      }
      high[e] = nearest[0] | nearest[1] << 16;
      low[e] = Element::pack(rest[0], rest[1]);
    }
    uint16* to = p.means + at * 2 * Traits::kHeadDim + lane * 8;
    store_global_16(to, high[0], high[1], high[2], high[3]);
    store_global_16(to + Traits::kHeadDim, low[0], low[1], low[2], low[3]);
  }
  if constexpr (!kAlike) return;
  over_rows(units);
  float squares = 0.f;
#pragma unroll
  for (int e = 0; e < 8; ++e) squares = fmaf(units[e] * factor, units[e] * factor, squares);
  squares = lanes_sum<kLanes>(squares);
  if (threadIdx.x % 32 == 0) p.similarity[at] = squares;
}

template <class Traits, bool kAlike>
__device__ __forceinline__ void means_of_blocks(const BlockMeansParams& p) {
  const int index = blockIdx.x * Traits::kWarps + threadIdx.x / 32;
  if (index < p.of_q) {
    means_of_block<Traits, kAlike>(p.q, index, p.head_dim, p.aligned);
  } else if (index < p.of_q + p.of_k) {
    means_of_block<Traits, kAlike>(p.k, index - p.of_q, p.head_dim, p.aligned);
  }
}

template <class Traits>
__device__ __forceinline__ void block_means(const BlockMeansParams& p) {
  means_of_blocks<Traits, false>(p);
}
template <class Traits>
__device__ __forceinline__ void alike_block_means(const BlockMeansParams& p) {
  means_of_blocks<Traits, true>(p);
}

}  // namespace s2o
