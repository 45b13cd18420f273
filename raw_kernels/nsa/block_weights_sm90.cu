// nsa_block_weights on Hopper, by wgmma. A warpgroup takes 64 rows, (token, head) pairs, a turn, and 128 compressed keys
// a step. With two query heads of a KV head four of them have the products of one under the exponentials of others. With
// more, shared memory has room for the queries of two warpgroups: each has the next product under its own exponentials.
#include "nsa/block_sums.cuh"
#include "nsa/compressed_keys.cuh"
#include "nsa/tile_sm90.cuh"

namespace s2o {

// kGroup: query heads of a KV head, rounded up to 2, 4 or 8; nsa_compressed leaves the weights of one alone. A thread has
// two rows of a turn: two heads of one token.
template <class Element_, int kHeadDim_, int kGroup_>
struct BlockWeightsTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8;
  static constexpr int kHeads = 2, kTurns = kGroup_ / kHeads;
  static constexpr int kWarpgroups = kTurns == 1 ? 4 : 2, kThreads = 128 * kWarpgroups, kRows = 64 * kWarpgroups;
  static constexpr int kProducts = kWarpgroups == 2 ? 2 : 1;   // of a warpgroup, in registers
  static constexpr int kTokens = kRows / kHeads;               // of a block
  static constexpr int kTile = 128, kStages = 3;               // compressed keys of a step
  struct Shared {
    uint16 q[kWarpgroups][kTurns][64 * kHeadDim];             // [warpgroups, turns, rows]
    uint16 k[kStages][kTile * kHeadDim];
    float lse[kWarpgroups][kTurns][64];                       // in log2 units
    const uint16* keys;                    // of the KV head; not in registers, of which there are none to spare
    uint64 full[kStages], empty[kStages];  // barriers: a step's copies have come; all warps are done with it
  };
};

// Block: kTokens tokens of a KV row, p.tiles times p.q_tiles KV rows; those that see the most keys first.
template <class Traits>
__device__ __forceinline__ void nsa_block_weights_sm90(const NsaParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kHeads = Traits::kHeads, kTurns = Traits::kTurns, kTile = Traits::kTile;
  constexpr int kProducts = Traits::kProducts, kRows = Traits::kRows;
  constexpr int kAtATime = Traits::kThreads / Traits::kChunks;  // rows of a tile that the block copies
  const int kv_row = blockIdx.x % p.q_tiles, batch = kv_row / p.kv_heads, kv_head = kv_row - batch * p.kv_heads;
  const int first_token = p.first_token + (p.tiles - 1 - static_cast<int>(blockIdx.x / p.q_tiles)) * Traits::kTokens;
  const int end_token = p.first_token + p.tokens, head_dim = p.geometry.head_dim;
  const int lane = threadIdx.x % 32, warpgroup = threadIdx.x / 128;
  // Rows of the block, 64 a warpgroup: 16 a warp, of which a thread has lane / 4 and 8 more.
  const auto token_of = [&](int row) { return first_token + row / 16 * 8 + row % 8; };
  const auto head_of = [&](int turn, int row) { return turn * kHeads + row / 8 % 2; };
  const auto is_there = [&](int turn, int row) { return token_of(row) < end_token && head_of(turn, row) < p.group; };

  const int chunk = threadIdx.x % Traits::kChunks, slot = threadIdx.x / Traits::kChunks;
  const bool inside = chunk * 8 < head_dim;
  const uint16* q = p.q.at(batch, kv_head * p.group) + (inside ? chunk * 8 : 0);
  const int last_token = min(first_token + Traits::kTokens, end_token) - 1;
  const int ratio = p.ratio();
  const int steps = (max(0, p.own_block(last_token) - p.local + 1) * ratio + kTile - 1) / kTile;
  if (steps == 0) return;
  constexpr int kStages = Traits::kStages;
  const int loads = steps + 1;  // and one, whose product nobody wants
  // What a thread copies of a step: rows slot + i * kAtATime of a tile, keys that are kAtATime / 4 apart.
  static_assert(kAtATime % 8 == 0, "neighbours among a thread's rows would be swizzled differently");
  const int own_key = key_of_row(slot);
  const uint32 own_place = atom_chunk<kTile>(0, slot, chunk);
  const auto load = [&](int step) {
    if (step >= loads) return;
    if (step >= kStages) barrier_wait(shared.empty[step % kStages], (step / kStages - 1) & 1);
    const uint32 to = shared_address(shared.k[step % kStages]) + own_place;
    const int key = step * kTile + own_key;
    const uint16* k = *const_cast<const uint16* volatile*>(&shared.keys) + (inside ? chunk * 8 : 0);
    const uint16* from = k + key * p.k_cmp.row;
    const int64 apart = kAtATime / 4 * p.k_cmp.row;
    if ((step + 1) * kTile <= p.compressed && head_dim == Traits::kHeadDim) {
#pragma unroll
      for (int i = 0; i < kTile / kAtATime; ++i, from += apart) cp_async_16(to + i * kAtATime * 128, from);
    } else {
#pragma unroll 1
      for (int i = 0; i < kTile / kAtATime; ++i, from += apart) {
        const bool present = inside && key + i * (kAtATime / 4) < p.compressed;
        cp_async_16_or_zeros(to + i * kAtATime * 128, present ? from : k, present);
      }
    }
    barrier_arrive_after_copies(shared.full[step % kStages]);
  };
  if (threadIdx.x == 0) {
    shared.keys = p.k_cmp.at(batch, kv_head);
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared.full[i], Traits::kThreads);
      barrier_init(shared.empty[i], Traits::kThreads / 32);
    }
  }
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < kRows / kAtATime; ++i) {
      const int row = slot + i * kAtATime;
      // Heads that are not there have the last one's query: that of zeros would make NaN of an infinite key.
      const int head = min(head_of(turn, row), p.group - 1);
      const bool present = inside && token_of(row) < end_token;
      const uint16* from = present ? q + head * p.q.head + token_of(row) * p.q.row : q;
      cp_async_16_or_zeros(atom_chunk<64>(shared_address(shared.q[row / 64][turn]), row % 64, chunk), from, present);
    }
    const int row = threadIdx.x;
    if (row < kRows) {
      // A row that is not there, or sees no compressed key, weighs nothing.
      const bool weighs = is_there(turn, row) && p.visible_compressed(token_of(row)) > 0;
      const int64 place = p.cmp_lse_place(batch, kv_head * p.group + head_of(turn, row), token_of(row));
      shared.lse[row / 64][turn][row % 64] = weighs ? p.cmp_lse[place] * 1.4426950408889634f : infinity();
    }
  }
  __syncthreads();
  load(0);

  const int own_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and 8 more
  // The thread's token, found anew for each step, as registers do not suffice to keep it.
  const auto own_token = [&] {
    int row = own_row;
    asm volatile("" : "+r"(row));
    return token_of(row);
  };
  // The warpgroups go their own ways, a step or so apart, so that products of one run under the exponentials of others.
  const auto expect = [&](int step) {  // a step's copies, while those of the next one set off
    load(step + 1);
    barrier_wait(shared.full[step % kStages], step / kStages & 1);
  };
  const auto leave = [&](int step) {  // the warp reads no more of it
    __syncwarp();
    if (lane == 0) barrier_arrive(shared.empty[step % kStages]);
  };
  float d[kProducts][kTile / 2];  // [rows, keys] of this thread
  float sum[kTile / 4];           // over heads
  float carried = 0.f;
  const auto issue = [&](float (&product)[kTile / 2], int step, int turn) {
    const uint32 a = tile_descriptor(shared_address(shared.q[warpgroup][turn]), 0);
    const uint32 b = tile_descriptor(shared_address(shared.k[step % Traits::kStages]), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c)
      Wgmma<Element>::ss(product, descriptor_at(a, atom_columns<64>(c)), descriptor_at(b, atom_columns<kTile>(c)), c > 0);
    wgmma_commit();
  };
  const auto weigh = [&](float (&product)[kTile / 2], int turn) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float lse = shared.lse[warpgroup][turn][own_row % 64 + h * 8];
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        const float weight = exp2_approx(fmaf(product[i / 2 * 4 + 2 * h + i % 2], p.scale_log2, -lse));
        sum[i] = turn == 0 && h == 0 ? weight : sum[i] + weight;
      }
    }
  };
  const auto write = [&](const auto& shape, int step) {
    const int token = own_token();  // its place among those of the round; -1: there is no such token
    const int place = token < end_token ? kv_row * p.tokens + (token - p.first_token) : -1;
    const float most = write_block_weights(shape, sum, carried, step * kTile + lane % 4 * (kTile / 4),
                                           p.visible_compressed(token), weights_of(p, place));
    write_step_top(p, place, step, most);
    __syncwarp();  // not all lanes have written
  };
  const auto walk = [&](const auto& shape) {
    expect(0);
    issue(d[0], 0, 0);
    if constexpr (kProducts == 1) {
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
        wgmma_wait<0>();
        finished(d[0]);
        leave(step);
        weigh(d[0], 0);
        write(shape, step);  // before registers are needed for the next product
        expect(step + 1);
        issue(d[0], step + 1, 0);
      }
      wgmma_wait<0>();
      finished(d[0]);
    } else {
      wgmma_wait<0>();
      finished(d[0]);
#pragma unroll 1
      for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int turn = 0; turn < kTurns; ++turn) {
          float(&next)[kTile / 2] = d[(turn + 1) % 2];
          const int next_step = step + (turn + 1) / kTurns, next_turn = (turn + 1) % kTurns;
          if (next_turn == 0) expect(next_step);
          issue(next, next_step, next_turn);
          weigh(d[turn % 2], turn);
          if (turn + 1 == kTurns) write(shape, step);
          wgmma_wait<0>();
          finished(next);
          if (next_turn + 1 == kTurns) leave(next_step);
        }
      }
    }
  };
  // With four turns two kinds of loops would need more registers than there are.
  if constexpr (kTurns < 4) {
    if (UsualBlockShape::is_of(p)) return walk(UsualBlockShape());
  }
  walk(BlockShape(p));
}

}  // namespace s2o
