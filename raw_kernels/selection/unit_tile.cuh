// Rows of 8 bits, floats (e4m3) or integers, as the kernels of rank="query" lay them out: which row of which tile a unit's
// keys are, and where the bytes of a row stand.
//
// Of every four floats of a key the two largest are kept, and which these are: two of four is what wgmma multiplies at twice
// the rate of all four. Which elements are four together is Spread's.
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
// where a unit has four groups the lane four further has the others, of eight the three lanes four, eight and twelve further.
template <int kClusters>
struct UnitRow {
  static_assert(kClusters == 2 || kClusters == 4 || kClusters == 8);
  static constexpr int kTiles = 2 * kClusters, kUnits = 16 / kClusters;  // of the units; of a warp in a tile
  int tile, row;
  __device__ __forceinline__ UnitRow(int unit, int cluster)
      : tile(unit % 32 / kUnits),
        row(unit / 32 * 16 + cluster % 2 * 8 + unit % kUnits * (kClusters / 2) + cluster / 2) {}
  // The unit whose score a lane keeps, and of which tile.
  static __device__ __forceinline__ int kept_tile(int lane) { return lane % kTiles; }
  static __device__ __forceinline__ int kept_unit(int lane) {
    return kept_tile(lane) * kUnits + lane / 4 / (kClusters / 2);
  }
};

// The same among tiles of 8-bit integers, for mma. A tile has 8 * kUnits neighbouring units. A thread of a product has rows
// lane / 4, 8 more, 16 more ... of it, which are all groups of its units lane / 4, 8 more ...
template <int kClusters>
struct ThreadUnits {
  static_assert(kClusters == 2 || kClusters == 4 || kClusters == 8);
  static constexpr int kUnits = 8 / kClusters;  // of a thread
  int tile, row;
  __device__ __forceinline__ ThreadUnits(int unit, int cluster)
      : tile(unit / (8 * kUnits)), row(unit % 8 + (unit / 8 % kUnits * kClusters + cluster) * 8) {}
  // Of a KV head.
  static __device__ __forceinline__ int64 tiles(int units) {
    return static_cast<int64>((units + kSuperUnits - 1) / kSuperUnits) * (2 * kClusters);
  }
};

// Rows of floats, of queries as of keys, have their elements in this order. Neighbours have nearly the same frequency of a
// rotary embedding and are large or small together, so that of four of them two large ones might be left out and two small
// ones kept. A four has elements from all over the row instead: columns 8 lane .. are the first elements of the lane's four
// pairs of neighbours, the next four columns their second ones.
template <int kHeadDim>
struct Spread {
  static constexpr int kLanes = kHeadDim / 8, kHalf = kHeadDim / 4;  // of a row; pairs of half a row
  // The number of pair `i` of a lane: two of the row's first half, from its either end, and two of the other half.
  static __device__ __forceinline__ int pair(int lane, int i) {
    const int shifted = (lane + kLanes / 2) % kLanes;
    return i == 0 ? lane : i == 1 ? kHalf - 1 - lane : i == 2 ? kHalf + shifted : 2 * kHalf - 1 - shifted;
  }
  // The lane's pairs of a row; zeros past its `dims` elements, a multiple of 8.
  static __device__ __forceinline__ uint4 load(const uint16* row, int lane, int dims) {
    const auto at = [&](int i) { return load_4_or_zeros(row + pair(lane, i) * 2, pair(lane, i) * 2 < dims); };
    return make_uint4(at(0), at(1), at(2), at(3));
  }
  // Columns 8 lane .. of a row.
  template <class Element>
  static __device__ __forceinline__ void unpack(float (&x)[8], const uint4& packed) {
    const uint32 pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = Element::low(pairs[i]), x[4 + i] = Element::high(pairs[i]);
  }
};

// A tile of keys, as the threads of wgmma have it in registers. Each part of 64 columns is 16 bytes of a thread, those it
// keeps of a row and of the one eight further; behind them stand the choices, a word of a thread for each part.
template <int kHeadDim>
struct KeyTile {
  static constexpr int kParts = kHeadDim / 64, kOfThread = 16;  // bytes of a part
  static constexpr int kKept = kTileRows * kHeadDim / 2, kBytes = kKept + 128 * kParts * 4;
  // Where a thread's 16 bytes of a part, and its choices, begin.
  static __device__ __forceinline__ uint32 kept_of(int thread, int part) {
    return ((thread / 32 * kParts + part) * 32 + thread % 32) * kOfThread;
  }
  static __device__ __forceinline__ uint32 choices_of(int thread) { return kKept + thread * kParts * 4; }
  // Where the four elements kept of columns 8 eighth .. of a row stand: one register of one thread.
  static __device__ __forceinline__ uint32 kept_at(int row, int eighth) {
    const int four = eighth % 8, of_part = four % 4;
    return kept_of(row / 16 * 32 + row % 8 * 4 + of_part, eighth / 8) + (four / 4 * 2 + row % 16 / 8) * 4;
  }
  // Where the word with the choices of four such eighths stands; a byte of it is an eighth's.
  static __device__ __forceinline__ uint32 choices_at(int row, int eighth) {
    const int thread = row / 16 * 32 + row % 8 * 4 + eighth % 8 / 4 * 2 + row % 16 / 8;
    return choices_of(thread) + eighth / 8 * 4;
  }
};

// A tile of 8-bit integers, as the threads of mma have it in registers: of each 16 rows and 32 columns 16 bytes of a thread.
// These are four columns of row lane / 4 and of the row eight further, then the next four columns of both.
template <int kHeadDim>
struct IntegerTile {
  static constexpr int kParts = kHeadDim / 32, kBytes = kTileRows * kHeadDim;
  static __device__ __forceinline__ uint32 of(int sixteen, int part, int lane) {
    return ((sixteen * kParts + part) * 32 + lane) * 16;
  }
  // Where columns 8 eighth .. of a row stand; the four after these stand 8 bytes further.
  static __device__ __forceinline__ uint32 at(int row, int eighth) {
    return of(row / 16, eighth / 4, row % 8 * 4 + eighth % 4) + row % 16 / 8 * 4;
  }
};

// Which two of four elements are kept: those of the largest magnitude, of equal ones the first; what is not finite is
// larger than all else. `choice` has the place of the first in two bits, above it that of the second.
__device__ __forceinline__ void keep_two(const float (&x)[4], float& first, float& second, uint32& choice) {
  float size[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) size[i] = fminf(fabsf(x[i]), infinity());  // of NaN the other
  // The larger one of the first two and that of the last two, unless both of two are larger than the others.
  const bool both_first = fminf(size[0], size[1]) >= fmaxf(size[2], size[3]);
  const bool both_last = fminf(size[2], size[3]) > fmaxf(size[0], size[1]);
  const bool zero = (size[0] >= size[1] || both_first) && !both_last, two = size[2] >= size[3] && !both_last;
  first = both_last ? x[2] : zero ? x[0] : x[1];
  second = both_first ? x[1] : two ? x[2] : x[3];
  choice = (both_last ? 2 : zero ? 0 : 1) | (both_first ? 4 : two ? 8 : 12);
}

// Where byte `column` of a row of queries stands in shared memory: swizzled in pieces of 16 bytes, by 128 bytes or, of rows
// of 64, by 64.
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

// A float32 whose bits count: those of kOrigin + n are its own plus n, and end in those of n, as long as the sum is at least
// 2^23 and below 2^24.
constexpr float kOrigin = 14680064.f;

// Integers are so large at most that sums of kHeadDim products are below 2^21.
template <int kHeadDim>
constexpr float kLargestInt8 = kHeadDim > 128 ? 90.f : 127.f;

// What a step of such integers is of which the largest magnitude is `largest`.
template <int kHeadDim>
__device__ __forceinline__ float step_of_int8(float largest) {
  return fmaxf(largest * (1.f / kLargestInt8<kHeadDim>), 1e-30f);
}

// Four numbers in steps, rounded to the nearest integer. `factor`: 1 over the step. NaN becomes any byte.
__device__ __forceinline__ uint32 pack_int8(float x0, float x1, float x2, float x3, float factor) {
  const auto bits = [&](float x) { return __float_as_uint(fmaf(x, factor, kOrigin)); };
  return __byte_perm(__byte_perm(bits(x0), bits(x1), 0x0040), __byte_perm(bits(x2), bits(x3), 0x0040), 0x5410);
}

}  // namespace s2o
