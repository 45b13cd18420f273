// What parts of a row's keys weigh in the whole, by their log-sum-exps.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

// Of a warp that has a row: lane s holds part s. Each part is normalised; all is in log2 units.
struct PartWeights {
  float weight, own_weight;  // of the lane's part, and of one that all lanes know; they add up to 1, or all are 0
  float lse;                 // of the whole; minus infinity: no part has a key

  // Log-sum-exps of the lane's part and of the one that all know; minus infinity: it has no key.
  __device__ __forceinline__ PartWeights(float of_part, float own) {
    float top = fmaxf(of_part, own);
#pragma unroll
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
    const float base = top == -infinity() ? 0.f : top;
    weight = exp2_approx(of_part - base);
    own_weight = exp2_approx(own - base);
    float total = weight;
#pragma unroll
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kFullWarp, total, step);
    total += own_weight;
    const float inverse = total == 0.f ? 0.f : __fdividef(1.f, total);
    weight *= inverse;
    own_weight *= inverse;
    lse = total == 0.f ? -infinity() : base + __log2f(total);
  }
};

}  // namespace s2o
