// The blocks of each token: those that are always chosen, and of the others the ones of most weight.
//
//   weights [KV rows, tokens, weight_stride], or of each head, to be added up -> chosen [KV rows, seqlen_q, top], ascending, -1 behind the last
//
// Weights are not negative, so their bits ascend as they do; NaN is the most of all, and of equals the lower block wins.
#include "nsa/params.cuh"

namespace s2o {

constexpr int kTopThreads = 128;
constexpr int kHeldGroups = 8;  // of 128 weights, four of each lane, that a warp holds in registers

// Of a warp: blocks that may be among those of most weight, ascending.
struct TopShared {
  uint32 weight[kTopThreads / 32][32];
  int block[kTopThreads / 32][32];
};

// A token's weights, four neighbours at a time.
struct BlockWeights {
  const NsaParams& p;
  int64 row;  // of KV rows and tokens of the round
  int end;    // of the blocks that count
  __device__ __forceinline__ float4 operator()(int at) const {
    if (at >= end) return make_float4(0.f, 0.f, 0.f, 0.f);
    if (!p.fused) return *reinterpret_cast<const float4*>(p.weights + row * p.weight_stride + at);
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
    for (int head = 0; head < p.group; ++head) add(sum, at, row * p.group + head);
    return sum;
  }
  // Those of one head, which are relative to the maximum of their step of 128 compressed keys.
  __device__ __forceinline__ void add(float4& sum, int at, int64 place) const {
    const float4 w = *reinterpret_cast<const float4*>(p.weights + place * p.weight_stride + at);
    const int step = at * ((1 << p.block_shift) / p.stride) / 128;
    const float share = exp2_approx(p.step_tops[place * p.step_stride + step] - p.head_lse[place]);
    sum.x = fmaf(w.x, share, sum.x);
    sum.y = fmaf(w.y, share, sum.y);
    sum.z = fmaf(w.z, share, sum.z);
    sum.w = fmaf(w.w, share, sum.w);
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
  const BlockWeights row{p, warp, end};

  // Numbers that ascend with weights, from 1 on; 0 of what does not count.
  const auto numbers = [&](int group, const float4& w) {
    uint32 x[4] = {weight_bits(w.x) + 1, weight_bits(w.y) + 1, weight_bits(w.z) + 1, weight_bits(w.w) + 1};
    if (group < begin || group + 128 > end) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int block = group + lane * 4 + e;
        x[e] = (block >= begin) & (block < end) ? x[e] : 0;
      }
    }
    return make_uint4(x[0], x[1], x[2], x[3]);
  };
  // All of a row, or what registers hold of it, is under way at once. use(group, x): of 128 weights from `group` on the
  // lane's four; lanes come together.
  uint4 held[kHeldGroups];
  {
    float4 w[kHeldGroups];
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) w[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    if (p.fused) {
#pragma unroll 1
      for (int head = 0; head < p.group; ++head) {
#pragma unroll
        for (int i = 0; i < kHeldGroups; ++i)
          if (i * 128 + lane * 4 < end) row.add(w[i], i * 128 + lane * 4, row.row * p.group + head);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kHeldGroups; ++i) w[i] = row(i * 128 + lane * 4);
    }
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i) held[i] = numbers(i * 128, w[i]);
  }
  const auto each = [&](const auto& use) {
#pragma unroll
    for (int i = 0; i < kHeldGroups; ++i)
      if (i * 128 < end) use(i * 128, held[i]);
#pragma unroll 1
    for (int group = kHeldGroups * 128; group < end; group += 128) use(group, numbers(group, row(group + lane * 4)));
  };

  // The number that just as many as are wanted reach: at least the wanted-th largest of the lanes' own largest.
  uint32 largest = 0;
  each([&](int, const uint4& x) { largest = max(max(max(largest, x.x), max(x.y, x.z)), x.w); });
  int rank = 0;
  for (int other = 0; other < 32; ++other) {
    const uint32 theirs = __shfl_sync(kFullWarp, largest, other);
    rank += theirs > largest || (theirs == largest && other < lane);
  }
  uint32 low = max(1u, __shfl_sync(kFullWarp, largest, __ffs(__ballot_sync(kFullWarp, rank == wanted - 1)) - 1));
  const uint32 before = (1u << lane) - 1;

  // Seldom are there more than 32 of those: then each knows its rank, and with it whether it is one of the wanted.
  uint32* candidates = shared.weight[threadIdx.x / 32];
  int* blocks = shared.block[threadIdx.x / 32];
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
  if (found <= 32) {
    __syncwarp();
    const uint32 mine = lane < found ? candidates[lane] : 0;
    int more = 0;  // before it in rank
    for (int other = 0; other < found; ++other) {
      const uint32 theirs = __shfl_sync(kFullWarp, mine, other);
      more += theirs > mine || (theirs == mine && other < lane);
    }
    const bool taken = lane < found && more < wanted;
    const uint32 lanes = __ballot_sync(kFullWarp, taken);
    if (taken) chosen[p.first + __popc(lanes & before)] = blocks[lane];
    return;
  }

  // Else by halving what is left of the weights' bits between the least and the most.
  uint32 high = __reduce_max_sync(kFullWarp, largest) - 1;
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
