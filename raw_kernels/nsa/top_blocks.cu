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
constexpr int kPiece = 8;       // blocks whose largest weight is known
constexpr int kLanePieces = 8;  // of a lane, at most

// Of a warp.
struct alignas(16) WarpTop {
  int numbers[32];  // of blocks that may be among those of most weight
  int blocks[32];   // these blocks
  int2 pieces[32];  // that are read: first blocks, and bits of their weights' factors
};

struct TopShared {
  WarpTop of_warp[kTopThreads / 32];
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
    return exp2_approx(p.step_bases[static_cast<int64>(place) * p.step_stride + step] - lse);
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

// How many of the first `count` numbers are greater than the lane's. None is negative, and those behind `count` are 0.
__device__ __forceinline__ int greater_than(const int* numbers, int mine, int count) {
  int found[4] = {};  // apart, so that no sum waits for the one before
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    if (4 * i >= count) break;
    const int4 x = reinterpret_cast<const int4*>(numbers)[i];
    const int of[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int e = 0; e < 4; ++e) found[e] += static_cast<uint32>(mine - of[e]) >> 31;  // the sign: nothing overflows
  }
  return (found[0] + found[1]) + (found[2] + found[3]);
}

// The `wanted`-th largest of the lanes' numbers, none of which is negative.
__device__ __forceinline__ int largest_but(int* numbers, int mine, int wanted) {
  __syncwarp();
  numbers[threadIdx.x % 32] = mine;
  __syncwarp();
  const int greater = greater_than(numbers, mine, 32);
  return __reduce_min_sync(kFullWarp, greater < wanted ? mine : 0x7fffffff);
}

// Of kNumbers of each lane, neighbours, those that reach `low`: use(i, place) of the lane's, behind `found` others and those
// of lanes before, as far as place is below 32. `found` becomes how many there are with these.
template <int kNumbers, class Use>
__device__ __forceinline__ void each_that_reaches(const int (&x)[kNumbers], int low, int& found, const Use& use) {
  const uint32 before = (1u << threadIdx.x % 32) - 1;
  int place = found;
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    const uint32 lanes = __ballot_sync(kFullWarp, x[i] >= low);
    place += __popc(lanes & before);
    found += __popc(lanes);
  }
#pragma unroll
  for (int i = 0; i < kNumbers; ++i) {
    const bool reaches = x[i] >= low;
    if (reaches & (place < 32)) use(i, place);
    place += reaches;
  }
}

// A row's pieces of eight blocks that may have one of those of most weight, kOwn of each lane: how many, of which up to 32
// are listed, in order. `low`: a number that the weights of `wanted` blocks reach, or 0.
//
// The largest weight of a piece some of whose blocks do not count may be theirs; so it says nothing of `low`.
template <int kOwn>
__device__ __forceinline__ int list_pieces(const NsaParams& p, int row, int begin, int end, int wanted, int& low,
                                           WarpTop& shared) {
  constexpr int kSteps = (kOwn + 3) / 4;  // of 128 compressed keys
  const int first = threadIdx.x % 32 * kOwn, pieces = (end + kPiece - 1) / kPiece;
  const int whole = (begin + kPiece - 1) / kPiece, wholes = end / kPiece - whole;
  const float* tops = p.step_tops + (static_cast<int64>(row) * p.step_stride * 4 + first);
  float top[kOwn], share[kSteps];
#pragma unroll
  for (int i = 0; i < kOwn; ++i) top[i] = 0.f;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) share[i] = 1.f;
  if (first < pieces) {
    if constexpr (kOwn == 1) {
      top[0] = *tops;
    } else if constexpr (kOwn == 2) {
      const float2 x = *reinterpret_cast<const float2*>(tops);
      top[0] = x.x;
      top[1] = x.y;
    } else {
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const float4 x = reinterpret_cast<const float4*>(tops)[i];
        top[4 * i] = x.x;
        top[4 * i + 1] = x.y;
        top[4 * i + 2] = x.z;
        top[4 * i + 3] = x.w;
      }
    }
    if (p.fused) {
      const float lse = p.head_lse[row];
      const float* bases = p.step_bases + (static_cast<int64>(row) * p.step_stride + first / 4);
#pragma unroll
      for (int i = 0; i < kSteps; ++i) share[i] = exp2_approx(bases[i] - lse);
    }
  }
  int x[kOwn], most = 0;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    x[i] = first + i < pieces ? __float_as_int(top[i] * share[i / 4]) : -1;
    if (static_cast<uint32>(first + i - whole) < static_cast<uint32>(max(wholes, 0))) most = max(most, x[i]);
  }
  low = largest_but(shared.numbers, most, wanted);
  int count = 0;
  each_that_reaches(x, low, count, [&](int i, int place) {
    shared.pieces[place] = make_int2((first + i) * kPiece, __float_as_int(share[i / 4]));
  });
  __syncwarp();
  return count;
}

// Where the largest weights of pieces are known, of one row, and a block is four strides: only pieces are read that may
// have one of the most.
//
// Candidates, as in nsa_top_blocks, and how many; more than 32: it takes another way.
__device__ __forceinline__ int piece_candidates(const NsaParams& p, int row, int begin, int end, int wanted,
                                                WarpTop& shared) {
  constexpr int kNone = 33, kAtOnce = 16;  // pieces
  const int lane = threadIdx.x % 32, pieces = (end + kPiece - 1) / kPiece;
  if (!p.step_tops || (p.fused && p.group != 1) || p.ratio() != 4 || pieces > 32 * kLanePieces) return kNone;
  int low, count;
  if (pieces <= 32) {
    count = list_pieces<1>(p, row, begin, end, wanted, low, shared);
  } else if (pieces <= 64) {
    count = list_pieces<2>(p, row, begin, end, wanted, low, shared);
  } else if (pieces <= 128) {
    count = list_pieces<4>(p, row, begin, end, wanted, low, shared);
  } else {
    count = list_pieces<8>(p, row, begin, end, wanted, low, shared);
  }
  if (count > 32) return kNone;
  // Two lanes read a piece. A product of floats is NaN with the bits that are the most.
  const float* weights = p.weights + (static_cast<int64>(row) * p.weight_stride + lane % 2 * 4);
  int block[2], x[2][4];
  float4 w[2];
  float share[2];
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const int at = turn * kAtOnce + lane / 2;
    w[turn] = make_float4(0.f, 0.f, 0.f, 0.f);
    block[turn] = end;
    share[turn] = 0.f;
    if (at < count) {
      const int2 piece = shared.pieces[at];
      w[turn] = *reinterpret_cast<const float4*>(weights + piece.x);
      block[turn] = piece.x + lane % 2 * 4;
      share[turn] = __int_as_float(piece.y);
    }
  }
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    const float of[4] = {w[turn].x, w[turn].y, w[turn].z, w[turn].w};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const bool counts = static_cast<uint32>(block[turn] + e - begin) < static_cast<uint32>(end - begin);
      x[turn][e] = counts ? __float_as_int(of[e] * share[turn]) : -1;
    }
  }
  // Few pieces, all listed: lanes have more numbers than there are pieces.
  if (low == 0 && count <= kAtOnce)
    low = largest_but(shared.numbers, max(max(max(x[0][0], x[0][1]), max(x[0][2], x[0][3])), 0), wanted);
  __syncwarp();
  int found = 0;
#pragma unroll
  for (int turn = 0; turn < 2; ++turn) {
    if (turn * kAtOnce >= count) break;
    each_that_reaches(x[turn], low, found, [&](int e, int place) {
      shared.numbers[place] = x[turn][e];
      shared.blocks[place] = block[turn] + e;
    });
  }
  return found;
}

// All that count, a token's own blocks apart: see piece_candidates. `low`: what the candidates reach.
__device__ __forceinline__ int all_candidates(const BlockWeights& row, int begin, int wanted, int& low,
                                              WarpTop& shared) {
  constexpr int kAtATime = 2;  // groups of 128 weights whose heads are added up
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
      if (taken && place < 32) {
        shared.numbers[place] = x[e];
        shared.blocks[place] = group + lane * 4 + e;
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

  // What reaches a number that a few more than are wanted reach. Seldom are there more than 32: they are sorted out by
  // halving what is left between their least and their most.
  WarpTop& mine = shared.of_warp[threadIdx.x / 32];
  int low = 0;
  int found = piece_candidates(p, row.row, begin, end, wanted, mine);
  if (found > 32) found = all_candidates(row, begin, wanted, low, mine);
  if (found <= 32) {
    if (lane >= found) mine.numbers[lane] = 0;
    __syncwarp();
    const int number = mine.numbers[lane];
    bool taken = greater_than(mine.numbers, number, found) < wanted && lane < found;
    if (__popc(__ballot_sync(kFullWarp, taken)) > wanted) {  // the last ones are equals, of which the first are taken
      const int least = __reduce_min_sync(kFullWarp, taken ? number : 0x7fffffff);
      const uint32 above = __ballot_sync(kFullWarp, number > least), same = __ballot_sync(kFullWarp, number == least);
      taken = number > least || (number == least && __popc(above) + __popc(same & before) < wanted);
    }
    const uint32 lanes = __ballot_sync(kFullWarp, taken);
    if (taken) chosen[p.first + __popc(lanes & before)] = mine.blocks[lane];
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
