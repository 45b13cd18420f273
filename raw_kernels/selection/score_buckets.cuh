// The bucket of a score in a range of scores; reference/key_order.py: score_buckets.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

__device__ __forceinline__ uint32 swapped_halves(uint32 x) { return x >> 16 | x << 16; }

// The largest and the smallest finite float16, of each half of packed pairs by itself: NaN if there is none.
struct ScoreRange {
  uint32 high = 0x7fff7fffu, low = 0x7fff7fffu;

  ScoreRange() = default;
  __device__ __forceinline__ ScoreRange(uint32 high, uint32 low) : high(high), low(low) {}
  __device__ __forceinline__ void take(uint32 scores) {
    uint32 x;  // 0 times an infinity is NaN, which loses against any number
    asm("fma.rn.f16x2 %0, %1, %2, %1;" : "=r"(x) : "r"(scores), "r"(0u));
    high = Float16::larger(high, x);
    low = Float16::smaller(low, x);
  }
  __device__ __forceinline__ void join(const ScoreRange& other) {
    high = Float16::larger(high, other.high);
    low = Float16::smaller(low, other.low);
  }
  // With the lanes that differ in the bits of `mask`, which must be a power of two less 1.
  __device__ __forceinline__ void join_lanes(int mask) {
#pragma unroll
    for (int step = 1; step <= mask; step *= 2)
      join({__shfl_xor_sync(kFullWarp, high, step), __shfl_xor_sync(kFullWarp, low, step)});
  }
  __device__ __forceinline__ ScoreRange swapped() const { return {swapped_halves(high), swapped_halves(low)}; }
};

template <int kBuckets>
struct ScoreBuckets {
  static_assert(kBuckets <= 1024, "float16 tells integers apart from 1024 to 2047, by its last ten bits");
  uint32 high, factor;  // of each half

  __device__ __forceinline__ explicit ScoreBuckets(const ScoreRange& range) {
    const auto finite = [](float x) { return x == x ? x : 0.f; };
    const auto factor_of = [](float top, float bottom) {
      return fminf(__fdiv_rn(kBuckets - 2.f, __fsub_rn(top, bottom)), 65504.f);
    };
    const float top[2] = {finite(Float16::low(range.high)), finite(Float16::high(range.high))};
    high = Float16::pack(top[0], top[1]);
    factor = Float16::pack(factor_of(top[0], finite(Float16::low(range.low))),
                           factor_of(top[1], finite(Float16::high(range.low))));
  }

  // 1024 + bucket of two scores as float16, whose last bits then are the bucket. NaN loses against the first bucket,
  // which is its own and plus infinity's, so the maximum comes before the minimum.
  __device__ __forceinline__ uint32 operator()(uint32 scores) const {
    constexpr uint32 kFirst = 0x64006400u, kFinite = kFirst + 0x10001u, kLast = kFirst + (kBuckets - 1) * 0x10001u;
    uint32 x;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(high), "r"(scores));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(x), "r"(factor), "r"(kFinite));
    return Float16::smaller(Float16::larger(x, kFirst), kLast);
  }
};

}  // namespace s2o
