// The keys that the portable attention tile walks, and the copy of one step of them into shared memory.
//
// Each kind of keys has prefetch(step), which starts the copy of the positions that the step needs, and quad(step, r4),
// which says where four keys of it lie. Where has_runs<n>(), each n of a step's, from a multiple of n on, are neighbours:
// first(step, i) is the position of one, and the next one's row an addition away.
#pragma once
#include "common/pages.cuh"
#include "common/tau_ladder.cuh"
#include "sm80/shared.cuh"

namespace s2o {

// Keys shared.first_key, shared.first_key + 1, ...
template <class Traits>
struct ContiguousKeys {
  static constexpr int kStep = Traits::kStep;
  typename Traits::Shared& shared;
  int count;
  const Pages& pages;
  __device__ __forceinline__ void prefetch(int) const {}
  template <int kRun>
  __device__ __forceinline__ constexpr bool has_runs() const {
    return true;
  }
  __device__ __forceinline__ int first(int step, int i) const { return shared.first_key + step * kStep + i; }
  // Slots of keys 4 * r4 .. 4 * r4 + 3 of a step; -1 past the end.
  __device__ __forceinline__ int4 quad(int step, int r4) const {
    const int j = step * kStep + r4 * 4, begin = shared.first_key;
    const int4 p = make_int4(j < count ? begin + j : -1, j + 1 < count ? begin + j + 1 : -1,
                             j + 2 < count ? begin + j + 2 : -1, j + 3 < count ? begin + j + 3 : -1);
    if constexpr (Traits::kPaged) return pages.slots(shared.pages, p);
    return p;
  }
};

// The first `count` keys of the list of units at shared.order, which may begin anywhere. Of each key its unit passes
// through a ring in shared memory; nothing past the list's last is read.
template <class Traits>
struct UnitKeys {
  static constexpr int kStep = Traits::kStep;
  typename Traits::Shared& shared;
  int count;
  const Pages& pages;
  int unit_shift;
  __device__ __forceinline__ void prefetch(int step) const {
    const int i = step * kStep + threadIdx.x;
    if (threadIdx.x < kStep && i < count)
      cp_async_4(shared_address(&shared.index[step % Traits::kIndexSlots][threadIdx.x]),
                 shared.order + (i >> unit_shift));
  }
  template <int kRun>
  __device__ __forceinline__ bool has_runs() const {
    return 1 << unit_shift >= kRun;
  }
  __device__ __forceinline__ int first(int step, int i) const {
    const int unit = shared.index[step % Traits::kIndexSlots][i];
    return (unit << unit_shift) + (step * kStep + i & (1 << unit_shift) - 1);
  }
  __device__ __forceinline__ int4 quad(int step, int r4) const {
    const int4 unit = reinterpret_cast<const int4*>(shared.index[step % Traits::kIndexSlots])[r4];
    const int first = step * kStep + r4 * 4;
    const auto key = [&](int unit, int i) {
      return i < count ? (unit << unit_shift) + (i & (1 << unit_shift) - 1) : -1;
    };
    const int4 p =
        make_int4(key(unit.x, first), key(unit.y, first + 1), key(unit.z, first + 2), key(unit.w, first + 3));
    if constexpr (Traits::kPaged) return pages.slots(shared.pages, p);
    return p;
  }
};

// Whether neighbouring keys are copied together. The other kernels would spill registers.
template <class Traits>
constexpr bool kCopiesRuns = Traits::kAligned && !Traits::kPaged && !kWalksLadder<Traits>;

// Starts the copy of one step of keys (or values) into shared memory. `x`: all of them.
template <class Traits, class Keys>
__device__ __forceinline__ void load_step(uint32 tile, const uint16* data, const Tensor<const uint16>& x, int head_dim,
                                          const Keys& keys, int step) {
  const int64 row_stride = x.row;
  constexpr int kChunks = Traits::kHeadDim / 8;
  constexpr int kRows = Traits::kStep * kChunks / Traits::kThreads;  // rows of a thread: 4 to 16, neighbours
  static_assert(kRows % 4 == 0);
  int chunk = threadIdx.x % kChunks, first = threadIdx.x / kChunks * kRows;
  // Or what follows from them would be kept in registers between steps.
  if constexpr (Traits::kAligned) asm volatile("" : "+r"(chunk), "+r"(first));
  if constexpr (kCopiesRuns<Traits>) {
    constexpr int kRun = kRows < 8 ? kRows : 8;
    if (keys.template has_runs<kRun>()) {
      const bool column = chunk * 8 < head_dim;
      const auto copy = [&](auto present) {
#pragma unroll
        for (int i = 0; i < kRows; i += kRun) {
          const uint16* row = data + chunk * 8 + keys.first(step, first + i) * row_stride;
          const uint32 target = chunk_address<Traits>(tile, first + i, chunk);
#pragma unroll
          for (int j = 0; j < kRun; ++j, row += row_stride)
            cp_async_16_or_zeros((target ^ j << 4) + j * (Traits::kHeadDim * 2), row, column && present(i + j));
        }
      };
      const int left = keys.count - step * Traits::kStep;  // rows that are there
      if (left >= Traits::kStep) {
        copy([](int) { return true; });
      } else {
        copy([&](int i) { return first + i < left; });
      }
      return;
    }
  }
#pragma unroll 1
  for (int i = 0; i < kRows; i += 4) {
    const int4 quad = keys.quad(step, (first + i) / 4);
#pragma unroll(Traits::kAligned ? 4 : 1)
    for (int j = 0; j < 4; ++j) {
      const uint32 target = chunk_address<Traits>(tile, first + i + j, chunk);
      const int key = j == 0 ? quad.x : j == 1 ? quad.y : j == 2 ? quad.z : quad.w;
      const uint16* row = data + static_cast<int64>(max(key, 0)) * row_stride;
      if constexpr (Traits::kPaged) row = data + keys.pages.offset(x, max(key, 0));
      if constexpr (Traits::kAligned) {
        const bool present = key >= 0 && chunk * 8 < head_dim;
        cp_async_16_or_zeros(target, present ? row + chunk * 8 : row, present);
      } else {
        store_shared_16(target, key < 0 ? make_uint4(0, 0, 0, 0) : load_unaligned(row, chunk * 8, head_dim));
      }
    }
  }
}

}  // namespace s2o
