// The blocks of each token: those that are always chosen, and of the others the ones of most weight.
//
//   weights [KV rows, tokens, weight_stride], or of each head, to be added up -> chosen [KV rows, seqlen_q, top], ascending, -1 behind the last
//
// Weights are not negative, so their bits ascend as they do; NaN is the most of all, and of equals the lower block wins.
#include "nsa/params.cuh"

namespace s2o {

constexpr int kTopThreads = 128;
constexpr int kSpare = 2;       // lanes more than are wanted, that a number which is found sooner may let in
constexpr int kHeldGroups = 8;  // of 128 weights, four of each lane, that a warp holds in registers

// Of a warp: blocks that may be among those of most weight, ascending.
struct TopShared {
  uint32 weight[kTopThreads / 32][32];
  int block[kTopThreads / 32][32];
};

// A token's weights, four neighbours at a time.
struct BlockWeights {
  const NsaParams& p;
  int row;  // of KV rows and tokens of the round
  int end;  // of the blocks that count
  __device__ __forceinline__ float4 operator()(int at) const {
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    if (!p.fused) {
      add(sum, load(row, at), 1.f);
    } else {
#pragma unroll 1
      for (int head = 0; head < p.group; ++head) {
        const int place = row * p.group + head;
        add(sum, load(place, at), share(place, at, p.head_lse[place]));
      }
    }
    return sum;
  }
  __device__ __forceinline__ uint4 load(int place, int at) const {
    return load_16_or_zeros(p.weights + static_cast<int64>(place) * p.weight_stride + at, at < end);
  }
  // Of those of one head, which are relative to the maximum of their step of 128 compressed keys.
  __device__ __forceinline__ float share(int place, int at, float lse) const {
    const int step = min(at, end - 1) * p.ratio() >> 7;
    return exp2_approx(p.step_tops[static_cast<int64>(place) * p.step_stride + step].x - lse);
  }
  static __device__ __forceinline__ void add(float4& sum, const uint4& w, float share) {
    sum.x = fmaf(__uint_as_float(w.x), share, sum.x);
    sum.y = fmaf(__uint_as_float(w.y), share, sum.y);
    sum.z = fmaf(__uint_as_float(w.z), share, sum.z);
    sum.w = fmaf(__uint_as_float(w.w), share, sum.w);
  }
};

// How many of a row's numbers from `begin` on count; the same for all lanes.
template <class Of>
__device__ __forceinline__ int count_from(const BlockWeights& row, int begin, const Of& counts) {
  const int lane = threadIdx.x % 32, end = row.end;
  int found = 0;
#pragma unroll 1
  for (int at = (begin / 4 + lane) * 4; at < end; at += 128) {
    const float4 w = row(at);
    const float x[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) found += at + e >= begin && at + e < end && counts(x[e]);
  }
  return __reduce_add_sync(kFullWarp, found);
}

__device__ __forceinline__ uint32 weight_bits(float w) { return w != w ? 0x7fffffffu : __float_as_uint(w); }
// Ascends with weights, from 1 on; 0 of what does not count.
__device__ __forceinline__ uint32 number_of(float w, bool counts) { return counts ? weight_bits(w) + 1 : 0; }

// A number from `low` on that `wanted` of the lanes' reach, and up to `spare` more unless they are equals of the last
// one that is wanted; `low` where fewer reach that.
__device__ __forceinline__ uint32 reached_by(uint32 mine, uint32 low, int wanted, int spare) {
  if (__popc(__ballot_sync(kFullWarp, mine >= low)) <= wanted + spare) return low;
  uint32 high = __reduce_max_sync(kFullWarp, mine);
  low = __reduce_min_sync(kFullWarp, mine >= low ? mine : high);
  while (low < high) {
    const uint32 middle = low + (high - low + 1) / 2;
    const int reached = __popc(__ballot_sync(kFullWarp, mine >= middle));
    if (reached < wanted) {
      high = middle - 1;
      continue;
    }
    low = middle;
    if (reached <= wanted + spare) break;
  }
  return low;
}

// Appends what reaches `low` to a warp's candidates; `found`, and the candidates with it, ascend.
__device__ __forceinline__ void append(uint32* candidates, int* blocks, int& found, uint32 x, int block, uint32 low) {
  const uint32 lanes = __ballot_sync(kFullWarp, x >= low);
  const int place = found + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
  if (x >= low && place < 32) {
    candidates[place] = x;
    blocks[place] = block;
  }
  found += __popc(lanes);
}

// Weights that compressed attention has left, with one query head of a KV head and a block of four strides: only the
// steps of 32 blocks are read that may have one of the most, by the largest weight of each.
//
// Candidates, as in nsa_top_blocks, and how many; more than 32: it takes another way.
__device__ __forceinline__ int step_candidates(const NsaParams& p, int row, int begin, int end, int wanted, uint32& low,
                                               uint32* candidates, int* blocks) {
  constexpr int kNone = 33, kRead = 16;  // steps
  const int lane = threadIdx.x % 32, steps = (end + 31) / 32;
  if (!p.fused || p.group != 1 || p.ratio() != 4 || steps > 64) return kNone;
  const float2* tops = p.step_tops + static_cast<int64>(row) * p.step_stride;
  const float* weights = p.weights + static_cast<int64>(row) * p.weight_stride;
  const float lse = p.head_lse[row];
  const auto number = [&](int step, float w, float share) {
    const int block = step * 32 + lane;
    return number_of(w * share, (block >= begin) & (block < end));
  };
  float share[2];
  uint32 most[2], which[2];  // of the lane's steps, lane and lane + 32: the largest number; bits of steps to be read
  const float first = weights[lane], last = weights[(steps - 1) * 32 + lane];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int step = half * 32 + lane;
    const float2 top = step < steps ? tops[step] : make_float2(0.f, 0.f);
    share[half] = exp2_approx(top.x - lse);
    most[half] = number_of(top.y * share[half], step < steps);
  }
  const auto share_of = [&](int step) {
    const float low_half = __shfl_sync(kFullWarp, share[0], step % 32);
    if (steps <= 32) return low_half;
    const float high_half = __shfl_sync(kFullWarp, share[1], step % 32);
    return step < 32 ? low_half : high_half;
  };
  low = 1;
  if (steps <= kRead) {
    which[0] = (1u << steps) - 1;
    which[1] = 0;
  } else {
    // Of the first step and the last some blocks do not count.
    const uint32 of_first = __reduce_max_sync(kFullWarp, number(0, first, share_of(0)));
    const uint32 of_last = __reduce_max_sync(kFullWarp, number(steps - 1, last, share_of(steps - 1)));
    if (lane == 0) most[0] = of_first;
    if (lane == (steps - 1) % 32) (steps > 32 ? most[1] : most[0]) = of_last;
    low = reached_by(max(most[0], most[1]), 1, wanted, kSpare);
    which[0] = __ballot_sync(kFullWarp, most[0] >= low);
    which[1] = __ballot_sync(kFullWarp, most[1] >= low);
    if (__popc(which[0]) + __popc(which[1]) > kRead) return kNone;
  }
  uint32 x[kRead];
  int step_of[kRead];
#pragma unroll
  for (int i = 0; i < kRead; ++i) {
    const int half = which[0] == 0, step = __ffs(which[half]) - 1;  // -1: there is none any more
    which[half] &= which[half] - 1;
    step_of[i] = step < 0 ? -1 : step + half * 32;
    x[i] = step < 0 ? 0 : __float_as_uint(weights[step_of[i] * 32 + lane]);
  }
  uint32 largest = 0;
#pragma unroll
  for (int i = 0; i < kRead; ++i) {
    const float of_step = share_of(max(step_of[i], 0));
    x[i] = step_of[i] < 0 ? 0 : number(step_of[i], __uint_as_float(x[i]), of_step);
    largest = max(largest, x[i]);
  }
  if (steps <= kRead) low = reached_by(largest, 1, wanted, kSpare);
  int found = 0;
#pragma unroll
  for (int i = 0; i < kRead; ++i)
    if (step_of[i] >= 0) append(candidates, blocks, found, x[i], step_of[i] * 32 + lane, low);
  return found;
}

// All that count, a token's own blocks apart: see step_candidates.
__device__ __forceinline__ int all_candidates(const BlockWeights& row, int begin, int wanted, uint32& low,
                                              uint32* candidates, int* blocks) {
  constexpr int kAtATime = 4;  // groups of 128 weights whose heads are added up
  const NsaParams& p = row.p;
  const int lane = threadIdx.x % 32, end = row.end, rows = p.fused ? p.group : 1;
  const auto numbers = [&](int group, const float4& w) {
    const float x[4] = {w.x, w.y, w.z, w.w};
    uint4 found;
    uint32* to[4] = {&found.x, &found.y, &found.z, &found.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int block = group + lane * 4 + e;
      *to[e] = number_of(x[e], (block >= begin) & (block < end));
    }
    return found;
  };
  // All of a row, or what registers hold of it. use(group, x): of 128 weights from `group` on the lane's four; lanes
  // come together.
  uint4 held[kHeldGroups];
#pragma unroll
  for (int first = 0; first < kHeldGroups; first += kAtATime) {
    float4 w[kAtATime];
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) w[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (first * 128 < end) {
#pragma unroll 1
      for (int head = 0; head < rows; ++head) {
        const int place = row.row * rows + head;
        uint4 of_head[kAtATime];
        float share[kAtATime];
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) of_head[i] = row.load(place, (first + i) * 128 + lane * 4);
        const float lse = p.fused ? p.head_lse[place] : 0.f;
#pragma unroll
        for (int i = 0; i < kAtATime; ++i)
          share[i] = p.fused ? row.share(place, (first + i) * 128 + lane * 4, lse) : 1.f;
#pragma unroll
        for (int i = 0; i < kAtATime; ++i) BlockWeights::add(w[i], of_head[i], share[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtATime; ++i) held[first + i] = numbers((first + i) * 128, w[i]);
  }
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i)
      if (i * 128 < end) use(i * 128, held[i]);
#pragma unroll 1
    for (int group = kHeldGroups * 128; group < end; group += 128) use(group, numbers(group, row(group + lane * 4)));
  };
  uint32 largest = 0;
  each([&](int, const uint4& x) { largest = max(max(max(largest, x.x), max(x.y, x.z)), x.w); });
  low = reached_by(largest, 1, wanted, kSpare);
  const uint32 before = (1u << lane) - 1;
  int found = 0;
  each([&](int group, const uint4& of_lane) {
    if (found > 32) return;
    const uint32 x[4] = {of_lane.x, of_lane.y, of_lane.z, of_lane.w};
    uint32 reaches = 0;  // a bit for each of the lane's four
#pragma unroll
    for (int e = 0; e < 4; ++e) reaches |= static_cast<uint32>(x[e] >= low) << e;
    if (!__any_sync(kFullWarp, reaches)) return;
    int place = found;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32 lanes = __ballot_sync(kFullWarp, reaches >> e & 1);
      place += __popc(lanes & before);
      found += __popc(lanes);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int taken = reaches >> e & 1;
      if (taken && place < 32) {
        candidates[place] = x[e];
        blocks[place] = group + lane * 4 + e;
      }
      place += taken;
    }
  });
  return found;
}

// A warp for each token of a KV row: p.tiles warps.
__device__ __forceinline__ void nsa_top_blocks(const NsaParams& p, TopShared& shared) {
  const int lane = threadIdx.x % 32;
  const uint32 warp = blockIdx.x * (kTopThreads / 32) + threadIdx.x / 32;
  if (warp >= static_cast<uint32>(p.q_tiles) * p.tokens) return;  // KV rows
  const int kv_row = warp / p.tokens, of_round = warp - kv_row * p.tokens;
  const int token = p.first_token + of_round, own = p.own_block(token);
  int* chosen = p.chosen + (static_cast<int64>(kv_row) * p.geometry.seqlen_q + token) * p.top;
  if (own + 1 <= p.top) {
    for (int i = lane; i < p.top; i += 32) chosen[i] = i <= own ? i : -1;
    return;
  }
  // More blocks than slots: the first and the last are all there, and others than those.
  const int begin = p.first, end = own - p.local + 1, wanted = p.top - p.first - p.local;
  for (int i = lane; i < p.first; i += 32) chosen[i] = i;
  for (int i = lane; i < p.local; i += 32) chosen[p.first + wanted + i] = end + i;
  if (wanted == 0) return;
  const BlockWeights row{p, static_cast<int>(warp), end};
  const uint32 before = (1u << lane) - 1;

  // A number that a few more than are wanted reach, and those. Seldom are there more than 32: they are sorted out by
  // halving what is left between their least and their most.
  uint32* candidates = shared.weight[threadIdx.x / 32];
  int* blocks = shared.block[threadIdx.x / 32];
  uint32 low = 1;
  int found = step_candidates(p, row.row, begin, end, wanted, low, candidates, blocks);
  if (found > 32) found = all_candidates(row, begin, wanted, low, candidates, blocks);
  if (found <= 32) {
    __syncwarp();
    const uint32 mine = lane < found ? candidates[lane] : 0;
    const uint32 least = reached_by(mine, low, wanted, 0);
    const uint32 above = __ballot_sync(kFullWarp, mine > least), same = __ballot_sync(kFullWarp, mine == least);
    const bool taken = mine > least || (mine == least && __popc(above) + __popc(same & before) < wanted);
    const uint32 lanes = __ballot_sync(kFullWarp, taken);
    if (taken) chosen[p.first + __popc(lanes & before)] = blocks[lane];
    return;
  }

  // Else all that count, by halving what is left of the weights' bits between `low` and NaN's.
  uint32 high = 0x7fffffffu;
  low -= 1;
  int reach = -1;  // how many reach `low`, once it is known
  while (low < high) {
    const uint32 middle = low + (high - low + 1) / 2;
    const int reached = count_from(row, begin, [&](float w) { return weight_bits(w) >= middle; });
    if (reached < wanted) {
      high = middle - 1;
      continue;
    }
    low = middle;
    reach = reached;
    if (reached == wanted) break;
  }
  // Of those that weigh just as much only as many as are missing, the first.
  int equals = 1 << 30;
  if (reach != wanted)
    equals = wanted - count_from(row, begin, [&](float w) { return weight_bits(w) > low; });
  int written = 0;
  for (int group = begin / 4 * 4; group < end && written < wanted; group += 128) {
    const int at = group + lane * 4;
    uint32 above = 0, same = 0;  // a bit for each of the lane's four
    if (at < end) {
      const float4 w = row(at);
      const float x[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool there = at + e >= begin && at + e < end;
        above |= static_cast<uint32>(there && weight_bits(x[e]) > low) << e;
        same |= static_cast<uint32>(there && weight_bits(x[e]) == low) << e;
      }
    }
    if (!__any_sync(kFullWarp, above | same)) continue;
    // Those that weigh the same: how many are before the lane's.
    int same_before = 0, same_in_all = 0;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32 lanes = __ballot_sync(kFullWarp, same >> e & 1);
      same_before += __popc(lanes & before);
      same_in_all += __popc(lanes);
    }
    uint32 taken = above;
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (same >> e & 1) taken |= static_cast<uint32>(same_before++ < equals) << e;
    equals -= same_in_all;
    int place = written;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const uint32 lanes = __ballot_sync(kFullWarp, taken >> e & 1);
      place += __popc(lanes & before);
      written += __popc(lanes);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (taken >> e & 1) chosen[p.first + place++] = at + e;
  }
}

}  // namespace s2o
