// Stop checks, as consumers vote; and of a ladder of taus what each vote keeps.
#pragma once
#include "sm90/softmax.cuh"

namespace s2o {
namespace sm90 {

// Whether a thread keeps tau; else, where it has no register for it, each vote reads it.
template <class Traits>
constexpr bool kKeepsTau = (Traits::kHeadDim <= 128 && !Traits::kInHalves) || kWalksLadder<Traits>;

// Stop check number `n` of the q tile number `nth`.
template <class Traits>
__device__ __forceinline__ void vote(Consumer<Traits>& my, int rows, uint32 n, uint32 nth) {
  const float tau = kKeepsTau<Traits> ? my.kept_tau : my.shared.tau[nth % kPlaces];
  uint32 small;
  if constexpr (kWalksLadder<Traits>) {
    const bool counts = my.ladder.counts(static_cast<const LadderAttentionParams&>(my.params));
    small = counts ? my.ladder.votes(largest_gain(my, rows), tau) : 0;
  } else {
    small = __all_sync(kFullWarp, stop_check(my, rows, tau));
  }
  if (my.lane == 0) {
    const int warp = threadIdx.x / 32 - Traits::kFirstConsumer / 32, visited = static_cast<int>(n + 1) * kStopCheckKeys;
    // Until its least keys have been visited a tile stops only after several such checks in a row; each warp counts its own.
    if constexpr (!kWalksLadder<Traits> && !kSkipsValues<Traits>) {
      const int in_a_row = small ? (n == 0 ? 0 : my.shared.in_a_row[warp]) + 1 : 0;
      my.shared.in_a_row[warp] = in_a_row;
      if (visited < my.shared.least_keys[nth % kPlaces]) small = in_a_row >= my.shared.patience[nth % kPlaces];
    }
    reinterpret_cast<volatile unsigned char*>(&my.shared.votes[(my.voted + n) % kVoteSlots])[warp] = small;
    barrier_arrive(my.shared.voted[(my.voted + n) % kVoteSlots]);
  }
}

// Of a ladder: the outputs of all rows as they are, of the thread's pair i of them.
template <class Traits>
__device__ __forceinline__ uint32 pair_of_output(Consumer<Traits>& my, int i, const float (&inverse)[2]) {
  return pack_finite<typename Traits::Element>(my.acc[i * 2] * inverse[i % 2], my.acc[i * 2 + 1] * inverse[i % 2]);
}

template <class Traits>
__device__ __forceinline__ void inverses(Consumer<Traits>& my, float (&inverse)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) inverse[h] = my.l[h] == 0.f ? 0.f : 1.f / my.l[h];
}

template <class Traits>
__device__ __forceinline__ void keep_stopped(Consumer<Traits>& my, uint32 stops) {
  float inverse[2];
  inverses(my, inverse);
  my.ladder.keep(static_cast<const LadderAttentionParams&>(my.params), stops, threadIdx.x - kWarpgroup,
                 [&](int i) { return pair_of_output(my, i, inverse); });
}

template <class Traits>
__device__ __forceinline__ void finish_ladder(Consumer<Traits>& my, int q_tile, int rows) {
  float inverse[2];
  inverses(my, inverse);
  uint32 last[Traits::kDimTiles * 2];
#pragma unroll
  for (int i = 0; i < Traits::kDimTiles * 2; ++i) last[i] = pair_of_output(my, i, inverse);
  my.ladder.finish(static_cast<const LadderAttentionParams&>(my.params), q_tile, threadIdx.x - kWarpgroup,
                   [&](int i) { return last[i]; }, [&](int i) { return my.first_row + 8 * (i % 2) < rows; });
}

}  // namespace sm90
}  // namespace s2o
