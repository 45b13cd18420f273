// From the weights of a thread's compressed keys to those of blocks of keys.
#pragma once
#include "nsa/params.cuh"

namespace s2o {

// How compressed keys lie in blocks of keys.
struct BlockShape {
  int ratio;   // strides of a block
  bool twice;  // runs are twice a stride
  __device__ __forceinline__ explicit BlockShape(const NsaParams& p)
      : ratio(p.ratio()), twice(p.length >> p.stride_shift > 1) {}
};

// That of the default configuration, known to the compiler: without its branches a step takes half the instructions.
struct UsualBlockShape {
  static constexpr int ratio = 4;
  static constexpr bool twice = true;
  static __device__ __forceinline__ bool is_of(const NsaParams& p) {
    const BlockShape of(p);
    return of.ratio == ratio && of.twice == twice;
  }
};

// The sums of four neighbours each.
//
//   sum(x): of neighbour x, 0 where its token does not see it
template <int kKeys, class Sum>
__device__ __forceinline__ void add_fours(float (&four)[kKeys / 4], const Sum& sum) {
#pragma unroll
  for (int x = 0; x < kKeys / 4; ++x) four[x] = (sum(4 * x) + sum(4 * x + 1)) + (sum(4 * x + 2) + sum(4 * x + 3));
}

// `sum`: P, the weights that compressed keys have in the heads of a group together, of kKeys neighbours from first_key
// on: a thread's own, behind those of the thread before it among four; `four`: add_fours of them. `carried`: P of the
// last key before those of the four. Writes what is known of a token's blocks with these, to `weights` unless that is
// null, and returns the largest of it, or NaN. Called by whole warps.
//
// Block j has the sum of P over its stride of compressed keys, and where their runs are twice a stride the same one key
// earlier: that is 2 * sum - P[last of j] + P[last of j - 1].
template <int kKeys, class Shape, class Sum>
__device__ __forceinline__ float write_visible_weights(const Shape& shape, const Sum& sum,
                                                       const float (&four)[kKeys / 4], float& carried, int first_key,
                                                       float* weights) {
  const int lane = threadIdx.x % 32, t = lane % 4;
  const float last_before = __shfl_sync(kFullWarp, sum(kKeys - 1), lane / 4 * 4 + (t + 3) % 4);
  float before = t == 0 ? carried : last_before, most = 0.f;
  carried = last_before;
  const auto weight = [&](float all, float last) {
    const float w = shape.twice ? 2.f * all - last + before : all;
    before = last;
    most = max_or_nan(most, w);
    return w;
  };
  float* target = weights + first_key / shape.ratio;
#pragma unroll
  for (int x = 0; x < kKeys / 16; ++x) {  // 16 keys at a time
    const auto last = [&](int key) { return sum(16 * x + key); };
    if (shape.ratio == 4) {
      float4 w;
      w.x = weight(four[4 * x], last(3));
      w.y = weight(four[4 * x + 1], last(7));
      w.z = weight(four[4 * x + 2], last(11));
      w.w = weight(four[4 * x + 3], last(15));
      if (weights) reinterpret_cast<float4*>(target)[x] = w;
    } else if (shape.ratio == 8) {
      float2 w;
      w.x = weight(four[4 * x] + four[4 * x + 1], last(7));
      w.y = weight(four[4 * x + 2] + four[4 * x + 3], last(15));
      if (weights) reinterpret_cast<float2*>(target)[x] = w;
    } else {
      const float w = weight((four[4 * x] + four[4 * x + 1]) + (four[4 * x + 2] + four[4 * x + 3]), last(15));
      if (weights) target[x] = w;
    }
  }
  return most;
}

// Where a row's weights are; null of row -1, which there is not.
__device__ __forceinline__ float* weights_of(const NsaParams& p, int row) {
  return row >= 0 ? p.weights + static_cast<int64>(row) * p.weight_stride : nullptr;
}

// Leaves the largest of a row's weights with the thread's quarter of a step of compressed keys.
__device__ __forceinline__ void write_step_top(const NsaParams& p, int row, int step, float most) {
  if (row >= 0) p.step_tops[(static_cast<int64>(row) * p.step_stride + step) * 4 + threadIdx.x % 4] = most;
}

// write_visible_weights of sums of which some are not a number, or a later token's: those are of no weight.
template <int kKeys, class Shape>
__device__ __forceinline__ float write_block_weights(const Shape& shape, float (&sum)[kKeys], float& carried,
                                                     int first_key, int visible, float* weights) {
  if (first_key + kKeys > visible) {
#pragma unroll
    for (int x = 0; x < kKeys; ++x)
      if (first_key + x >= visible) sum[x] = 0.f;
  }
  const auto of = [&](int x) { return sum[x]; };
  float four[kKeys / 4];
  add_fours<kKeys>(four, of);
  return write_visible_weights<kKeys>(shape, of, four, carried, first_key, weights);
}

}  // namespace s2o
