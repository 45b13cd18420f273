// Lists whose products with values are left out where they would weigh next to nothing: SpargeAttn's second filter.
#pragma once
#include "common/listed_rows.cuh"

namespace s2o {

// A group of neighbouring rows leaves out the values of a block of keys unless some row has a score there that comes
// within `limits` of the row's maximum before it. Weights count in the sums all the same.
struct ValueSkip {
  const float* limits;  // [heads]: below 0, in units of log2
  int* skipped;         // [batch * heads, segments, tiles]: (query, key) pairs left out are added to what is there
  int* found;           // [.., .., .., groups, blocks]: 1 where a group left out a block of its list; null: nowhere
  int blocks;           // in a row of `found`
};

struct SkippingAttentionParams : ListedAttentionParams {
  ValueSkip values;
};

// What kernels that do so are compiled for.
template <class Traits>
struct SkippingTraits : Traits {};
template <class Traits>
constexpr bool kSkipsValues = false;
template <class Traits>
constexpr bool kSkipsValues<SkippingTraits<Traits>> = true;

// A group as its threads know it, in few registers. Kernels that leave out nothing have none.
template <bool kSkips>
struct ValueGroup {};

template <>
struct ValueGroup<true> {
  const ValueSkip* all;  // among the kernel's parameters, so that it takes no register
  float limit;
  int place;  // the q tile's in `skipped`

  __device__ __forceinline__ void start(const ValueSkip& values, int head_in_batch, int q_tile) {
    all = &values;
    place = q_tile;
    limit = values.limits[head_in_batch];
  }
  // Whether a row's largest score in a block is too small, in units of log2. Not so before any other, nor NaN.
  __device__ __forceinline__ bool is_slight(float largest, float m) const { return largest - m <= limit; }

  // Group number `group`, of kRows rows and of `groups` in a q tile of `tile_rows` rows, leaves out block number
  // `block` of the list, of which `keys` keys are there, or not. By one thread.
  template <int kRows>
  __device__ __forceinline__ void count(int group, int groups, int tile_rows, int block, int keys, bool skipped) const {
    if (keys <= 0) return;
    const int rows = min(max(tile_rows - group * kRows, 0), kRows);
    if (skipped && rows > 0) atomicAdd(all->skipped + place, rows * keys);
    if (all->found) all->found[(static_cast<int64>(place) * groups + group) * all->blocks + block] = skipped;
  }
};

}  // namespace s2o
