// Adds what candidates weigh that a q tile has not visited, and their values to first order. After pass 2, in place.
//
//   kTailSamples unvisited candidates, denser where they come earlier in the order, give for each query
//     mass  their sum of exp(score), by the share that each stands for, and less of it the fewer of them carry it
//     tilt  how far their mean score moves once they are weighted by it, over the variance of scores: 1 for scores that
//           are spread like a normal distribution, and kept within [0, 1]
//   value = mean_value + tilt * scale * covariance query, the regression of values on scores at the weighted mean score
//   out, lse <- with the mass at that value; as they are where something of it is not finite
//
// A warp has 16 queries and multiplies them with all samples, then with all rows of the covariance, kTailSlice at a time.
// A thread reads 16 bytes of a row at once, of queries and outputs from global and of what they are multiplied with from
// shared memory: it holds dimensions 8 t .. 8 t + 7 of each 32, t = lane % 4. A product takes dimensions in any order,
// if both sides have the same.
#include "tail/tail_rows.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kBuffers_, bool kAligned_, bool kPaged_>
struct TailTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256;
  static constexpr int kBuffers = kBuffers_;  // 2: samples and covariances are on their way together
  static constexpr bool kAligned = kAligned_;  // every row of q, k and out starts on 16 bytes
  static constexpr bool kPaged = kPaged_;
  static constexpr int kChunks = kHeadDim / 8;  // 16 bytes each, of a row
  static constexpr int kRows = kHeadDim < kTailSamples ? kHeadDim : kTailSamples;  // of the covariance in a buffer
  static_assert(kBuffers == 1 || kRows == kHeadDim, "one buffer for all of it");
  static_assert(kThreads / 32 * 16 == kTailSamples, "as many queries as samples");
  struct Shared {
    uint16 rows[kBuffers][kTailSamples * kHeadDim];  // samples, and covariances in the last
    TailRowsShared<kHeadDim> at;
  };
};

template <class Traits>
struct TailTile : TailRows<Traits> {
  using Rows = TailRows<Traits>;
  using Element = typename Traits::Element;
  using Rows::at, Rows::lane, Rows::p;
  static constexpr int kHeadDim = Traits::kHeadDim, kChunks = Traits::kChunks, kThreads = Traits::kThreads;
  static constexpr int kBuffers = Traits::kBuffers, kGroups = kHeadDim / 32, kTiles = Rows::kTiles;
  static constexpr int kRowsAtOnce = kThreads / kChunks;  // that the block copies

  typename Traits::Shared& shared;
  uint4 q[2][kGroups];  // of both rows

  __device__ __forceinline__ TailTile(const AddTailParams& p_, typename Traits::Shared& shared_)
      : Rows(p_, shared_.at), shared(shared_) {}

  // Where a chunk of a row stands in a buffer, in bytes: odd rows have halves of 8 chunks exchanged, so that reads meet
  // no two in a bank.
  static __device__ __forceinline__ uint32 place(int row, int chunk) {
    return row * (kHeadDim * 2) + (chunk ^ row % 2 * 4) * 16;
  }

  __device__ __forceinline__ void load_samples() const {
    const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint32 to = shared_address(shared.rows[0]) + place(first, chunk);
    const int dims = p.geometry.head_dim - chunk * 8;  // from this chunk on
    if constexpr (Traits::kAligned) {
#pragma unroll
      for (int r = 0; r < kTailSamples; r += kRowsAtOnce)
        cp_async_16_or_zeros(to + r * (kHeadDim * 2), at.samples[first + r] + chunk * 8, dims > 0);
      cp_async_commit();
    } else {
#pragma unroll 1
      for (int r = 0; r < kTailSamples; r += kRowsAtOnce)
        store_shared_16(to + r * (kHeadDim * 2), load_unaligned(at.samples[first + r], chunk * 8, chunk * 8 + dims));
    }
  }
  // Rows `first` to first + kRows of it.
  __device__ __forceinline__ void load_covariance(int first) const {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint16* from = at.work.covariance + first * kHeadDim + threadIdx.x * 8;
    const uint32 to = shared_address(shared.rows[kBuffers - 1]) + place(covariance_place(row), chunk);
#pragma unroll
    for (int r = 0; r < Traits::kRows; r += kRowsAtOnce)
      cp_async_16(to + covariance_place(r) * (kHeadDim * 2), from + r * kHeadDim);
    cp_async_commit();
  }
  __device__ __forceinline__ void load_queries() {
    if constexpr (Traits::kAligned) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint16* row = at.queries[Rows::row_of_tile() + h * 8];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int first = g * 32 + lane % 4 * 8;
          q[h][g] = load_16_or_zeros(row + first, row != nullptr && first < p.geometry.head_dim);
        }
      }
    } else {
      const uint32 buffer = shared_address(shared.rows[0]);
#pragma unroll 1
      for (int i = threadIdx.x; i < kTailSamples * kChunks; i += kThreads) {
        const uint16* row = at.queries[i / kChunks];
        store_shared_16(buffer + place(i / kChunks, i % kChunks),
                        load_unaligned(row, i % kChunks * 8, row == nullptr ? 0 : p.geometry.head_dim));
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          q[h][g] = load_shared_16(buffer + place(Rows::row_of_tile() + h * 8, g * 4 + lane % 4));
      __syncthreads();  // samples take the place
    }
  }

  // acc[16, kTailSlice] = queries times as many rows of a buffer; `rows`: of the first, the byte that this thread reads
  // first but for the exchange of odd rows.
  template <class Type>
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], uint32 rows) const {
    const uint32 odd = lane / 4 % 2 * 64, halves[2] = {rows + odd, rows + 64 - odd};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[j][e] = 0.f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32 low[4] = {q[0][g].x, q[1][g].x, q[0][g].y, q[1][g].y};
      const uint32 high[4] = {q[0][g].z, q[1][g].z, q[0][g].w, q[1][g].w};
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint32 from = halves[g % 2] + g / 2 * 128 + j * (8 * kHeadDim * 2);
        const uint4 b = load_shared_16(from), c = load_shared_16(from + 8 * kHeadDim * 2);
        Type::mma(acc[j], low, b.x, b.y);
        Type::mma(acc[j + 1], low, c.x, c.y);
        Type::mma(acc[j], high, b.z, b.w);
        Type::mma(acc[j + 1], high, c.z, c.w);
      }
    }
  }
  __device__ __forceinline__ uint32 thread_rows(const uint16* buffer) const {
    return shared_address(buffer) + lane / 4 * (kHeadDim * 2) + lane % 4 * 16;
  }

  __device__ __forceinline__ void add() {
    if (threadIdx.x < 32) Rows::describe();
    __syncthreads();
    if (at.work.left <= 0) return;
    Rows::load_mean();
    if constexpr (kBuffers == 2) load_covariance(0);
    Rows::find_rows();
    __syncthreads();
    if constexpr (Traits::kAligned) load_samples();
    load_queries();
    if constexpr (!Traits::kAligned) load_samples();  // in a place that queries are read from
    float lse[2];
    Rows::load_lse(lse);
    Rows::prefetch_outputs();
    cp_async_wait<0>();
    __syncthreads();

    float x[kTiles][4], mass[2] = {}, tilt[2] = {};
    const auto product = [&](int j, int h, int e) { return x[j][2 * h + e]; };
    if (__shfl_sync(kFullWarp, threadIdx.x / 32, 0) * 16 < at.work.count) {
      const uint32 rows = thread_rows(shared.rows[0]);
      const auto multiply_samples = [&](int first) { multiply<Element>(x, rows + first * (kHeadDim * 2)); };
      Rows::find_mass(lse, mass, tilt, multiply_samples, product,
                      [](bool mine) { return __any_sync(kFullWarp, mine); });
    }
    const bool adds = mass[0] > 0.f || mass[1] > 0.f;
    if constexpr (kBuffers == 1) {
      if (!__syncthreads_or(adds)) return;  // and everybody has read the samples
    } else {
      if (!__any_sync(kFullWarp, adds)) return;
    }
    to_bfloat16();
    Rows::begin_outputs(mass, tilt);
    const uint32 rows = thread_rows(shared.rows[kBuffers - 1]);
#pragma unroll 1
    for (int d = 0; d < p.geometry.head_dim; d += kTailSlice) {
      if (kBuffers == 1 && d % Traits::kRows == 0) {
        if (d) __syncthreads();  // everybody has read those before
        load_covariance(d);
      }
      uint4 before[2];
      Rows::load_outputs(before, d);
      if (kBuffers == 1 && d % Traits::kRows == 0) {
        cp_async_wait<0>();
        __syncthreads();
      }
      multiply<Bfloat16>(x, rows + d % Traits::kRows * (kHeadDim * 2));
      Rows::add_to_outputs(d, before, product);
    }
  }
  __device__ __forceinline__ void to_bfloat16() {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint4& x = q[h][g];
        x = make_uint4(Rows::as_bfloat16(x.x), Rows::as_bfloat16(x.y), Rows::as_bfloat16(x.z), Rows::as_bfloat16(x.w));
      }
  }
};

// Block: a q tile.
template <class Traits>
__device__ __forceinline__ void add_tail(const AddTailParams& p, typename Traits::Shared& shared) {
  TailTile<Traits>(p, shared).add();
}

}  // namespace s2o
