// A walk of keys in the order of pass 2 that tells, of several taus, what each would give: where a tau would stop the q
// tile its output is kept, and the last ones' differences from the dense output are added up at the end.
#pragma once
#include "common/attention_params.cuh"

namespace s2o {

constexpr int kLadder = 8;  // taus of a head, descending: a byte of votes
static_assert(kLadder == spec::kLadder);

struct LadderAttentionParams : AttentionParams {
  const float* ladders;  // [batch * heads, kLadder]; a q tile ends where the last one stops it
  uint32* snapshots;     // [blocks, kLadder, pairs of a q tile's outputs]
  uint32* dense;         // [batch * heads, segments, tiles, pairs]: written by the walk that goes to the end
  float* sums;           // [batch * heads, segments, tiles, kLadder, kLadderWarps]: squares of differences from it
  float* sizes;          // [.., tiles, kLadderWarps]: squares of it
  int is_first;          // the last tau is 0, so the walk goes to the end
};
constexpr int kLadderWarps = 8;  // of a block, at most; those that a block has not are 0

// What kernels that walk so are compiled for.
template <class Traits>
struct LadderTraits : Traits {};
template <class Traits>
constexpr bool kWalksLadder = false;
template <class Traits>
constexpr bool kWalksLadder<LadderTraits<Traits>> = true;

__device__ __forceinline__ uint32 largest_of_warp(uint32 x) {
  asm volatile("redux.sync.max.u32 %0, %0, 0xffffffff;" : "+r"(x));
  return x;
}

// What a key tile adds to a row of the mass l: a share of it.
__device__ __forceinline__ float ladder_gain(float sum, float l) {
  const float share = sum / l;
  return share >= 0.f ? share : infinity();  // NaN stops nowhere
}

// Where the taus of a q tile have stopped it, as its threads know it. Bit b is the tau b places before the last: a larger
// one stops no later. Kernels that walk no ladder have none.
template <class Traits, int kPairs, int kThreads>
struct LadderWalk {};

// kPairs: 32-bit words with two elements of the output that each of kThreads threads holds.
template <class Traits, int kPairs, int kThreads>
struct LadderWalk<LadderTraits<Traits>, kPairs, kThreads> {
  using Element = typename Traits::Element;
  uint32 stopped = 0;  // a bit for each tau that has; above kLadder bits, one for the last of those that did together

  static __device__ __forceinline__ float tau_of_bit(const LadderAttentionParams& p, int head, int b) {
    return p.ladders[head * kLadder + kLadder - 1 - b];
  }
  __device__ __forceinline__ bool has_stopped(int b) const { return stopped >> b & 1; }
  // Whether votes do: not where only the tau 0 is left.
  __device__ __forceinline__ bool counts(const LadderAttentionParams& p) const {
    return !p.is_first || (~stopped & ((1 << kLadder) - 2));
  }
  // The taus at which a warp stops whose rows gain `gain`, their mass since the last stop check as a share of that
  // before, or less; `gain` is not negative. `tau`: of bit number lane % kLadder.
  static __device__ __forceinline__ uint32 votes(float gain, float tau) {
    const float largest = __uint_as_float(largest_of_warp(__float_as_uint(gain)));
    return __ballot_sync(kFullWarp, largest < tau) & ((1 << kLadder) - 1);
  }
  static __device__ __forceinline__ uint32* pairs_of(uint32* all, int64 q_tile, int thread) {
    return all + q_tile * (kPairs * kThreads) + thread;
  }
  // Keeps the outputs of a thread, pair(i), for the taus of `stops` that have not stopped before.
  template <class Pair>
  __device__ __forceinline__ void keep(const LadderAttentionParams& p, uint32 stops, int thread, const Pair& pair) {
    const uint32 now = stops & ~stopped;
    if (now == 0) return;
    const uint32 last = now & -now;
    stopped |= now | last << kLadder;
    uint32* to = snapshot(p, __ffs(last) - 1, thread);
#pragma unroll
    for (int i = 0; i < kPairs; ++i) to[i * kThreads] = pair(i);
  }
  // Adds up a q tile: `last(i)` is where the walk ended, `counts(i)` whether the pair's row is there.
  template <class Pair, class Counts>
  __device__ __forceinline__ void finish(const LadderAttentionParams& p, int q_tile, int thread, const Pair& last,
                                         const Counts& counts) const {
    uint32* dense = pairs_of(p.dense, q_tile, thread);
    const int64 sums = static_cast<int64>(q_tile) * kLadder;
    if (p.is_first) {
      float size = 0.f;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        dense[i * kThreads] = last(i);
        if (counts(i)) size += square_of(last(i), 0);
      }
      write_sum(p.sizes, q_tile, thread, size);
    }
#pragma unroll 1
    for (int b = 0; b < kLadder;) {
      float sum = 0.f;
      if (stopped >> kLadder >> b & 1) {
        const uint32* from = snapshot(p, b, thread);
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
          if (counts(i)) sum += square_of(from[i * kThreads], dense[i * kThreads]);
      } else if (!p.is_first) {  // taus that have not stopped
#pragma unroll
        for (int i = 0; i < kPairs; ++i)
          if (counts(i)) sum += square_of(last(i), dense[i * kThreads]);
      }
      do {
        write_sum(p.sums, sums + kLadder - 1 - b, thread, sum);
      } while (++b < kLadder && !(stopped >> kLadder >> b & 1));  // those that stopped together
    }
  }

 private:
  // Those of the block that the tau of bit `last` keeps.
  static __device__ __forceinline__ uint32* snapshot(const LadderAttentionParams& p, int last, int thread) {
    return pairs_of(p.snapshots, static_cast<int64>(block_index()) * kLadder + last, thread);
  }
  static __device__ __forceinline__ float square_of(uint32 x, uint32 y) {
    const float low = Element::low(x) - Element::low(y), high = Element::high(x) - Element::high(y);
    return low * low + high * high;
  }
  static __device__ __forceinline__ void write_sum(float* to, int64 index, int thread, float x) {
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) x += __shfl_xor_sync(kFullWarp, x, stride);
    if (thread % 32 == 0) to[index * kLadderWarps + thread / 32] = x;
  }
};

}  // namespace s2o
