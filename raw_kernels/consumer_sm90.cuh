// The Hopper tile's consumers: two warpgroups of 64 query rows each, products by wgmma and online softmax.
#pragma once
#include "shared_sm90.cuh"

namespace s2o {
namespace sm90 {

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

}  // namespace sm90
}  // namespace s2o
