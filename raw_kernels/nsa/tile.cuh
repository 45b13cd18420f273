// What the attention tiles of NSA are compiled for: the portable tile with 32 rows a warp, on whole chunks of 16 bytes.
#pragma once
#include "nsa/params.cuh"
#include "nsa/visible_values.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kStep_ = 64>
struct NsaTile {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kBlockM = 128, kThreads = 128;
  static constexpr int kStep = kStep_;  // keys that rows are multiplied with at once
  static constexpr int kRowTiles = 2, kKeyTiles = kStep / 8, kDimTiles = kHeadDim / 8, kChunks = kHeadDim / 8;
  static constexpr bool kAligned = true, kPaged = false, kAnyScale = true;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "a warp holds the accumulators of 32 rows");
};

// Starts the copy of rows first .. first + kRows - 1 of keys or values to shared memory; zeros from `end` on.
template <class Traits, int kRows>
__device__ __forceinline__ void copy_rows(uint32 tile, const uint16* data, int64 row_stride, int head_dim, int first,
                                          int end) {
  const int chunk = threadIdx.x % Traits::kChunks;
#pragma unroll
  for (int r = threadIdx.x / Traits::kChunks; r < kRows; r += Traits::kThreads / Traits::kChunks) {
    const bool present = first + r < end && chunk * 8 < head_dim;
    const uint16* row = data + static_cast<int64>(min(first + r, end - 1)) * row_stride;
    cp_async_16_or_zeros(chunk_address<Traits>(tile, r, chunk), present ? row + chunk * 8 : row, present);
  }
}

// The log of a row's sum of weights in log2 units, for a row with m and l of AttentionTile.
__device__ __forceinline__ float lse_of(float m, float l) { return l == 0.f ? -infinity() : m + __log2f(l); }

}  // namespace s2o
