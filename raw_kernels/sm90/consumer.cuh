// The Hopper tile's consumers: two warpgroups of 64 query rows each, products by wgmma and online softmax.
#pragma once
#include "common/keep_finite.cuh"
#include "sm90/products.cuh"
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

template <class Traits>
struct Consumer : Products<Traits> {
  using Base = Products<Traits>;
  using Element = typename Traits::Element;
  using Shared = typename Traits::Shared;
  static constexpr int kHeadDim = Traits::kHeadDim, kDimTiles = Traits::kDimTiles, kBlockN = Traits::kBlockN;
  static constexpr int kQueryPlaces = Traits::kQueryPlaces, kStages = Traits::kStages;
  static constexpr int kTilesPerStopCheck = Traits::kTilesPerStopCheck;
  static constexpr bool kStoresLate = kHeadDim >= 128;  // pass 1; with 64 the products are too short to gain by it
  using Base::kKeyTiles, Base::params, Base::group, Base::lane, Base::first_row, Base::s, Base::m, Base::l, Base::mass;
  using Base::softmax, Base::settled_softmax, Base::stop_check, Base::start_empty, Base::values, Base::skips;
  using Base::acc, Base::p, Base::holds_output, Base::shared, Base::k_ring, Base::v_ring, Base::release;
  using Base::await_turn, Base::pass_turn, Base::queries, Base::issue_scores, Base::issue_output, Base::release_k;
  using Base::release_v, Base::pack, Base::rescale;

  bool unstored = false;     // pass 1: acc is the output of the q tile before this one, of the state done_m, done_l
  float done_m[2], done_l[2];

  Ring<2> check_ring;
  uint32 voted = 0;
  // Pass 2, of this q tile: a vote that waits for it is late for the other warpgroup's turn. Of a ladder that of bit
  // number lane % kLadder.
  float kept_tau;
  static constexpr bool kKeepsTau = kHeadDim <= 128 || kWalksLadder<Traits>;  // with 256 registers are too few
  LadderWalk<Traits, kDimTiles * 2, kConsumers * kWarpgroup> ladder;

  __device__ __forceinline__ Consumer(Shared& shared_, const AttentionParams& params_) : Base(shared_, params_) {}

  // Stop check number `n` of the q tile number `nth`.
  __device__ __forceinline__ void vote(int rows, uint32 n, uint32 nth) {
    const float tau = kKeepsTau ? kept_tau : shared.tau[nth % kPlaces];
    uint32 small;
    if constexpr (kWalksLadder<Traits>) {
      const bool counts = ladder.counts(static_cast<const LadderAttentionParams&>(params));
      small = counts ? ladder.votes(this->largest_gain(rows), tau) : 0;
    } else {
      small = __all_sync(kFullWarp, stop_check(rows, tau));
    }
    if (lane == 0) {
      const int warp = threadIdx.x / 32 - 4;
      reinterpret_cast<volatile unsigned char*>(&shared.votes[(voted + n) % kVoteSlots])[warp] = small;
      barrier_arrive(shared.voted[(voted + n) % kVoteSlots]);
    }
  }

  // Of a ladder: the outputs of all rows as they are, of the thread's pair i of them.
  __device__ __forceinline__ uint32 pair_of_output(int i, const float (&inverse)[2]) const {
    return pack_finite<Element>(acc[i * 2] * inverse[i % 2], acc[i * 2 + 1] * inverse[i % 2]);
  }
  __device__ __forceinline__ void inverses(float (&inverse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) inverse[h] = l[h] == 0.f ? 0.f : 1.f / l[h];
  }
  __device__ __forceinline__ void keep_stopped(uint32 stops) {
    float inverse[2];
    inverses(inverse);
    ladder.keep(static_cast<const LadderAttentionParams&>(params), stops, threadIdx.x - kWarpgroup,
                [&](int i) { return pair_of_output(i, inverse); });
  }
  __device__ __forceinline__ void finish_ladder(int q_tile, int rows) const {
    float inverse[2];
    inverses(inverse);
    uint32 last[kDimTiles * 2];
#pragma unroll
    for (int i = 0; i < kDimTiles * 2; ++i) last[i] = pair_of_output(i, inverse);
    ladder.finish(static_cast<const LadderAttentionParams&>(params), q_tile, threadIdx.x - kWarpgroup,
                  [&](int i) { return last[i]; }, [&](int i) { return first_row + 8 * (i % 2) < rows; });
  }

  __device__ __forceinline__ void clear_output() {
#pragma unroll
    for (int i = 0; i < kDimTiles * 4; ++i) acc[i] = 0.f;
  }

  // Takes up the state that pass 1 left: acc = out * l. Nobody stores a row that is not there (-1): it reads the first.
  __device__ __forceinline__ void resume(const QTile& tile, const int (&position)[2]) {
    const int head_dim = params.geometry.head_dim;
    const uint16* out = params.out.at(tile.batch, tile.head_in_batch) + lane % 4 * 2;
    const float2* state = params.state + static_cast<int64>(tile.head) * params.geometry.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = max(position[h], 0);
      const float2 ml = state[row];
      m[h] = ml.x;
      l[h] = ml.y;
      mass[h] = 0.f;
      const uint16* source = out + row * params.out.row;
      const auto take_pairs = [&](auto present) {
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          const uint32 x = present(d) ? *reinterpret_cast<const uint32*>(source + d * 8) : 0;
          acc[d * 4 + 2 * h] = Element::low(x) * ml.y;
          acc[d * 4 + 2 * h + 1] = Element::high(x) * ml.y;
        }
      };
      if (head_dim == kHeadDim) {
        take_pairs([](int) { return true; });
      } else {  // a multiple of 8
        take_pairs([&](int d) { return d * 8 < head_dim; });
      }
    }
  }

  // A masked key has weight 0, but 0 * NaN and 0 * Inf are NaN. Where the next value tile, which is masked row by row,
  // holds values that are not finite (sm90/checker.cuh finds out), their keys are added by plain arithmetic to just the
  // rows that see them and leave the product. Both warpgroups come here for the same tiles. Row r sees `limit` keys of
  // the tile, or `limit + r` if causal.
  __device__ __forceinline__ void guard_values(int limit, uint32 nth) {
    constexpr int kLane = kHeadDim / 32;  // elements of a row in a lane
    barrier_wait(shared.v_checked[check_ring.slot], check_ring.parity);
    uint32 found = 0;  // read by the lane that will release the tile: race detectors follow a thread's own arrivals
    if (lane == 0) found = *static_cast<volatile uint32*>(&shared.v_nonfinite[check_ring.slot]);
    check_ring.advance();
    if (__shfl_sync(kFullWarp, found, 0) == 0) return;
    barrier_wait(shared.v_full[v_ring.slot], v_ring.parity);
    if (unstored) store_last(nth - 1);
    if (!holds_output) clear_output();
    holds_output = true;
    const uint32 tile = shared_address(shared.v[v_ring.slot]);

    // This lane's part of a row of v: kLane elements, the same for every row but for the swizzle.
    const auto part = [&](int key) {
      const int c = lane * kLane / 8;
      return key_chunk<Traits>(tile, key, c) + lane * kLane % 8 * 2;
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
        if (key >= limit + (params.geometry.is_causal ? first_row + 8 * h : 0)) continue;
        const float weight = key % 2 ? Element::high(pair) : Element::low(pair);
#pragma unroll
        for (int d = 0; d < kDimTiles; ++d) {
          const uint32 chunk = key_chunk<Traits>(tile, key, d);
          const uint32 x = load_shared_4(chunk + lane % 4 * 4);
          acc[d * 4 + 2 * h] += weight * Element::low(x);
          acc[d * 4 + 2 * h + 1] += weight * Element::high(x);
        }
      }
    }
    named_sync(kTake, kConsumers * kWarpgroup);  // both warpgroups have what they need of these rows
    for (int key = threadIdx.x / 32 - 4; key < kBlockN; key += kConsumerWarps) {
      if (row_is_finite(key)) continue;
      __syncwarp();  // all lanes have read the row
      if (lane != 0) continue;  // lane 0 will release the tile, as above
#pragma unroll
      for (int c = 0; c < kHeadDim / 8; ++c)
        store_shared_16(key_chunk<Traits>(tile, key, c), make_uint4(0, 0, 0, 0));
    }
    fence_for_wgmma();
    named_sync(kTake, kConsumers * kWarpgroup);
  }

  template <uint32 kSkips>
  struct Skips { static constexpr uint32 value = kSkips; };
  // Runs `stage`, from the issue of products to their end, for the blocks that `skips` says the output leaves out:
  // where one of two products of a stage depended on a number, ptxas would have each wait for the one before.
  template <class Stage>
  __device__ __forceinline__ void by_skips(const Stage& stage) {
    if constexpr (!kSkipsValues<Traits>) {
      stage(Skips<0>());
    } else if (skips == 0) {
      stage(Skips<0>());
    } else if constexpr (kBlockN == kValueKeys) {
      stage(Skips<1>());
    } else if (skips == 1) {
      stage(Skips<1>());
    } else if (skips == 2) {
      stage(Skips<2>());
    } else {
      stage(Skips<3>());
    }
  }

  // Walks the key tiles of q tile number `nth` from the second on; the first one's weights are in p. Row r sees the
  // first `limit` keys, or in pass 1 (kFirst) `limit + r`. Pass 2 ends one stop check after the first that adds too
  // little to each of the first `rows` rows. Returns the number of tiles visited; the last one's output is not issued
  // yet.
  template <bool kFirst>
  __device__ __forceinline__ int walk(uint32 nth, uint32 q, int tiles, int limit, int rows) {
    int tile = 1;
    for (; tile < tiles; ++tile) {
      const bool at_stop_check = !kFirst && tile % kTilesPerStopCheck == 0;
      uint32 stops = 0;  // of a ladder
      if (at_stop_check && tile >= 2 * kTilesPerStopCheck) {
        const uint32 check = voted + tile / kTilesPerStopCheck - 2;
        if constexpr (kWalksLadder<Traits>) {
          stops = ladder_stops(shared, check);
          if (stops & 1) break;
        } else {
          if (all_voted_to_stop<Traits>(shared, check)) break;
        }
      }
      if (kFirst) guard(limit - (tile - 1) * kBlockN, nth);
      bool moved = true;
      by_skips([&](auto skips_of_last) {
        issue_scores(q);
        if (kFirst && unstored) {  // under these scores, and while the other warpgroup issues its own
          pass_turn();
          store_last(nth - 1);
          await_turn();
        }
        this->template issue_output<skips_of_last.value>();
        pass_turn();
        if (at_stop_check) vote(rows, tile / kTilesPerStopCheck - 1, nth);  // here, as it runs under the products
        wgmma_wait<1>();
        release_k();
        if constexpr (kFirst) {
          softmax<true>(limit - tile * kBlockN);
          await_output();
        } else {
          moved = settled_softmax(limit - tile * kBlockN, rows, tile);
          wgmma_wait<0>();
        }
      });
      release_v();
      if (moved) rescale();
      pack();
      // The output is that of the tiles before this one, and so is l, which has this one's mass added at its stop check.
      if constexpr (kWalksLadder<Traits>) keep_stopped(stops);
    }
    release(shared.q_empty[nth % kQueryPlaces]);
    // Of a single key tile. Before its values are asked for: the pager has them checked after it has announced the next
    // q tile, for which it waits until the one before this is done.
    if (kFirst && unstored) store_last(nth - 1);
    if (kFirst) guard(limit - (tile - 1) * kBlockN, nth);
    return tile;
  }
  // Of pass 1. Behind the softmax only where head_dim is 256: with less, whose products are shorter, waiting before the
  // exponentials, as ptxas has it, is up to 3 % faster, as the other warpgroup's products run under them anyway.
  __device__ __forceinline__ void await_output() {
    if constexpr (Traits::kHeadDim == 256) {
      wgmma_wait_behind(mass[0] + mass[1]);
    } else {
      wgmma_wait<0>();
    }
  }
  __device__ __forceinline__ void guard(int limit, uint32 nth) {
    if (limit < kBlockN) guard_values(limit, nth);
  }

  // Pass 1: takes q tiles until none is left. The last output of one and the first scores of the next are in flight
  // together, like those of any two key tiles.
  __device__ __forceinline__ void run_first() {
    uint32 nth = 0;
    if (!take(nth)) return;
    wait_for_queries(nth);
    uint32 q = queries(nth);
    issue_scores(q);
    pass_turn();
    start_empty();
    wgmma_wait<0>();
    release_k();
    softmax<true>(q_tile_at(nth).limit);
    holds_output = false;
    pack();
    for (;;) {
      const QTile& tile = q_tile_at(nth);
      const int rows = tile.rows;
      walk<true>(nth, q, tile.key_tiles, tile.limit, rows);
      if (!take(++nth)) {
        issue_output();
        stop_check(rows);
        wgmma_wait<0>();
        keep_state();
        store_last(nth - 1);
        return;
      }
      wait_for_queries(nth);
      q = queries(nth);
      issue_scores(q);
      issue_output();
      pass_turn();
      stop_check(rows);
      keep_state();
      start_empty();
      wgmma_wait<1>();
      release_k();
      softmax<true>(q_tile_at(nth).limit);
      await_output();
      release_v();
      if (!kStoresLate) store_last(nth - 1);
      pack();
      unstored = kStoresLate;
      holds_output = false;
    }
  }

  __device__ __forceinline__ void keep_state() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      done_m[h] = m[h];
      done_l[h] = l[h];
    }
  }
  // The output of q tile number `nth`, whose place is then free for another.
  __device__ __forceinline__ void store_last(uint32 nth) {
    const QTile& tile = q_tile_at(nth);
    const int position[2] = {position_of(tile, first_row), position_of(tile, first_row + 8)};
    store<true>(tile, position, done_m, done_l);
    barrier_arrive(shared.q_tile_empty[nth % kPlaces]);
    unstored = false;
  }

  // Pass 2: takes q tiles until none is left. A q tile is done before the next begins, whose rows may take a while to
  // come: nobody knew when this one would stop. `all`: the kernel's parameters, of which params are a part.
  template <class Rows, class Params>
  __device__ __forceinline__ void run_second(const Params& all) {
    for (uint32 nth = 0;; ++nth) {
      const uint32 slot = nth % 2, place = nth % kPlaces;
      if (!take(nth)) return;
      const QTile tile = describe<kBlockN>(params, Rows(all, shared.q_tile[place]));
      const int tiles = tile.key_tiles, limit = tile.limit, rows = tile.rows;
      wait_for_queries(nth);
      const int position[2] = {shared.rows[slot][first_row], shared.rows[slot][first_row + 8]};
      if (Rows::kListed && tiles == 0) {
        release(shared.q_empty[nth % kQueryPlaces]);
        store_nothing(tile, position);
        barrier_arrive(shared.q_tile_empty[place]);
        continue;
      }
      const uint32 q = queries(nth);
      issue_scores(q);
      pass_turn();
      if (kKeepsTau && !kWalksLadder<Traits>) kept_tau = shared.tau[place];
      if (Rows::resumes(all)) {
        resume(tile, position);
      } else {
        start_empty();
        clear_output();
      }
      if constexpr (kSkipsValues<Traits>)
        values.start(all.values, tile.head_in_batch, tile.visited);
      if constexpr (kWalksLadder<Traits>) {
        ladder = {};
        kept_tau = ladder.tau_of_bit(all, tile.head, lane % kLadder);
      }
      wgmma_wait<0>();
      release_k();
      this->template softmax<false>(limit, rows);
      rescale();
      pack();
      const int visited = walk<false>(nth, q, tiles, limit, rows);
      const int stop_checks = (visited + kTilesPerStopCheck - 1) / kTilesPerStopCheck;
      int stored[2];
      if constexpr (kSkipsValues<Traits>) vote(rows, stop_checks - 1, nth);  // after the products it would be a copy for each
      by_skips([&](auto skips_of_last) {
        this->template issue_output<skips_of_last.value>();
        if constexpr (!kSkipsValues<Traits>) vote(rows, stop_checks - 1, nth);
        voted += stop_checks;
        stored[0] = shared.rows[slot][first_row];
        stored[1] = shared.rows[slot][first_row + 8];
        wgmma_wait<0>();
      });
      release_v();
      // Copies that the producer had started before it saw the stop.
      for (int i = min(tiles, visited + kStages - 1) - visited; i > 0; --i) {
        barrier_wait(shared.k_full[k_ring.slot], k_ring.parity);
        release_k();
      }
      for (int i = min(tiles, visited + kStages - 2) - visited; i > 0; --i) {
        barrier_wait(shared.v_full[v_ring.slot], v_ring.parity);
        release_v();
      }
      if constexpr (kWalksLadder<Traits>) {
        stop_check(rows);  // adds what votes that did not count have left
        const Rows walked(all, *static_cast<volatile int*>(&shared.q_tile[place]));  // needs no register before
        finish_ladder(walked.visited_index(params), walked.count);
      } else {
        store<false>(tile, stored, m, l);
        if constexpr (Rows::kListed) keep_listed_state(all, tile, stored);
        if (threadIdx.x == kWarpgroup) params.visited[tile.visited] = stop_checks;
      }
      barrier_arrive(shared.q_tile_empty[place]);
    }
  }

  // Leaves the state of rows that have visited a list for a launch that resumes it.
  template <class Params>
  __device__ __forceinline__ void keep_listed_state(const Params& all, const QTile& tile, const int (&position)[2]) {
    if (!all.lists.kept || lane % 4 != 0) return;
    float2* kept = all.lists.kept + static_cast<int64>(tile.head) * params.geometry.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (position[h] >= 0) kept[position[h]] = make_float2(m[h], l[h]);
  }

  // The rows of a q tile that has no keys and no state: out = 0.
  __device__ __forceinline__ void store_nothing(const QTile& tile, const int (&position)[2]) const {
    const int head_dim = params.geometry.head_dim;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (position[h] < 0) continue;
      uint16* row = params.out.at(tile.batch, tile.head_in_batch) + position[h] * params.out.row;
      for (int c = lane % 4 * 8; c < head_dim; c += 4 * 8) *reinterpret_cast<uint4*>(row + c) = make_uint4(0, 0, 0, 0);
      if (params.lse && lane % 4 == 0)
        params.lse[static_cast<int64>(tile.head) * params.geometry.seqlen_q + position[h]] = -infinity();
    }
  }

  __device__ __forceinline__ void wait_for_queries(uint32 nth) const {
    barrier_wait(shared.q_full[nth % kQueryPlaces], nth / kQueryPlaces & 1);
  }

  // Waits for the block's q tile number `n`; false after the last.
  __device__ __forceinline__ bool take(uint32 n) const {
    await_q_tile(shared, n);
    return shared.q_tile[n % kPlaces] >= 0;
  }

  __device__ __forceinline__ const QTile& q_tile_at(uint32 n) const { return shared.described[n % kPlaces]; }

  // The query of a row of pass 1, -1 past the segment.
  static __device__ __forceinline__ int position_of(const QTile& tile, int row) {
    return row < tile.rows ? tile.first + row : -1;
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

  // out = acc / l and lse of a q tile with the state (final_m, final_l), at the rows' own positions. Pass 1 keeps the
  // state for pass 2.
  template <bool kFirst>
  __device__ __forceinline__ void store(const QTile& tile, const int (&position)[2], const float (&final_m)[2],
                                        const float (&final_l)[2]) {
    const int64 state_row = static_cast<int64>(tile.head) * params.geometry.seqlen_q;
    uint16* out = params.out.at(tile.batch, tile.head_in_batch);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      keep_finite<Element, kDimTiles * 2>([&](int i) -> float& { return acc[i / 2 * 4 + 2 * h + i % 2]; }, final_l[h]);
      const float inverse = final_l[h] == 0.f ? 0.f : 1.f / final_l[h];
      if (position[h] >= 0 && lane % 4 == 0) {
        if (kFirst && params.state) params.state[state_row + position[h]] = make_float2(final_m[h], final_l[h]);
        if (params.lse)
          params.lse[state_row + position[h]] =
              final_l[h] == 0.f ? -infinity() : (final_m[h] + __log2f(final_l[h])) * 0.69314718055994531f;
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
