// The largest of many numbers, found by a block: a radix select by four digits.
#pragma once
#include "methods/block_reduction.cuh"

namespace s2o {

constexpr int kLargestThreads = 512, kLargestWarps = kLargestThreads / 32;

struct LargestShared {
  ReductionShared<kLargestWarps> reduction;
  uint32 histogram[256];
  uint32 digit, left;
};

// The order of numbers that are not negative; what is `forced` comes first.
constexpr uint32 kForced = 0xfffffffeu, kNotANumber = 0xffffffffu;
__device__ __forceinline__ uint32 rank_of(float x, bool forced) {
  return x != x ? kNotANumber : forced ? kForced : __float_as_uint(x);
}

// Which of `items` numbers are the `count` largest, of equals the first; all of them where one is NaN.
struct Largest {
  uint32 bound;  // larger ones are
  int ties;      // and of those equal to it so many

  template <class Rank>
  static __device__ __forceinline__ Largest find(const Rank& rank, int items, int count, LargestShared& shared) {
    bool odd = count >= items;
    for (int i = threadIdx.x; i < items; i += kLargestThreads) odd |= rank(i) == kNotANumber;
    if (__syncthreads_or(odd)) return {0, items};
    uint32 bound = 0, mask = 0, left = count;
    for (int shift = 24; shift >= 0; shift -= 8) {
      for (int i = threadIdx.x; i < 256; i += kLargestThreads) shared.histogram[i] = 0;
      __syncthreads();
      for (int i = threadIdx.x; i < items; i += kLargestThreads) {
        const uint32 x = rank(i);
        if ((x & mask) == bound) atomicAdd(&shared.histogram[x >> shift & 255], 1u);
      }
      __syncthreads();
      if (threadIdx.x == 0) {
        int digit = 255;
        for (; shared.histogram[digit] < left; --digit) left -= shared.histogram[digit];
        shared.digit = digit;
        shared.left = left;
      }
      __syncthreads();
      bound |= shared.digit << shift;
      left = shared.left;
      mask |= 255u << shift;
      __syncthreads();
    }
    return {bound, static_cast<int>(left)};
  }
};

// Calls take(i, is_chosen, place) for all of `items` numbers in order, all threads together: how many are chosen before.
template <class Rank, class Take>
__device__ __forceinline__ void for_largest(const Largest& largest, const Rank& rank, int items, LargestShared& shared,
                                            const Take& take) {
  BlockReduction<kLargestWarps> block{shared.reduction};
  int chosen = 0, tied = 0;
  for (int first = 0; first < items; first += kLargestThreads) {
    const int i = first + threadIdx.x;
    const uint32 x = i < items ? rank(i) : 0;
    bool mine = i < items && x > largest.bound;
    const bool tie = i < items && x == largest.bound;
    if (tied < largest.ties) {  // the same in all threads
      const int2 ties = block.count(tie);
      mine |= tie && tied + ties.x < largest.ties;
      tied += ties.y;
    }
    const int2 place = block.count(mine);
    if (i < items) take(i, mine, chosen + place.x);
    chosen += place.y;
  }
}

}  // namespace s2o
