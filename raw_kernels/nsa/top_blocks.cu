// The blocks of each token: those that are always chosen, and of the others the ones of most weight.
//
//   weights [KV rows, tokens, weight_stride], or of each head, to be added up
//   -> chosen [KV rows, seqlen_q, top], ascending, -1 behind the last
//
// Weights are not negative, so their bits ascend as they do; NaN is the most of all, and of equals the lower block wins.
#include "nsa/params.cuh"

namespace s2o {

constexpr int kTopThreads = 128;
constexpr int kSpare = 2;       // lanes more than are wanted, that a number which is found sooner may let in
constexpr int kHeldGroups = 8;  // of 128 weights, four of each lane, that a warp holds in registers
constexpr int kReadSteps = 16;  // of 32 blocks, that a warp holds where it reads no others

// Of a warp.
struct TopShared {
  int2 candidates[kTopThreads / 32][32];     // numbers of blocks that may be among those of most weight, and these
  int2 steps[kTopThreads / 32][kReadSteps];  // first blocks of steps that are read, and bits of their weights' factors
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

__device__ __forceinline__ int weight_bits(float w) { return w != w ? 0x7fffffff : __float_as_int(w); }
// Ascends with weights; -1 of what does not count.
__device__ __forceinline__ int number_of(float w, bool counts) { return counts ? weight_bits(w) : -1; }

// A number from `low` on that `wanted` of the lanes' reach, and up to `spare` more unless they are equals of the last
// one that is wanted; `low` where fewer reach that.
__device__ __forceinline__ int reached_by(int mine, int low, int wanted, int spare) {
  if (__popc(__ballot_sync(kFullWarp, mine >= low)) <= wanted + spare) return low;
  int high = __reduce_max_sync(kFullWarp, mine);
  low = __reduce_min_sync(kFullWarp, mine >= low ? mine : high);
  while (low < high) {
    const int middle = low + static_cast<int>((static_cast<uint32>(high - low) + 1) / 2);
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
__device__ __forceinline__ void append(int2* candidates, int& found, int x, int block, int low) {
  const uint32 lanes = __ballot_sync(kFullWarp, x >= low);
  const int place = found + __popc(lanes & ((1u << threadIdx.x % 32) - 1));
  if (x >= low && place < 32) candidates[place] = make_int2(x, block);
  found += __popc(lanes);
}

// Where the largest weights of steps are known, of one row, and a block is four strides: only the steps of 32 blocks are
// read that may have one of the most.
//
// Candidates, as in nsa_top_blocks, and how many; more than 32: it takes another way.
__device__ __forceinline__ int step_candidates(const NsaParams& p, int row, int begin, int end, int wanted, int& low,
                                               int2* candidates, int2* listed) {
  constexpr int kNone = 33;
  const int lane = threadIdx.x % 32, steps = (end + 31) / 32;
  if (!p.step_tops || (p.fused && p.group != 1) || p.ratio() != 4 || steps > 64) return kNone;
  const float2* tops = p.step_tops + static_cast<int64>(row) * p.step_stride;
  const float* weights = p.weights + static_cast<int64>(row) * p.weight_stride;
  const float lse = p.fused ? p.head_lse[row] : 0.f;
  const uint32 before = (1u << lane) - 1;
  // A product of floats is NaN with the bits that are the most.
  const auto number = [&](float w, float share, int block) {
    return static_cast<uint32>(block - begin) < static_cast<uint32>(end - begin) ? __float_as_int(w * share) : -1;
  };
  float share[2];
  int most[2];  // of the lane's steps, lane and lane + 32: the largest number
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int step = half * 32 + lane;
    const float2 top = step < steps ? tops[step] : make_float2(0.f, 0.f);
    share[half] = exp2_approx(top.x - lse);
    most[half] = step < steps ? __float_as_int(top.y * share[half]) : -1;
  }
  low = 0;
  int count = steps;
  if (steps <= kReadSteps) {
    if (lane < steps) listed[lane] = make_int2(lane * 32, __float_as_int(share[0]));
  } else {
    // Of the first step and the last some blocks do not count, perhaps those of most weight.
    const int last = steps - 1;
    low = reached_by(max(lane == 0 || lane == last ? -1 : most[0], lane + 32 == last ? -1 : most[1]), 0, wanted, 1);
    count = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32 which = __ballot_sync(kFullWarp, most[half] >= low);
      const int place = count + __popc(which & before);
      if (most[half] >= low && place < kReadSteps)
        listed[place] = make_int2((half * 32 + lane) * 32, __float_as_int(share[half]));
      count += __popc(which);
    }
    if (count > kReadSteps) return kNone;
  }
  if (lane >= count && lane < kReadSteps) listed[lane] = make_int2(steps * 32, 0);  // no blocks that count
  __syncwarp();
  float w[kReadSteps];
#pragma unroll
  for (int i = 0; i < kReadSteps; ++i) w[i] = i < count ? weights[listed[i].x + lane] : 0.f;
  int x[kReadSteps], largest = -1;
#pragma unroll
  for (int i = 0; i < kReadSteps; ++i) {
    const int2 step = listed[i];
    x[i] = number(w[i], __int_as_float(step.y), step.x + lane);
    largest = max(largest, x[i]);
  }
  if (steps <= kReadSteps) low = reached_by(largest, 0, wanted, kSpare);
  int found = 0;
#pragma unroll
  for (int i = 0; i < kReadSteps; ++i) append(candidates, found, x[i], listed[i].x + lane, low);
  return found;
}

// All that count, a token's own blocks apart: see step_candidates.
__device__ __forceinline__ int all_candidates(const BlockWeights& row, int begin, int wanted, int& low,
                                              int2* candidates) {
  constexpr int kAtATime = 4;  // groups of 128 weights whose heads are added up
  const NsaParams& p = row.p;
  const int lane = threadIdx.x % 32, end = row.end, rows = p.fused ? p.group : 1;
  const auto numbers = [&](int group, const float4& w) {
    const float x[4] = {w.x, w.y, w.z, w.w};
    int4 found;
    int* to[4] = {&found.x, &found.y, &found.z, &found.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int block = group + lane * 4 + e;
      *to[e] = number_of(x[e], (block >= begin) & (block < end));
    }
    return found;
  };
  // All of a row, or what registers hold of it. use(group, x): of 128 weights from `group` on the lane's four; lanes
  // come together.
  int4 held[kHeldGroups];
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
  int largest = -1;
  each([&](int, const int4& x) { largest = max(max(max(largest, x.x), max(x.y, x.z)), x.w); });
  low = reached_by(largest, 0, wanted, kSpare);
  const uint32 before = (1u << lane) - 1;
  int found = 0;
  each([&](int group, const int4& of_lane) {
    if (found > 32) return;
    const int x[4] = {of_lane.x, of_lane.y, of_lane.z, of_lane.w};
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
      if (taken && place < 32) candidates[place] = make_int2(x[e], group + lane * 4 + e);
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
    if (lane < p.top) chosen[lane] = lane <= own ? lane : -1;
    return;
  }
  // More blocks than slots: the first and the last are all there, and others than those.
  const int begin = p.first, end = own - p.local + 1, wanted = p.top - p.first - p.local;
  if (lane < p.first) chosen[lane] = lane;
  if (lane < p.local) chosen[p.first + wanted + lane] = end + lane;
  if (wanted == 0) return;
  const BlockWeights row{p, static_cast<int>(warp), end};
  const uint32 before = (1u << lane) - 1;

  // A number that a few more than are wanted reach, and those. Seldom are there more than 32: they are sorted out by
  // halving what is left between their least and their most.
  int2* candidates = shared.candidates[threadIdx.x / 32];
  int low = 0;
  int found = step_candidates(p, row.row, begin, end, wanted, low, candidates, shared.steps[threadIdx.x / 32]);
  if (found > 32) found = all_candidates(row, begin, wanted, low, candidates);
  if (found <= 32) {
    __syncwarp();
    const int2 candidate = lane < found ? candidates[lane] : make_int2(-1, 0);
    const int mine = candidate.x, least = reached_by(mine, low, wanted, 0);
    const uint32 above = __ballot_sync(kFullWarp, mine > least), same = __ballot_sync(kFullWarp, mine == least);
    const bool taken = mine > least || (mine == least && __popc(above) + __popc(same & before) < wanted);
    const uint32 lanes = __ballot_sync(kFullWarp, taken);
    if (taken) chosen[p.first + __popc(lanes & before)] = candidate.y;
    return;
  }

  // Else all that count, by halving what is left of the weights' bits between `low` and NaN's.
  int high = 0x7fffffff;
  int reach = -1;  // how many reach `low`, once it is known
  while (low < high) {
    const int middle = low + static_cast<int>((static_cast<uint32>(high - low) + 1) / 2);
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
