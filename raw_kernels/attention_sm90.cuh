// The Hopper attention tile (sm_90a): one producer warpgroup gathers rows of q, k and v into shared memory with
// cp.async, two consumer warpgroups hold 64 query rows each and multiply with wgmma. Blocks are persistent: each takes
// q tiles from a counter until none is left, and the producer runs ahead into the next tile.
//
// Consumers: the scores of key tile t + 1 and the output of key tile t are in flight together, and softmax of one
// warpgroup runs under the products of the other (named barriers let them issue in turn).
//
// Stopping: after softmax of key tile t, under the products of t + 1, each warp votes; the votes are read before the
// scores of tile t + 2 are issued, so tile t + 1, already in flight, is still visited (STOP_LAG in s2o_cupy/spec.py).
// Producer and consumers read the same votes, so both know which copies were started; consumers release those that
// nobody will use.
//
// Shared memory keeps tiles of 128 rows in 64-column atoms of 128-byte rows, swizzled as wgmma reads them: the 16-byte
// chunk c of row r stands at c ^ (r & 7).
#pragma once
#include "attention_params.cuh"
#include "hopper.cuh"
#include "rows.cuh"

namespace s2o {
namespace sm90 {

constexpr int kBlockM = 128, kBlockN = 128;
constexpr int kWarpgroup = 128;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kConsumerWarps = kConsumers * 4;
constexpr int kProducerRegisters = 56, kConsumerRegisters = 224;
constexpr int kAtomBytes = 128 * 128;
constexpr int kVoteSlots = 4;  // a warpgroup is never more than 3 key tiles ahead of a reader of its votes
// Each has one for either warpgroup, but kTake: a turn to issue products, a look for values that are not finite.
enum NamedBarrier { kTurn = 1, kScan = 3, kTake = 5 };

template <class Element_, int kHeadDim_, int kStages_>
struct Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // head_dim rounded up; the columns past head_dim are zeros
  static constexpr int kStages = kStages_;    // key and value tiles in shared memory
  static constexpr int kDimTiles = kHeadDim / 8;
  static_assert(kHeadDim == 64 || kHeadDim == 128, "head_dim is padded to 64 or 128");

  struct Shared {
    uint16 q[kBlockM * kHeadDim];
    uint16 k[kStages][kBlockN * kHeadDim];
    uint16 v[kStages][kBlockN * kHeadDim];
    int rows[2][kBlockM];            // query positions of this q tile and the next, -1 past the segment
    int work[2];                     // this q tile and the next; -1 at the end
    uint64 votes[kVoteSlots];        // a byte a consumer warp: 1 to stop
    // Barriers: full = copies have landed, empty = all readers are done.
    uint64 q_full, q_empty;
    uint64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    uint64 voted[kVoteSlots];
    uint64 work_full[2], work_empty[2];
  };
};

// A position in a ring of kSlots barriers: which slot, and the parity of its phase.
template <int kSlots>
struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// Did every row of the block vote to stop at key tile `tile` (counted over all q tiles of the block)?
template <class Shared>
__device__ __forceinline__ bool all_voted_to_stop(Shared& shared, uint32 tile) {
  barrier_wait(shared.voted[tile % kVoteSlots], tile / kVoteSlots & 1);
  return *static_cast<volatile uint64*>(&shared.votes[tile % kVoteSlots]) == 0x0101010101010101ull;
}

template <class Traits>
__device__ __forceinline__ void initialise(typename Traits::Shared& shared) {
  if (threadIdx.x == 0) {
    // Each producer thread arrives twice for q: for the positions it wrote and for its copies.
    barrier_init(shared.q_full, 2 * kWarpgroup);
    barrier_init(shared.q_empty, kConsumerWarps);
    for (int s = 0; s < Traits::kStages; ++s) {
      barrier_init(shared.k_full[s], kWarpgroup);
      barrier_init(shared.v_full[s], kWarpgroup);
      barrier_init(shared.k_empty[s], kConsumerWarps);
      barrier_init(shared.v_empty[s], kConsumerWarps);
    }
    for (int s = 0; s < kVoteSlots; ++s) barrier_init(shared.voted[s], kConsumerWarps);
    for (int s = 0; s < 2; ++s) {
      barrier_init(shared.work_full[s], 1);
      barrier_init(shared.work_empty[s], kConsumerWarps + 4);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

// --- Producer ---

// Which rows of a 128-row tile a producer thread copies: kLanes threads a row, kRows rows of a warp at a time. Each
// lane also keeps the index of one of the rows its kLanes threads copy, and the others get it by a shuffle.
template <int kHeadDim>
struct CopyLayout {
  static constexpr int kLanes = kHeadDim / 8;
  static constexpr int kRows = 32 / kLanes;
  static constexpr int kPasses = 32 / kRows;
  static constexpr int kPassBytes = 4 * kRows * 128;  // from a pass's rows to the next's, in an atom

  uint32 target;  // of this thread's first chunk in a tile
  int chunk;      // its offset in a row, in elements
  bool inside;    // of head_dim

  __device__ __forceinline__ explicit CopyLayout(int head_dim) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    const int row = thread / 32 * kRows + lane / kLanes, c = lane % kLanes;
    target = c / 8 * kAtomBytes + row * 128 + ((c % 8 ^ (row & 7)) << 4);
    inside = c * 8 < head_dim;
    chunk = inside ? c * 8 : 0;
  }
  // The row whose index this lane keeps.
  static __device__ __forceinline__ int kept_row() {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    return lane % kLanes * (4 * kRows) + thread / 32 * kRows + lane / kLanes;
  }
  // Starts the copy of 128 rows; `kept` is the index of this lane's row, or -1 for zeros, which kFull excludes.
  // A row begins `row_units` times 16 bytes after the one before it; the plan sees to it that 32 bits hold its offset.
  template <bool kFull>
  __device__ __forceinline__ void gather(uint32 tile, const uint16* data, uint32 row_units, int kept) const {
    uint64 base = __cvta_generic_to_global(data + chunk);
    asm volatile("" : "+l"(base));  // one address, not the terms of a sum: a row's is then one multiply-add away
    const uint32 offset = kept < 0 ? ~0u : static_cast<uint32>(kept) * row_units;
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const uint32 units = __shfl_sync(kFullWarp, offset, pass, kLanes);
      const uint32 to = tile + target + pass * kPassBytes;
      if (kFull) {
        cp_async_16(to, reinterpret_cast<const void*>(base + units * 16ull));
      } else {
        const bool present = units != ~0u && inside;
        cp_async_16_or_zeros(to, reinterpret_cast<const void*>(base + (present ? units : 0) * 16ull), present);
      }
    }
  }
  __device__ __forceinline__ void gather(uint32 tile, const uint16* data, uint32 row_units, int kept, bool full) const {
    if (full) {
      gather<true>(tile, data, row_units, kept);
    } else {
      gather<false>(tile, data, row_units, kept);
    }
  }
};

// The next q tile that has work, or -1.
template <class Rows, bool kOrdered>
__device__ __forceinline__ int next_work(const AttentionParams& params) {
  for (;;) {
    const int work = atomicAdd(params.next_work, 1);
    if (work >= params.works) return -1;
    const Rows rows(params, work);
    // Pass 1 writes the (empty) state of rows without keys, too.
    if (rows.count > 0 && (!kOrdered || rows.keys(params.geometry) > 0)) return work;
  }
}

template <class Traits, class Rows, bool kOrdered>
__device__ __forceinline__ void produce(const AttentionParams& params, typename Traits::Shared& shared) {
  constexpr int kStages = Traits::kStages;
  const Geometry& g = params.geometry;
  const CopyLayout<Traits::kHeadDim> layout(g.head_dim);
  const int row = layout.kept_row(), thread = threadIdx.x % kWarpgroup;
  const auto units = [](int64 row_stride) { return static_cast<uint32>(row_stride / 8); };  // of 16 bytes
  const uint32 q_units = units(params.q.row), k_units = units(params.k.row), v_units = units(params.v.row);
  if (thread == 0) {
    shared.work[0] = next_work<Rows, kOrdered>(params);
    barrier_arrive(shared.work_full[0]);
  }
  Ring<kStages> k_ring, v_ring;
  Ring<1> q_ring;  // shared memory holds one q tile
  uint32 voted = 0;  // key tiles of the q tiles before this one
  for (uint32 item = 0;; ++item) {
    const uint32 slot = item % 2, item_parity = item / 2 & 1;
    barrier_wait(shared.work_full[slot], item_parity);
    const int work = shared.work[slot];
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(shared.work_empty[slot]);
    if (work < 0) return;

    const Rows rows(params, work);
    const int batch = rows.batch(params.heads), kv_head = rows.kv_head(params.heads, params.kv_heads);
    const uint16 *k = params.k.at(batch, kv_head), *v = params.v.at(batch, kv_head);
    const int count = rows.keys(g), tiles = (count + kBlockN - 1) / kBlockN;
    const auto key = [&](int tile) {
      const int i = tile * kBlockN + row;
      if (i >= count) return -1;
      if constexpr (kOrdered) {
        return rows.key_order(params)[i];
      } else {
        return g.dense_begin(rows.segment) + i;
      }
    };

    int ahead = key(0), now = -1;
    const int position = rows(row);
    const bool whole_rows = g.head_dim == Traits::kHeadDim;
    const auto full = [&](int tile) { return whole_rows && (tile + 1) * kBlockN <= count; };
    int tile = 0;
    // A stop at key tile t means that t + 1 is the last. It is read kStages + 1 tiles later, when t's copies have been
    // used for sure; past the end of the list only to know whether consumers stopped short of it.
    constexpr int kPastEnd = kOrdered ? kStages - 2 : 0;
    for (; tile <= tiles + kPastEnd; ++tile) {
      if (kOrdered && tile > kStages && all_voted_to_stop(shared, voted + tile - kStages - 1)) break;
      if (tile > tiles) continue;
      const int before = now;
      if (tile < tiles) {
        now = ahead;
        if (tile + 1 < tiles) ahead = key(tile + 1);
        barrier_wait(shared.k_empty[k_ring.slot], k_ring.parity ^ 1);
        layout.gather(shared_address(shared.k[k_ring.slot]), k, k_units, now, full(tile));
        barrier_arrive_after_copies(shared.k_full[k_ring.slot]);
        k_ring.advance();
      }
      if (tile == 0) {
        barrier_wait(shared.q_empty, q_ring.parity ^ 1);
        shared.rows[slot][row] = position;
        layout.gather(shared_address(shared.q), params.q.at(batch, rows.head_in_batch(params.heads)), q_units, position,
                      whole_rows && rows.count == kBlockM);
        barrier_arrive_after_copies(shared.q_full);
        barrier_arrive(shared.q_full);
        q_ring.advance();
      } else {
        barrier_wait(shared.v_empty[v_ring.slot], v_ring.parity ^ 1);
        layout.gather(shared_address(shared.v[v_ring.slot]), v, v_units, before, full(tile - 1));
        barrier_arrive_after_copies(shared.v_full[v_ring.slot]);
        v_ring.advance();
      }
    }
    voted += tile > tiles + kPastEnd ? tiles : tile - kStages + 1;

    if (thread == 0) {
      const int next = next_work<Rows, kOrdered>(params);
      const uint32 other = (item + 1) % 2;
      barrier_wait(shared.work_empty[other], ((item + 1) / 2 & 1) ^ 1);
      shared.work[other] = next;
      barrier_arrive(shared.work_full[other]);
    }
  }
}

// --- Consumers ---

// 64 query rows in a warpgroup. A thread's rows are lane / 4 and lane / 4 + 8 of its warp's 16.
template <class Traits>
struct Consumer {
  using Element = typename Traits::Element;
  using Shared = typename Traits::Shared;
  static constexpr int kHeadDim = Traits::kHeadDim, kDimTiles = Traits::kDimTiles, kStages = Traits::kStages;
  static constexpr int kKeyTiles = kBlockN / 8;

  float acc[kDimTiles * 4];  // [rows, dims] of this thread
  float s[kKeyTiles * 4];    // [rows, keys]: scores, then weights
  uint32 p[kKeyTiles][2];    // weights, packed in pairs of keys
  float m[2], l[2];          // as in attention.cuh: l up to the last look, the same in a quad
  float mass[2];             // this thread's part of the sum since then
  float shrink[2];           // what the new maximum makes of acc

  Shared& shared;
  const AttentionParams& params;
  Ring<kStages> k_ring, v_ring;
  Ring<1> q_ring;  // shared memory holds one q tile
  uint32 voted = 0;
  int group, lane, first_row;  // first_row: this thread's, of the q tile

  __device__ __forceinline__ Consumer(Shared& shared_, const AttentionParams& params_)
      : shared(shared_), params(params_), group(threadIdx.x / kWarpgroup - 1), lane(threadIdx.x % 32) {
    first_row = group * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
    if (group == 1) named_arrive(kTurn, kConsumers * kWarpgroup);  // the first warpgroup goes first
  }

  __device__ __forceinline__ void release(uint64& barrier) const {
    __syncwarp();
    if (lane == 0) barrier_arrive(barrier);
  }
  __device__ __forceinline__ void await_turn() const { named_sync(kTurn + group, kConsumers * kWarpgroup); }
  __device__ __forceinline__ void pass_turn() const { named_arrive(kTurn + 1 - group, kConsumers * kWarpgroup); }

  // s = q k^T of the next key tile, in flight.
  __device__ __forceinline__ void issue_scores() {
    barrier_wait(shared.k_full[k_ring.slot], k_ring.parity);
    await_turn();
    const uint32 q = tile_descriptor(shared_address(shared.q) + group * 64 * 128, 0);
    const uint32 k = tile_descriptor(shared_address(shared.k[k_ring.slot]), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c) {
      const uint32 offset = c / 4 * kAtomBytes + c % 4 * 32;
      Wgmma<Element>::ss(s, descriptor_at(q, offset), descriptor_at(k, offset), c > 0);
    }
    wgmma_commit();
  }

  // acc += p v of the next value tile, in flight.
  __device__ __forceinline__ void issue_output() {
    barrier_wait(shared.v_full[v_ring.slot], v_ring.parity);
    const uint32 v = tile_descriptor(shared_address(shared.v[v_ring.slot]), kAtomBytes);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      const uint32 a[4] = {p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]};
      Wgmma<Element>::rs(acc, a, descriptor_at(v, j * 8 * 128));
    }
    wgmma_commit();
  }

  __device__ __forceinline__ void release_q() {
    release(shared.q_empty);
    q_ring.advance();
  }
  __device__ __forceinline__ void release_k() {
    release(shared.k_empty[k_ring.slot]);
    k_ring.advance();
  }
  __device__ __forceinline__ void release_v() {
    release(shared.v_empty[v_ring.slot]);
    v_ring.advance();
  }

  // Turns scores into weights and moves m and mass to the new maximum. Row r sees `limit` keys of this tile, or
  // `limit + r` with kCausal.
  template <bool kCausal>
  __device__ __forceinline__ void softmax(int limit) {
    const bool causal = kCausal && params.geometry.is_causal;
    const bool masked = limit + (causal ? group * 64 : 0) < kBlockN;
    if (masked) {
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (j * 8 + lane % 4 * 2 + e % 2 >= limit + (causal ? first_row + e / 2 * 8 : 0)) s[j * 4 + e] = -infinity();
    }
    // Four partial maxima and sums a row keep the pipeline full: one warp of a scheduler is here at a time.
    float top[2][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) top[h][i] = fmaxf(s[i * 4 + 2 * h], s[i * 4 + 2 * h + 1]);
#pragma unroll
    for (int j = 4; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h)
        top[h][j % 4] = fmaxf(top[h][j % 4], fmaxf(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]));
    float scale = params.scale_log2, base[2];
    bool large = false;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = fmaxf(fmaxf(top[h][0], top[h][1]), fmaxf(top[h][2], top[h][3]));
      x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
      x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
      x = fmaxf(m[h], x * scale);
      base[h] = x == -infinity() ? 0.f : x;
      shrink[h] = exp2_approx(m[h] - base[h]);
      m[h] = x;
      l[h] *= shrink[h];
      large |= fabsf(base[h]) > 4194304.f;  // 2^22
    }
    // exp2(s * scale - base) in one instruction is off by the rounding of base; where that is more than half a unit
    // the product is rounded first, so that the weight of the maximum is exactly 1.
    if (__any_sync(kFullWarp, large)) {
#pragma unroll
      for (int i = 0; i < kKeyTiles * 4; ++i) s[i] *= scale;
      scale = 1.f;
    }
    float sum[2][4] = {};
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float &x = s[j * 4 + 2 * h], &y = s[j * 4 + 2 * h + 1];
        x = exp2_approx(fmaf(x, scale, -base[h]));
        y = exp2_approx(fmaf(y, scale, -base[h]));
        sum[h][j % 4] += x + y;
      }
#pragma unroll
    for (int h = 0; h < 2; ++h) mass[h] = mass[h] * shrink[h] + ((sum[h][0] + sum[h][1]) + (sum[h][2] + sum[h][3]));
  }

  __device__ __forceinline__ void pack() {
#pragma unroll
    for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) p[j][h] = Element::pack(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]);
  }

  __device__ __forceinline__ void rescale() {
    // Keys come in descending importance: most tiles leave every maximum of the warp where it was.
    if (!__any_sync(kFullWarp, shrink[0] != 1.f || shrink[1] != 1.f)) return;
#pragma unroll
    for (int d = 0; d < kDimTiles; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[d * 4 + e] *= shrink[e / 2];
  }

  // Adds the mass since the last look to l; true if it is less than tau of l in each of the first `rows` rows.
  __device__ __forceinline__ bool look(int rows) {
    bool small = true;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = mass[h];
      sum += __shfl_xor_sync(kFullWarp, sum, 1);
      sum += __shfl_xor_sync(kFullWarp, sum, 2);
      small &= first_row + 8 * h >= rows || sum < params.tau * l[h];
      l[h] += sum;
      mass[h] = 0.f;
    }
    return small;
  }

  __device__ __forceinline__ void vote(int rows, uint32 tile) {
    const bool small = __all_sync(kFullWarp, look(rows));
    if (lane == 0) {
      const int warp = threadIdx.x / 32 - 4;
      reinterpret_cast<volatile unsigned char*>(&shared.votes[(voted + tile) % kVoteSlots])[warp] = small;
      barrier_arrive(shared.voted[(voted + tile) % kVoteSlots]);
    }
  }

  __device__ __forceinline__ void start_empty() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = -infinity();
      l[h] = mass[h] = 0.f;
    }
#pragma unroll
    for (int i = 0; i < kDimTiles * 4; ++i) acc[i] = 0.f;
  }

  // Takes up the state that pass 1 left: acc = out * l.
  __device__ __forceinline__ void resume(const QueryTile& tile, const int (&position)[2]) {
    const int head_dim = params.geometry.head_dim;
    const uint16* out = params.out.at(tile.batch(params.heads), tile.head_in_batch(params.heads));
    const float2* state = params.state + static_cast<int64>(tile.head) * params.geometry.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (position[h] < 0) continue;
      const float2 ml = state[position[h]];
      m[h] = ml.x;
      l[h] = ml.y;
      const uint16* source = out + position[h] * params.out.row;
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) {
        const int c = d * 8 + lane % 4 * 2;
        uint32 x = 0;
        if (c + 2 <= head_dim) {
          x = *reinterpret_cast<const uint32*>(source + c);
        } else if (c < head_dim) {
          x = source[c];
        }
        acc[d * 4 + 2 * h] = Element::low(x) * ml.y;
        acc[d * 4 + 2 * h + 1] = Element::high(x) * ml.y;
      }
    }
  }

  // A masked key has weight 0, but 0 * NaN and 0 * Inf are NaN. Where the next value tile, which is masked row by row,
  // holds values that are not finite, their keys are added by plain arithmetic to just the rows that see them and leave
  // the product. Both warpgroups come here for the same tiles. Row r sees `limit + r` keys of the tile.
  __device__ __forceinline__ void guard_values(int limit) {
    constexpr int kChunks = kHeadDim / 8, kLane = kHeadDim / 32;  // 16-byte chunks of a row; its elements in a lane
    constexpr uint32 kExponents = Element::kExponentMask, kLowest = kExponents & ~(kExponents << 1);
    barrier_wait(shared.v_full[v_ring.slot], v_ring.parity);
    const uint32 tile = shared_address(shared.v[v_ring.slot]);
    const int thread = threadIdx.x % kWarpgroup;
    uint32 carries = 0;  // into the sign, where an exponent is all ones
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 x = load_shared_16(tile + (i * kWarpgroup + thread) * 16);
      carries |= ((x.x & kExponents) + kLowest) | ((x.y & kExponents) + kLowest);
      carries |= ((x.z & kExponents) + kLowest) | ((x.w & kExponents) + kLowest);
    }
    if (!named_or(kScan + group, kWarpgroup, carries & 0x80008000u)) return;

    // This lane's part of a row of v: kLane elements, the same for every row but for the swizzle.
    const auto part = [&](int key) {
      const int c = lane * kLane / 8;
      return tile + c / 8 * kAtomBytes + key * 128 + ((c % 8 ^ (key & 7)) << 4) + lane * kLane % 8 * 2;
    };
    const auto row_is_finite = [&](int key) {
      bool finite = true;
#pragma unroll
      for (int i = 0; i < kLane / 2; ++i) finite &= !has_nonfinite<Element>(load_shared_4(part(key) + i * 4));
      return __all_sync(kFullWarp, finite);
    };
    for (int key = 0; key < kBlockN; ++key) {
      if (row_is_finite(key)) continue;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32 pair = 0;
#pragma unroll
        for (int j = 0; j < kKeyTiles; ++j) {
          uint32 x = p[j][h];
          asm volatile("" : "+r"(x));  // or the compiler indexes p by key, which puts it into local memory
          if (j == key / 8) pair = x;
        }
        pair = __shfl_sync(kFullWarp, pair, key % 8 / 2, 4);
        if (key >= limit + first_row + 8 * h) continue;
        const float weight = key % 2 ? Element::high(pair) : Element::low(pair);
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          const uint32 chunk = tile + d / 8 * kAtomBytes + key * 128 + ((d % 8 ^ (key & 7)) << 4);
          const uint32 x = load_shared_4(chunk + lane % 4 * 4);
          acc[d * 4 + 2 * h] += weight * Element::low(x);
          acc[d * 4 + 2 * h + 1] += weight * Element::high(x);
        }
      }
    }
    named_sync(kTake, kConsumers * kWarpgroup);  // both warpgroups have what they need of these rows
    for (int key = threadIdx.x / 32 - 4; key < kBlockN; key += kConsumerWarps) {
      if (row_is_finite(key)) continue;
#pragma unroll
      for (int i = 0; i < kLane / 2; ++i) store_shared_4(part(key) + i * 4, 0);
    }
    fence_for_wgmma();
    named_sync(kTake, kConsumers * kWarpgroup);
  }

  // Walks `tiles` key tiles. Row r sees the first `limit` keys, or `limit + r` with kCausal. With kStops, ends one key
  // tile after the first that adds too little to each of the first `rows` rows. Returns the number of tiles visited.
  template <bool kCausal, bool kStops>
  __device__ __forceinline__ int walk(int tiles, int limit, int rows) {
    if (tiles == 0) {
      release_q();
      return 0;
    }
    const auto guard = [&](int masked_tile) {
      const int first_limit = limit - masked_tile * kBlockN;
      if (kCausal && params.geometry.is_causal && first_limit < kBlockN) guard_values(first_limit);
    };
    issue_scores();
    pass_turn();
    wgmma_wait<0>();
    release_k();
    softmax<kCausal>(limit);
    rescale();  // of what pass 1 left
    pack();

    int tile = 1;
    for (; tile < tiles; ++tile) {
      if (kStops && tile >= 2 && all_voted_to_stop(shared, voted + tile - 2)) break;
      guard(tile - 1);
      issue_scores();
      issue_output();
      pass_turn();
      if (kStops) vote(rows, tile - 1);  // here, as it runs under the products
      wgmma_wait<1>();
      release_k();
      softmax<kCausal>(limit - tile * kBlockN);
      wgmma_wait<0>();
      release_v();
      rescale();
      pack();
    }
    release_q();
    guard(tile - 1);
    issue_output();
    if (kStops) {
      vote(rows, tile - 1);
    } else {
      look(rows);
    }
    wgmma_wait<0>();
    release_v();
    if (kStops) {
      // Copies that the producer had started before it saw the stop.
      for (int i = min(tiles, tile + kStages - 1) - tile; i > 0; --i) {
        barrier_wait(shared.k_full[k_ring.slot], k_ring.parity);
        release_k();
      }
      for (int i = min(tiles, tile + kStages - 2) - tile; i > 0; --i) {
        barrier_wait(shared.v_full[v_ring.slot], v_ring.parity);
        release_v();
      }
      voted += tile;
    }
    return tile;
  }

  // One row of out. Neighbouring lanes exchange halves of two dim tiles, so that a lane has 4 consecutive elements of
  // one of them.
  template <bool kWholeRows>
  __device__ __forceinline__ void store_row(uint16* out, int position, int h, float inverse) const {
    const bool odd = lane % 2;
    const int first = odd * 8 + lane % 4 / 2 * 4;
    uint16* target = out + position * params.out.row + first;
#pragma unroll
    for (int d = 0; d < kDimTiles; d += 2) {
      const uint32 even_tile = Element::pack(acc[d * 4 + 2 * h] * inverse, acc[d * 4 + 2 * h + 1] * inverse);
      const uint32 odd_tile = Element::pack(acc[d * 4 + 4 + 2 * h] * inverse, acc[d * 4 + 4 + 2 * h + 1] * inverse);
      const uint32 other = __shfl_xor_sync(kFullWarp, odd ? even_tile : odd_tile, 1);
      const uint2 x = make_uint2(odd ? other : even_tile, odd ? odd_tile : other);
      if (position < 0) continue;
      if (kWholeRows || d * 8 + first + 4 <= params.geometry.head_dim) *reinterpret_cast<uint2*>(target + d * 8) = x;
    }
  }

  // out = acc / l and lse, scattered to the rows' own positions; kKeepState keeps (m, l) for pass 2.
  template <bool kKeepState>
  __device__ __forceinline__ void store(const QueryTile& tile, const int (&position)[2]) {
    const int64 state_row = static_cast<int64>(tile.head) * params.geometry.seqlen_q;
    uint16* out = params.out.at(tile.batch(params.heads), tile.head_in_batch(params.heads));
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float inverse = l[h] == 0.f ? 0.f : 1.f / l[h];
      if (position[h] >= 0 && lane % 4 == 0) {
        if (kKeepState) params.state[state_row + position[h]] = make_float2(m[h], l[h]);
        if (params.lse)
          params.lse[state_row + position[h]] =
              l[h] == 0.f ? -infinity() : (m[h] + __log2f(l[h])) * 0.69314718055994531f;
      }
      if (params.geometry.head_dim == kHeadDim) {
        store_row<true>(out, position[h], h, inverse);
      } else {
        store_row<false>(out, position[h], h, inverse);
      }
    }
  }
};

// One block: kFirst is pass 1 (consecutive rows, contiguous keys, causal, keeps its state), otherwise pass 2.
template <class Traits, class Rows, bool kFirst>
__device__ __forceinline__ void attend(const AttentionParams& params, typename Traits::Shared& shared) {
  initialise<Traits>(shared);
  if (threadIdx.x < kWarpgroup) {
    registers_shrink<kProducerRegisters>();
    produce<Traits, Rows, !kFirst>(params, shared);
  } else {
    registers_grow<kConsumerRegisters>();
    Consumer<Traits> consumer(shared, params);
    for (uint32 item = 0;; ++item) {
      const uint32 slot = item % 2;
      barrier_wait(shared.work_full[slot], item / 2 & 1);
      const int work = shared.work[slot];
      if (work < 0) break;
      const Rows rows(params, work);
      const Geometry& g = params.geometry;
      const int count = rows.keys(g);
      barrier_wait(shared.q_full, consumer.q_ring.parity);
      consumer.start_empty();
      if (!kFirst) {
        const int position[2] = {shared.rows[slot][consumer.first_row], shared.rows[slot][consumer.first_row + 8]};
        consumer.resume(rows, position);
      }
      const int visited = consumer.template walk<kFirst, !kFirst>((count + kBlockN - 1) / kBlockN, rows.limit(g),
                                                                  rows.count);
      const int position[2] = {shared.rows[slot][consumer.first_row], shared.rows[slot][consumer.first_row + 8]};
      consumer.template store<kFirst>(rows, position);
      if constexpr (!kFirst) {
        if (threadIdx.x == kWarpgroup) rows.visited(params) = visited;
      }
      consumer.release(shared.work_empty[slot]);
    }
  }
}

}  // namespace sm90
}  // namespace s2o
