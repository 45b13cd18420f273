// What unvisited keys have in common: means and covariances of leading values and keys, by running sums over parts
// (part_moments.cu).
//
//   part_products, part_sums
//     -> mean_values [batch * kv_heads, groups, kHeadDim], float32; NaN where a covariance of its row is not finite
//     -> covariances [batch * kv_heads, groups, kHeadDim of values, kHeadDim of keys], bfloat16
//
// Of groups in which no part ends nothing is written: no segment has them.
#include "common/ptx.cuh"
#include "tail/moment_groups.cuh"

namespace s2o {

struct KeyMomentsParams {
  const float* part_products;  // [batch * kv_heads, parts, kHeadDim (rows), kHeadDim (columns)]
  const float* part_sums;      // [batch * kv_heads, parts, 2, kHeadDim]: of values, and of keys
  float* mean_values;          // [batch * kv_heads, groups, kHeadDim]
  uint16* covariances;         // [batch * kv_heads, groups, kHeadDim (rows), kHeadDim (columns)]
  int parts, grain_shift;
  int groups, first_group;
};

template <int kHeadDim_>
struct KeyMomentTraits {
  static constexpr int kHeadDim = kHeadDim_, kRows = 2;  // of a block, a warp each: so few that two heads fill a GPU
  static constexpr int kColumns = kHeadDim / 32;         // of a thread
  static constexpr int kAhead = kColumns > 4 ? 4 : 8;    // parts whose sums are on their way at once
};

template <int kCount>
__device__ __forceinline__ void load_floats(float (&x)[kCount], const float* from) {
#pragma unroll
  for (int i = 0; i < kCount; i += 2) {
    const float2 pair = *reinterpret_cast<const float2*>(from + i);
    x[i] = pair.x;
    x[i + 1] = pair.y;
  }
}

// Block: a KV head and kRows dimensions of values.
template <class Traits>
__device__ __forceinline__ void key_moments(const KeyMomentsParams& p) {
  constexpr int kHeadDim = Traits::kHeadDim, kColumns = Traits::kColumns, kAhead = Traits::kAhead;
  constexpr int kBlocks = kHeadDim / Traits::kRows;
  const int kv_head = blockIdx.x / kBlocks, lane = threadIdx.x % 32;
  const int row = blockIdx.x % kBlocks * Traits::kRows + threadIdx.x / 32, column = lane * kColumns;
  const float* products = p.part_products + (static_cast<int64>(kv_head) * p.parts * kHeadDim + row) * kHeadDim + column;
  const float* sums = p.part_sums + static_cast<int64>(kv_head) * p.parts * (2 * kHeadDim);
  float product[kColumns] = {}, of_keys[kColumns] = {}, of_value = 0.f;
#pragma unroll 1
  for (int first = 0; first < p.parts; first += kAhead) {
    float products_of[kAhead][kColumns], keys_of[kAhead][kColumns], value_of[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64 part = min(first + i, p.parts - 1);
      load_floats(products_of[i], products + part * (kHeadDim * kHeadDim));
      load_floats(keys_of[i], sums + part * (2 * kHeadDim) + kHeadDim + column);
      value_of[i] = sums[part * (2 * kHeadDim) + row];
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= p.parts) break;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        product[c] += products_of[i][c];
        of_keys[c] += keys_of[i][c];
      }
      of_value += value_of[i];
      const int keys = part_end(first + i + 1, p.grain_shift), group = moment_group(keys) - p.first_group;
      if (group < 0) continue;
      const float share = 1.f / static_cast<float>(keys), mean = of_value * share;
      const int64 moments = static_cast<int64>(kv_head) * p.groups + group;
      float x[kColumns];
      bool finite = true;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) {
        x[c] = product[c] * share - mean * (of_keys[c] * share);
        finite &= fabsf(x[c]) < infinity();
      }
      uint32* target = reinterpret_cast<uint32*>(p.covariances + (moments * kHeadDim + row) * kHeadDim + column);
#pragma unroll
      for (int c = 0; c < kColumns; c += 2) target[c / 2] = Bfloat16::pack(x[c], x[c + 1]);
      finite = __all_sync(kFullWarp, finite);
      if (lane == 0) p.mean_values[moments * kHeadDim + row] = finite ? mean : __int_as_float(0x7fffffff);
    }
  }
}

}  // namespace s2o
