// A block's stable sort of scores by bucket in shared memory: a radix sort by two digits.
//
// A thread holds kOfThread neighbours, thread (lane, warp) those from (lane * kWarps + warp) * kOfThread on. It
// counts digits in counters of its own and so knows how many of its scores stand before each with the same digit; a sum
// over threads gives places. No atomic decides a place, and no thread waits for another's vote. Shared memory is read
// and written without bank conflicts, but where scores go to their places.
#pragma once
#include "selection/score_buckets.cuh"

namespace s2o {

constexpr int kMostOfThread = 32;
constexpr int kDigits = 32;  // of each of the two
static_assert(spec::kKeyBuckets == kDigits * kDigits, "two digits are a bucket");

template <int kThreads>
struct RadixShared {
  uint32 items[kThreads * kMostOfThread];  // what is sorted; before that the scores
  uint32 counters[kDigits][kThreads / 2];  // 16 bits each of a thread of the first and the last half of the warps
  uint32 of_digit[kDigits];
};

// What is sorted, in bits: index of the score 0 to 13, bucket 14 to 23; from 24 on four times the number of the
// thread's scores before it with the same digit. Counters and places count bytes too.
constexpr int kBucketShift = 14, kHighDigitShift = 19, kBeforeShift = 24;
constexpr uint32 kBucketMask = spec::kKeyBuckets - 1;
__device__ __forceinline__ int index_of(uint32 item) { return item & ((1 << kBucketShift) - 1); }

// The sum over lower lanes.
__device__ __forceinline__ uint32 lane_sum_before(uint32 mine) {
  uint32 sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32 x = __shfl_up_sync(kFullWarp, sum, step);
    if (static_cast<int>(threadIdx.x) % 32 >= step) sum += x;
  }
  return sum - mine;
}

// Of kOfThread * kThreads scores.
template <int kOfThread, int kThreads>
struct RadixSort {
  static constexpr int kWarps = kThreads / 32;
  static_assert(kOfThread % 8 == 0 && kOfThread <= kMostOfThread, "a thread's scores are whole loads");
  // Places are of bytes. One past the end may not fit 16 bits, and no score is put there.
  static_assert(kOfThread * kThreads * 4 <= 1 << 16 && kOfThread * kThreads <= 1 << kBucketShift && kMostOfThread <= 64,
                "what 16, 14 and 8 bits hold");
  RadixShared<kThreads>& shared;
  int warp, lane, chunk;  // the thread's scores begin at chunk * kOfThread

  __device__ __forceinline__ explicit RadixSort(RadixShared<kThreads>& shared)
      : shared(shared), warp(threadIdx.x / 32), lane(threadIdx.x % 32), chunk(lane * kWarps + warp) {}

  // Where unit i of 16 bytes stands, of kUnits a thread: eight lanes that read theirs find them in different banks.
  template <int kUnits>
  __device__ __forceinline__ uint32 unit_address(int i) const {
    return shared_address(shared.items) + (i ^ (i / (kUnits * kWarps) & 7)) * 16;
  }

  __device__ __forceinline__ void clear_counters() {
    uint4* words = reinterpret_cast<uint4*>(shared.counters);
#pragma unroll
    for (int i = threadIdx.x; i < kDigits * kThreads / 8; i += kThreads)
      words[i] = make_uint4(0, 0, 0, 0);
  }

  // The address of the thread's counter of an item's digit; `first`: of digit 0.
  template <int kShift>
  static __device__ __forceinline__ uint32 counter(uint32 item, uint32 first) {
    constexpr int kRow = kThreads * 2, kRowBits = kThreads == 128 ? 8 : kThreads == 256 ? 9 : 10;
    static_assert(kRow == 1 << kRowBits && kShift > kRowBits, "a shift takes the digit to its row");
    return (item >> (kShift - kRowBits) & (kDigits - 1) * kRow) + first;
  }
  __device__ __forceinline__ uint32 first_counter() const {
    return shared_address(&shared.counters[0][warp % (kWarps / 2) * 32 + lane]) + warp / (kWarps / 2) * 2;
  }

  // Where scores [8 * unit, + 8) are wanted.
  __device__ __forceinline__ uint32 scores_address(int unit) const { return unit_address<kOfThread / 8>(unit); }
  // This thread's scores [8 * i, + 8).
  __device__ __forceinline__ uint4 scores(int i) const {
    return load_shared_16(scores_address(chunk * (kOfThread / 8) + i));
  }

  template <int kShift>
  __device__ __forceinline__ void count(uint32 (&items)[kOfThread]) {
    const uint32 first = first_counter();
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      const uint32 mine = counter<kShift>(items[i], first), before = load_shared_2(mine);
      store_shared_2(mine, before + 4);
      items[i] += before << kBeforeShift;
    }
  }

  // Counters become places of the threads' first scores of a digit: digits first, then threads by their chunks.
  __device__ __forceinline__ void find_places() {
    constexpr int kMine = kDigits / kWarps, kWords = kWarps / 2;
    uint32 before[kMine], low[kMine];  // of a digit: in lower lanes; in this lane's threads of the first warps
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      uint32 sum = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) sum += shared.counters[warp * kMine + k][w * 32 + lane];
      const uint32 all = (sum & 0xffffu) + (sum >> 16);
      low[k] = sum & 0xffffu;
      before[k] = lane_sum_before(all);
      if (lane == 31) shared.of_digit[warp * kMine + k] = before[k] + all;
    }
    __syncthreads();
    const uint32 digits_before = lane_sum_before(shared.of_digit[lane]);
#pragma unroll
    for (int k = 0; k < kMine; ++k) {
      const uint32 first = __shfl_sync(kFullWarp, digits_before, warp * kMine + k) + before[k];
      uint32 place = first | (first + low[k]) << 16;
#pragma unroll
      for (int w = 0; w < kWords; ++w) {
        uint32& word = shared.counters[warp * kMine + k][w * 32 + lane];
        const uint32 found = word;
        word = place;
        place += found;
      }
    }
    __syncthreads();
  }

  // kSpread: where unit_address will look for them.
  template <int kShift, bool kSpread>
  __device__ __forceinline__ void put(uint32 (&items)[kOfThread]) {
    constexpr int kUnitsOfLane = kOfThread / 4 * kWarps;
    const uint32 first = first_counter(), target = shared_address(shared.items);
#pragma unroll
    for (int i = 0; i < kOfThread; ++i) {
      asm volatile("" : "+r"(items[i]));  // an address is found anew: those of count() would take as many registers
      uint32 place = load_shared_2(counter<kShift>(items[i], first)) + (items[i] >> kBeforeShift);
      if (kSpread) place ^= place / kUnitsOfLane & 0x70u;
      store_shared_4(target + place, items[i]);
    }
    __syncthreads();
  }

  // items[place]: scores in order, as index_of. They are there already, for the whole block.
  __device__ __forceinline__ void sort(const ScoreBuckets<spec::kKeyBuckets>& bucket) {
    uint32 items[kOfThread];
    clear_counters();
#pragma unroll
    for (int i = 0; i < kOfThread; i += 8) {
      const uint4 x = scores(i / 8);
      const uint32 pairs[4] = {bucket(x.x), bucket(x.y), bucket(x.z), bucket(x.w)};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        items[i + 2 * e] = (pairs[e] & kBucketMask) << kBucketShift | (chunk * kOfThread + i + 2 * e);
        items[i + 2 * e + 1] =
            (pairs[e] >> 16 & kBucketMask) << kBucketShift | (chunk * kOfThread + i + 2 * e + 1);
      }
    }
    __syncthreads();
    count<kBucketShift>(items);
    find_places();
    put<kBucketShift, true>(items);
    clear_counters();
#pragma unroll
    for (int i = 0; i < kOfThread; i += 4) {
      const uint4 x = load_shared_16(unit_address<kOfThread / 4>(chunk * (kOfThread / 4) + i / 4));
      constexpr uint32 kKept = (1u << kBeforeShift) - 1;
      items[i] = x.x & kKept, items[i + 1] = x.y & kKept, items[i + 2] = x.z & kKept, items[i + 3] = x.w & kKept;
    }
    __syncthreads();
    count<kHighDigitShift>(items);
    find_places();
    put<kHighDigitShift, false>(items);
  }
};

}  // namespace s2o
