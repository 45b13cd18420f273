// Online softmax of a key tile on Hopper, in the registers in which wgmma leaves scores.
#pragma once
#include "sm90/consumer.cuh"

namespace s2o {
namespace sm90 {

constexpr float kLarge = 4194304.f;  // 2^22, see weigh
// Pass 2: weights may be up to 2^kHeadroom, and where m is negative up to 2^kDepth: finite in Element, and in float32
// also a million of them times values of up to 2^70.
constexpr float kHeadroom = 14.f;
template <class Traits>
constexpr float kDepth = Traits::Element::kWide ? 30.f : 14.f;

template <class Traits>
__device__ __forceinline__ void start_empty(Consumer<Traits>& my) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    my.m[h] = -infinity();
    my.l[h] = my.mass[h] = 0.f;
  }
  my.settled = false;
}

template <class Traits>
__device__ __forceinline__ void cap(Consumer<Traits>& my) {
  if constexpr (spec::kSoftcap) {
#pragma unroll
    for (int i = 0; i < Traits::kKeyTiles * 4; ++i) my.s[i] = tanh_approx(my.s[i] * my.params.cap_scale);
  }
}

template <bool kCausal, class Traits>
__device__ __forceinline__ void mask(Consumer<Traits>& my, int limit) {
  const bool causal = kCausal && my.params.geometry.is_causal;
  const bool masked = limit + (causal ? my.group * 64 : 0) < Traits::kScoreKeys;
  if (masked) {
#pragma unroll
    for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (j * 8 + my.lane % 4 * 2 + e % 2 >= limit + (causal ? my.first_row + e / 2 * 8 : 0))
          my.s[j * 4 + e] = -infinity();
  }
}

// What `skips` is for key tile number `tile`, of which `limit` keys are there. m is never above the true maximum, so
// what is left out here the rule leaves out, too.
template <class Traits>
__device__ __forceinline__ void find_skips(Consumer<Traits>& my, int limit, int rows, int tile) {
  constexpr int kBlocks = Traits::kBlockN / kValueKeys;
  static_assert(kBlocks <= 2, "a vote counts to 4 in two digits");
  bool votes = false;
#pragma unroll
  for (int c = 0; c < kBlocks; ++c) {
    bool slight = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top[2] = {-infinity(), -infinity()};
#pragma unroll
      for (int j = 0; j < kValueKeys / 8; ++j) {
        const int i = (c * (kValueKeys / 8) + j) * 4 + 2 * h;
        top[j % 2] = fmaxf(top[j % 2], fmaxf(my.s[i], my.s[i + 1]));
      }
      const float largest = fmaxf(top[0], top[1]) * my.params.scale_log2;
      slight &= my.first_row + 8 * h >= rows || my.values.is_slight(largest, my.m[h]);
    }
    // One thread of a warp votes for the first block, five for the second: how many of the four warps agree are the
    // digits of the sum.
    const bool all = __all_sync(kFullWarp, slight);
    if (c == 0 ? my.lane == 0 : my.lane >= 1 && my.lane <= 5) votes = all;
  }
  const uint32 sum = named_count(kSkip + my.group, kWarpgroup, votes);
  // By votes, all of which are the same: the compiler then knows that a warp takes one way.
  my.skips = __any_sync(kFullWarp, sum % 5 == 4) | __any_sync(kFullWarp, sum / 5 == 4) << 1;
  if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
    for (int c = 0; c < kBlocks; ++c)
      my.values.template count<64>(my.group, Traits::kConsumers, rows, tile * kBlocks + c,
                                   min(kValueKeys, limit - c * kValueKeys), my.skips >> c & 1);
  }
}

// x, and the compiler does not know that it is. If rare code chooses between a parameter and another number for each
// thread, the parameter becomes a thread's number everywhere, and the main loop waits for it at each key tile.
__device__ __forceinline__ float in_own_register(float x) {
  asm volatile("add.ftz.f32 %0, %0, 0f80000000;" : "+f"(x));  // x + -0; it sees through a move
  return x;
}

// The unscaled score up to which m need not move. Not negative: then bits compare like numbers.
template <class Traits>
__device__ __forceinline__ float ceiling_above(const Consumer<Traits>& my, float m) {
  return fmaxf(__fdividef(m + kHeadroom, my.params.scale_log2), 0.f);
}
template <class Traits>
constexpr bool kKeepsCeiling = !Traits::kInHalves;  // which has no register for it, and works it out anew
template <class Traits>
__device__ __forceinline__ float ceiling_of(const Consumer<Traits>& my, int h) {
  return kKeepsCeiling<Traits> ? my.ceiling[h] : ceiling_above(my, my.m[h]);
}

// Does a row with this m have a ceiling? Neither far below 0 nor where weigh rounds products first.
template <class Traits>
__device__ __forceinline__ bool settles(float m) {
  return m >= -kDepth<Traits> && m <= kLarge;
}

// Partial sums of a row, which keep the pipeline full: of a multiprocessor's quarter one warp is here at a time. In
// halves two are, which have few registers.
template <class Traits>
constexpr int kSums = Traits::kInHalves ? 2 : 4;
__device__ __forceinline__ float total(const float (&sum)[2]) { return sum[0] + sum[1]; }
__device__ __forceinline__ float total(const float (&sum)[4]) { return (sum[0] + sum[1]) + (sum[2] + sum[3]); }

// Turns the scores of key tile j into weights, exp2(s * scale - base) in both rows, and adds these to `sum`.
template <class Traits>
__device__ __forceinline__ void weigh(Consumer<Traits>& my, int j, const float (&scale)[2], const float (&base)[2],
                                      float (&sum)[2][kSums<Traits>]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float &x = my.s[j * 4 + 2 * h], &y = my.s[j * 4 + 2 * h + 1];
    x = exp2_approx(fmaf(x, scale[h], -base[h]));
    y = exp2_approx(fmaf(y, scale[h], -base[h]));
    sum[h][j % kSums<Traits>] += x + y;
  }
}

// Finds the largest score that a thread has of each row. Once no maximum of the warp is negative, 0 stands for all scores
// below it, which move no maximum; the others compare as their bits do, three at a time. Pass 1 of head_dim 64, with
// half the products to each score, is 1 % slower that way.
template <bool kSettles, class Traits>
__device__ __forceinline__ void find_highest(const Consumer<Traits>& my, float (&highest)[2]) {
  if (!kSettles && Traits::kHeadDim > 64 && my.settled) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int top[2] = {};
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; ++j)
        top[j % 2] = largest_bits(top[j % 2], my.s[j * 4 + 2 * h], my.s[j * 4 + 2 * h + 1]);
      highest[h] = __int_as_float(max(top[0], top[1]));
    }
    return;
  }
  float top[2][4];  // four partial maxima a row, which keep the pipeline full
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) top[h][i] = fmaxf(my.s[i * 4 + 2 * h], my.s[i * 4 + 2 * h + 1]);
#pragma unroll
  for (int j = 4; j < Traits::kKeyTiles; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      top[h][j % 4] = fmaxf(top[h][j % 4], fmaxf(my.s[j * 4 + 2 * h], my.s[j * 4 + 2 * h + 1]));
#pragma unroll
  for (int h = 0; h < 2; ++h) highest[h] = fmaxf(fmaxf(top[h][0], top[h][1]), fmaxf(top[h][2], top[h][3]));
}

// Weights of all scores relative to their maximum, to which m moves. kSettles: settled_softmax may follow. kSettled:
// m stays in rows that have a ceiling and no score above it.
//
// A vote of the warp only says which code runs: what becomes of a row depends on its own scores alone, and the same
// bits come out whichever code it is. Else a key that only later rows see would change how an earlier one is rounded.
template <bool kSettles, bool kSettled = false, class Traits>
__device__ __forceinline__ void weigh(Consumer<Traits>& my) {
  float highest[2];
  find_highest<kSettles>(my, highest);
  float scale[2] = {my.params.scale_log2, my.params.scale_log2}, base[2];
  bool large[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(kFullWarp, highest[h], 1));
    highest[h] = fmaxf(highest[h], __shfl_xor_sync(kFullWarp, highest[h], 2));
    const bool stays = kSettled && settles<Traits>(my.m[h]) && highest[h] <= ceiling_of(my, h);
    const float x = stays ? my.m[h] : fmaxf(my.m[h], highest[h] * my.params.scale_log2);
    base[h] = x == -infinity() ? 0.f : x;
    my.rescale_by[h] = exp2_approx(my.m[h] - base[h]);
    my.m[h] = x;
    my.l[h] *= my.rescale_by[h];
    large[h] = fabsf(base[h]) > kLarge;
    if constexpr (kSettles && kKeepsCeiling<Traits>) my.ceiling[h] = ceiling_above(my, x);
  }
  if constexpr (kSettles) {
    my.settled = __all_sync(kFullWarp, settles<Traits>(my.m[0]) && settles<Traits>(my.m[1]));
  } else if (!my.settled) {
    my.settled = __all_sync(kFullWarp, my.m[0] >= 0.f && my.m[1] >= 0.f);
  }
  // exp2(s * scale - base) in one instruction is off by the rounding of base; where that is more than half a unit
  // the product is rounded first, so that the weight of the maximum is exactly 1. For the warp's other rows s * 1
  // changes nothing.
  if (__any_sync(kFullWarp, large[0] || large[1])) {
    const float own_scale = in_own_register(my.params.scale_log2);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float before = large[h] ? own_scale : 1.f;
      scale[h] = large[h] ? 1.f : own_scale;
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e) my.s[j * 4 + e] = __fmul_rn(my.s[j * 4 + e], before);
    }
  }
  float sum[2][kSums<Traits>] = {};
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; ++j) weigh(my, j, scale, base, sum);
#pragma unroll
  for (int h = 0; h < 2; ++h)
    my.mass[h] = my.mass[h] * my.rescale_by[h] + total(sum[h]);
}

// Turns scores into weights and moves m and mass to the new maximum. Row r sees `limit` keys of this tile, or
// `limit + r` with kCausal.
template <bool kCausal, class Traits>
__device__ __forceinline__ void softmax(Consumer<Traits>& my, int limit, int rows = 0) {
  cap(my);
  mask<kCausal>(my, limit);
  if constexpr (kSkipsValues<Traits>) find_skips(my, limit, rows, 0);
  weigh<!kCausal>(my);
}

// The same in pass 2 after a q tile's first keys. Where keys are ordered the most important came first and m is
// all but settled: it stays where it is until a score is kHeadroom above it (and above 0). That shows in the scores'
// bits, three at a time and without asking the row's other threads. True if m has moved in a row of the warp; then
// `rescale_by` says by how much, and is 1 in the others.
template <class Traits>
__device__ __forceinline__ bool settled_softmax(Consumer<Traits>& my, int limit, int rows, int tile) {
  cap(my);
  mask<false>(my, limit);
  if constexpr (kSkipsValues<Traits>) find_skips(my, limit, rows, tile);
  bool above = !my.settled;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int highest = __float_as_int(ceiling_of(my, h));
    int top = highest;
#pragma unroll
    for (int j = 0; j < Traits::kKeyTiles; ++j) top = largest_bits(top, my.s[j * 4 + 2 * h], my.s[j * 4 + 2 * h + 1]);
    above |= top != highest;
  }
  if (__any_sync(kFullWarp, above)) {
    weigh<true, true>(my);
    return true;
  }
  const float scale[2] = {my.params.scale_log2, my.params.scale_log2}, base[2] = {my.m[0], my.m[1]};
  float sum[2][kSums<Traits>] = {};
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; ++j) weigh(my, j, scale, base, sum);
#pragma unroll
  for (int h = 0; h < 2; ++h) my.mass[h] += total(sum[h]);
  return false;
}

// Adds the mass since the last stop check to l; the largest share of l that it was in the first `rows` rows.
template <class Traits>
__device__ __forceinline__ float largest_gain(Consumer<Traits>& my, int rows) {
  float largest = 0.f;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = my.mass[h];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (my.first_row + 8 * h < rows) largest = fmaxf(largest, ladder_gain(sum, my.l[h]));
    my.l[h] += sum;
    my.mass[h] = 0.f;
  }
  return largest;
}

// Adds the mass since the last stop check to l; true if it is less than tau of l in each of the first `rows` rows.
template <class Traits>
__device__ __forceinline__ bool stop_check(Consumer<Traits>& my, int rows, float tau = 0.f) {
  bool small = true;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = my.mass[h];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    small &= my.first_row + 8 * h >= rows || sum < tau * my.l[h];
    my.l[h] += sum;
    my.mass[h] = 0.f;
  }
  return small;
}

}  // namespace sm90
}  // namespace s2o
