// The bucket of a score in its row's range; reference/s2o.py: score_buckets.
#pragma once
#include "sortable.cuh"

namespace s2o {

struct ScoreBuckets {
  uint32 high, factor;  // pairs of the same float16

  // `range` as grow_range leaves it: zeros if no score is finite.
  __device__ __forceinline__ explicit ScoreBuckets(uint2 range) {
    const float top = range.x ? from_sortable(range.x) : 0.f;
    const float spread = __fsub_rn(top, range.y ? -from_sortable(range.y) : 0.f);
    const float parts = fminf(__fdiv_rn(spec::kKeyBuckets - 1.f, spread), 65504.f);
    high = Float16::pack(top, top);
    factor = Float16::pack(parts, parts);
  }

  // kKeyBuckets + bucket of two scores as float16, whose last bits then are the bucket. NaN loses against the first
  // bucket, so the maximum comes before the minimum.
  __device__ __forceinline__ uint32 operator()(uint32 scores) const {
    static_assert(spec::kKeyBuckets == 1024, "float16 tells integers apart from 1024 to 2047, by its last ten bits");
    constexpr uint32 kFirst = 0x64006400u, kLast = 0x67ff67ffu;
    uint32 x;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(x) : "r"(high), "r"(scores));
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(x) : "r"(x), "r"(factor), "r"(kFirst));
    asm("max.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(kFirst));
    asm("min.f16x2 %0, %1, %2;" : "=r"(x) : "r"(x), "r"(kLast));
    return x;
  }
};

}  // namespace s2o
