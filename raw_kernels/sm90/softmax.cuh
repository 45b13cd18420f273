// Online softmax of a key tile on Hopper, in the registers in which wgmma leaves scores.
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

// 64 query rows in a warpgroup. A thread's rows are lane / 4 and lane / 4 + 8 of its warp's 16.
template <class Traits>
struct Softmax {
  using Element = typename Traits::Element;
  static constexpr int kBlockN = Traits::kBlockN, kKeyTiles = kBlockN / 8;

  float s[kKeyTiles * 4];    // [rows, keys]: scores, then weights
  float m[2], l[2];          // [rows] running maximum, as of its last move; sum up to the last stop check, of the quad
  float mass[2];             // this thread's part of the sum since then
  float rescale_by[2];       // what the new maximum makes of the output so far
  float ceiling[2];          // pass 2: m need not move for unscaled scores up to this
  bool settled;              // pass 2: every row of the warp has such a ceiling
  ValueGroup<kSkipsValues<Traits>> values;  // the warpgroup's rows
  uint32 skips = 0;          // a bit for each block of the key tile whose values it leaves out

  static constexpr float kLarge = 4194304.f;  // 2^22, see weigh
  // Pass 2: weights may be up to 2^kHeadroom, and where m is negative up to 2^kDepth: finite in Element, and in float32
  // also a million of them times values of up to 2^70.
  static constexpr float kHeadroom = 14.f, kDepth = Element::kWide ? 30.f : 14.f;
  static constexpr int kEarly = 4;  // key tiles of 8 whose weights are under way while scores are compared

  const AttentionParams& params;
  int group, lane, first_row;  // first_row: this thread's, of the q tile

  __device__ __forceinline__ explicit Softmax(const AttentionParams& params_)
      : params(params_), group(threadIdx.x / kWarpgroup - 1), lane(threadIdx.x % 32) {
    first_row = group * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
  }

  __device__ __forceinline__ void start_empty() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = -infinity();
      l[h] = mass[h] = 0.f;
    }
  }
  // Turns scores into weights and moves m and mass to the new maximum. Row r sees `limit` keys of this tile, or
  // `limit + r` with kCausal.
  template <bool kCausal>
  __device__ __forceinline__ void softmax(int limit, int rows = 0) {
    cap();
    mask<kCausal>(limit);
    if constexpr (kSkipsValues<Traits>) find_skips(limit, rows, 0);
    weigh<!kCausal>();
  }

  // The same in pass 2 after a q tile's first keys. Where keys are ordered the most important came first and m is
  // all but settled: it stays where it is until a score is kHeadroom above it (and above 0). That shows in the scores'
  // bits, three at a time and without asking the row's other threads, while the first weights are under way. True if m
  // has moved in a row of the warp; then `rescale_by` says by how much, and is 1 in the others.
  __device__ __forceinline__ bool settled_softmax(int limit, int rows, int tile) {
    cap();
    mask<false>(limit);
    if constexpr (kSkipsValues<Traits>) find_skips(limit, rows, tile);
    const float scale[2] = {params.scale_log2, params.scale_log2}, base[2] = {m[0], m[1]};
    float early[kEarly * 4], sum[2][4] = {};
#pragma unroll
    for (int j = 0; j < kEarly; ++j) weigh(j, scale, base, &early[j * 4], sum);
    bool above = !settled;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int highest = __float_as_int(ceiling[h]);
      int top = highest;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) top = largest_bits(top, s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]);
      above |= top != highest;
    }
    if (__any_sync(kFullWarp, above)) {
      weigh<true, true>();
      return true;
    }
#pragma unroll
    for (int i = 0; i < kEarly * 4; ++i) s[i] = early[i];
#pragma unroll
    for (int j = kEarly; j < kKeyTiles; ++j) weigh(j, scale, base, &s[j * 4], sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) mass[h] += (sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]);
    return false;
  }

  // What `skips` is for key tile number `tile`, of which `limit` keys are there. m is never above the true maximum, so
  // what is left out here the rule leaves out, too.
  __device__ __forceinline__ void find_skips(int limit, int rows, int tile) {
    constexpr int kBlocks = kBlockN / kValueKeys;
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
          top[j % 2] = fmaxf(top[j % 2], fmaxf(s[i], s[i + 1]));
        }
        const float largest = fmaxf(top[0], top[1]) * params.scale_log2;
        slight &= first_row + 8 * h >= rows || values.is_slight(largest, m[h]);
      }
      // One thread of a warp votes for the first block, five for the second: how many of the four warps agree are the
      // digits of the sum.
      const bool all = __all_sync(kFullWarp, slight);
      if (c == 0 ? lane == 0 : lane >= 1 && lane <= 5) votes = all;
    }
    const uint32 sum = named_count(kSkip + group, kWarpgroup, votes);
    // By votes, all of which are the same: the compiler then knows that a warp takes one way.
    skips = __any_sync(kFullWarp, sum % 5 == 4) | __any_sync(kFullWarp, sum / 5 == 4) << 1;
    if (threadIdx.x % kWarpgroup == 0) {
#pragma unroll
      for (int c = 0; c < kBlocks; ++c)
        values.template count<64>(group, kConsumers, rows, tile * kBlocks + c, min(kValueKeys, limit - c * kValueKeys),
                                  skips >> c & 1);
    }
  }

  __device__ __forceinline__ void cap() {
    if constexpr (spec::kSoftcap) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) s[i] = tanh_approx(s[i] * params.cap_scale);
    }
  }
  template <bool kCausal>
  __device__ __forceinline__ void mask(int limit) {
    const bool causal = kCausal && params.geometry.is_causal;
    const bool masked = limit + (causal ? group * 64 : 0) < kBlockN;
    if (masked) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (j * 8 + lane % 4 * 2 + e % 2 >= limit + (causal ? first_row + e / 2 * 8 : 0)) s[j * 4 + e] = -infinity();
    }
  }
  // The weights of key tile j, exp2(s * scale - base) in both rows, to `to`, and their sums. Four partial sums a row
  // keep the pipeline full: of a multiprocessor's quarter one warp is here at a time.
  __device__ __forceinline__ void weigh(int j, const float (&scale)[2], const float (&base)[2], float* to,
                                        float (&sum)[2][4]) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float x = exp2_approx(fmaf(s[j * 4 + 2 * h], scale[h], -base[h]));
      const float y = exp2_approx(fmaf(s[j * 4 + 2 * h + 1], scale[h], -base[h]));
      sum[h][j % 4] += x + y;
      to[2 * h] = x;
      to[2 * h + 1] = y;
    }
  }
  // x, and the compiler does not know that it is. If rare code chooses between a parameter and another number for each
  // thread, the parameter becomes a thread's number everywhere, and the main loop waits for it at each key tile.
  static __device__ __forceinline__ float in_own_register(float x) {
    asm volatile("add.ftz.f32 %0, %0, 0f80000000;" : "+f"(x));  // x + -0; it sees through a move
    return x;
  }
  // Does a row with this m have a ceiling? Neither far below 0 nor where weigh rounds products first.
  static __device__ __forceinline__ bool settles(float m) { return m >= -kDepth && m <= kLarge; }

  // Weights of all scores relative to their maximum, to which m moves. kSettles: settled_softmax may follow. kSettled:
  // m stays in rows that have a ceiling and no score above it.
  //
  // A vote of the warp only says which code runs: what becomes of a row depends on its own scores alone, and the same
  // bits come out whichever code it is. Else a key that only later rows see would change how an earlier one is rounded.
  template <bool kSettles, bool kSettled = false>
  __device__ __forceinline__ void weigh() {
    float top[2][4];  // four partial maxima, for the same reason
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h][i] = fmaxf(s[i * 4 + 2 * h], s[i * 4 + 2 * h + 1]);
#pragma unroll
    for (int j = 4; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        top[h][j % 4] = fmaxf(top[h][j % 4], fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
    float scale[2] = {params.scale_log2, params.scale_log2}, base[2];
    bool large[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = fmaxf(fmaxf(top[h][0], top[h][1]), fmaxf(top[h][2], top[h][3]));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 1));
      highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, 2));
      const bool stays = kSettled && settles(m[h]) && highest <= ceiling[h];
      const float x = stays ? m[h] : fmaxf(m[h], highest * params.scale_log2);
      base[h] = x == -infinity() ? 0.f : x;
      rescale_by[h] = exp2_approx(m[h] - base[h]);
      m[h] = x;
      l[h] *= rescale_by[h];
      large[h] = fabsf(base[h]) > kLarge;
      // Not negative: then bits compare like numbers.
      if constexpr (kSettles) ceiling[h] = fmaxf(__fdividef(x + kHeadroom, params.scale_log2), 0.f);
    }
    if constexpr (kSettles) settled = __all_sync(kFullWarp, settles(m[0]) && settles(m[1]));
    // exp2(s * scale - base) in one instruction is off by the rounding of base; where that is more than half a unit
    // the product is rounded first, so that the weight of the maximum is exactly 1. For the warp's other rows s * 1
    // changes nothing.
    if (__any_sync(kFullWarp, large[0] || large[1])) {
      const float own_scale = in_own_register(params.scale_log2);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float before = large[h] ? own_scale : 1.f;
        scale[h] = large[h] ? 1.f : own_scale;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) s[j * 4 + e] = __fmul_rn(s[j * 4 + e], before);
      }
    }
    float sum[2][4] = {};
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j) weigh(j, scale, base, &s[j * 4], sum);
#pragma unroll
    for (int h = 0; h < 2; ++h) mass[h] = mass[h] * rescale_by[h] + ((sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]));
  }

  // Adds the mass since the last stop check to l; the largest share of l that it was in the first `rows` rows.
  __device__ __forceinline__ float largest_gain(int rows) {
    float largest = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = mass[h];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      if (first_row + 8 * h < rows) largest = fmaxf(largest, ladder_gain(sum, l[h]));
      l[h] += sum;
      mass[h] = 0.f;
    }
    return largest;
  }

  // Adds the mass since the last stop check to l; true if it is less than tau of l in each of the first `rows` rows.
  __device__ __forceinline__ bool stop_check(int rows, float tau = 0.f) {
    bool small = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = mass[h];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      small &= first_row + 8 * h >= rows || sum < tau * l[h];
      l[h] += sum;
      mass[h] = 0.f;
    }
    return small;
  }
};

}  // namespace sm90
}  // namespace s2o
