// Rows of 8-bit floats (e4m3) as the kernels of rank="query" lay them out: which row of which tile a unit's keys are, and
// where the bytes of a row stand in a tile that wgmma reads.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

constexpr int kBlockUnits = spec::kBlockUnits;  // neighbouring units that one row of block_keys stands for
constexpr int kSuperUnits = 128;  // units whose scores are written together
constexpr int kTileRows = 64;     // of a tile
// Rows are scaled so that those of the first keys are shorter than 2^(kKeyExponent + 1), and queries shorter than
// 2^(kQueryExponent + 1): products fit float16, those of keys eight times as long too.
constexpr int kKeyExponent = spec::kKeyExponent, kQueryExponent = spec::kQueryExponent;
constexpr int kMostExponent = spec::kMostExponent;  // of both together: norms of queries fit float16 too

// Where the mean of a group of a unit's keys stands among the tiles of kSuperUnits units. A warp has 32 neighbouring ones,
// a few of them in each of its 16 rows of a tile; a thread of a product has rows lane / 4 and 8 more, both of one unit, and
// where a unit has four groups the lane four further has the others.
template <int kClusters>
struct UnitRow {
  static_assert(kClusters == 2 || kClusters == 4);
  static constexpr int kTiles = 2 * kClusters, kUnits = 16 / kClusters;  // of the units; of a warp in a tile
  int tile, row;
  __device__ __forceinline__ UnitRow(int unit, int cluster)
      : tile(unit % 32 / kUnits),
        row(unit / 32 * 16 + cluster % 2 * 8 + unit % kUnits * (kClusters / 2) + cluster / 2) {}
  // The unit whose score a lane keeps, and of which tile.
  static __device__ __forceinline__ int kept_tile(int lane) {
    return kClusters == 2 ? lane % 4 : lane / 4 % 2 * 4 + lane % 4;
  }
  static __device__ __forceinline__ int kept_unit(int lane) {
    return kept_tile(lane) * kUnits + lane / 4 / (kClusters / 2);
  }
};

// Where byte `column` of a row stands in a tile: swizzled in pieces of 16 bytes, by 128 bytes or, of rows of 64, by 64.
template <int kHeadDim>
__device__ __forceinline__ uint32 byte_of_row(int row, int column) {
  static_assert(kHeadDim == 64 || kHeadDim == 128, "rows of one swizzle");
  const int swizzle = kHeadDim == 128 ? row & 7 : row >> 1 & 3;
  return row * kHeadDim + ((column >> 4 ^ swizzle) << 4) + (column & 15);
}

// Half the exponent of a squared length, rounded down: the length is below 2^(this + 1). Of 0: a very small one.
__device__ __forceinline__ int half_exponent(float squared) {
  const int exponent = static_cast<int>(__float_as_uint(squared) >> 23) - 127;
  return (exponent < -60 ? -60 : exponent > 120 ? 120 : exponent) >> 1;
}

__device__ __forceinline__ float power_of_two(int exponent) {
  return __uint_as_float(static_cast<uint32>(exponent + 127) << 23);
}

// Four numbers, rounded to the nearest e4m3; above its largest, 448, to that. What is not finite becomes NaN.
__device__ __forceinline__ uint32 pack_e4m3(float x0, float x1, float x2, float x3) {
#if __CUDA_ARCH__ >= 890
  const auto finite = [](float x) { return fabsf(x) < infinity() ? x : __int_as_float(0x7fffffff); };
  uint16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(finite(x1)), "f"(finite(x0)));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(finite(x3)), "f"(finite(x2)));
  return low | static_cast<uint32>(high) << 16;
#else
  return 0;
#endif
}

}  // namespace s2o
