// Outputs that stay finite where all values are.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

// x, of a size of at most `most` unless it is infinite or NaN. Counted from infinity's bits on, those of finite sizes
// come last, so that no element takes a predicate. In one piece: a copy of an accumulator to an integer would be made
// before wgmma is done with it.
__device__ __forceinline__ void limit_if_finite(float& x, float most) {
  asm volatile(
      "{\n.reg .u32 sign, size, most;\nmov.b32 size, %0;\nmov.b32 most, %1;\nand.b32 sign, size, 0x80000000;\n"
      "and.b32 size, size, 0x7fffffff;\nsub.u32 size, size, 0x7f800000;\nsub.u32 most, most, 0x7f800000;\n"
      "min.u32 size, size, most;\nadd.u32 size, size, 0x7f800000;\nor.b32 size, size, sign;\nmov.b32 %0, size;\n}"
      : "+f"(x)
      : "f"(most));
}

// Two elements, that become no infinity by rounding.
template <class Element>
__device__ __forceinline__ uint32 pack_finite(float low, float high) {
  if constexpr (!Element::kWide) {
    limit_if_finite(low, Element::kLargest);
    limit_if_finite(high, Element::kLargest);
  }
  return Element::pack(low, high);
}

// An output is a mean of values, weighted with p / l, and no larger than the largest of them. But p is rounded to 16
// bits for its product with v, and l is summed before that: the rounded weights may add up to 1 + 2^-11 times l, or
// more if they are tiny. Where values are 65504, the largest float16, such a mean would round to infinity; here it
// becomes 65504. An infinity among the values that the row sees makes acc infinite in float32 already, where no sum of
// finite values comes near, and stays. Of bfloat16, which reaches as far as float32 does, nothing is done.
//
//   element(i): element i < kElements of this thread's part of a row's acc; l: the row's sum of weights
template <class Element, int kElements, class Row>
__device__ __forceinline__ void keep_finite(const Row& element, float l) {
  if constexpr (!Element::kWide) {
    const float most = Element::kLargest * l;
    float sum[4] = {};  // no less than the largest, and an addition takes half a maximum's time
#pragma unroll
    for (int i = 0; i < kElements; ++i) sum[i % 4] += fabsf(element(i));
    if ((sum[0] + sum[1]) + (sum[2] + sum[3]) <= most) return;
#pragma unroll
    for (int i = 0; i < kElements; ++i) limit_if_finite(element(i), most);
  }
}

}  // namespace s2o
