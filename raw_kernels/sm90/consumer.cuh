// What a thread of a consumer warpgroup of the Hopper tile holds: its rows' scores, weights, output and state in
// registers, and where it is in the rings of tiles. What happens to these stands in the files that read it, each of
// which needs those above it alone:
//
//   softmax.cuh        scores -> weights, running maximum and mass
//   products.cuh       scores = q k^T and acc += p v by wgmma, from tiles that are released when they are multiplied
//   votes.cuh          stop checks; a ladder's outputs
//   outputs.cuh        acc -> rows of the output and back
//   masked_values.cuh  values of masked keys that are not finite
//   walk.cuh           the key tiles of a q tile
//   unvisited.cuh      what unvisited candidates count for
//   consumers.cuh      the two passes
//
// Who waits for whom, for a key tile t of kBlockN keys; (full) and (empty) are barriers in shared memory, turn a named one:
//
//   producer       copies k t -> (k_full)      copies v t -> (v_full)      awaits (k_empty), (v_empty) of t - kStages
//                        |                            |
//   warpgroup 0    | turn: scores t, output t - 1 | softmax t      | turn: scores t + 1, output t | ...
//   warpgroup 1    |      softmax t - 1           | turn: scores t, output t - 1 |  softmax t     | ...
//                                                        |                 |
//                                        after scores: (k_empty)   after the output: (v_empty)
//
// Where a key tile is walked in halves (walk.cuh) each product is awaited before the next is issued.
//
// Pass 2 votes on stop check n under the products of the tile behind it (voted), and reads the votes before it issues
// the scores that stop check n + 2 is about.
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

// 64 query rows in a warpgroup. A thread's rows are lane / 4 and lane / 4 + 8 of its warp's 16.
template <class Traits>
struct Consumer {
  float s[Traits::kKeyTiles * 4];      // [rows, keys]: scores, then weights
  float m[2];                          // [rows] running maximum, as of its last move
  float l[2];                          // sum up to the last stop check, of the quad
  float mass[2];                       // this thread's part of the sum since then
  float rescale_by[2];                 // what the new maximum makes of the output so far
  float ceiling[2];                    // pass 2: m need not move for unscaled scores up to this
  bool settled;                        // pass 2: every row of the warp has such a ceiling; pass 1: no m is negative
  ValueGroup<kSkipsValues<Traits>> values;  // the warpgroup's rows
  uint32 skips = 0;                    // a bit for each block of the key tile whose values it leaves out

  const AttentionParams& params;
  int group, lane, first_row;          // first_row: this thread's, of the q tile

  float acc[Traits::kDimTiles * 4];    // [rows, dims] of this thread
  uint32 p[Traits::kKeyTiles][2];      // weights, packed in pairs of keys
  bool holds_output = true;            // acc; false: the next product begins it (pass 1)

  typename Traits::Shared& shared;
  Ring<Traits::kStages> k_ring, v_ring;

  bool unstored = false;               // pass 1: acc is the output of the q tile before this one,
  float done_m[2], done_l[2];          // of this state

  Ring<2> check_ring;
  uint32 voted = 0;                    // stop checks of the q tiles before this one
  // Pass 2, of this q tile: a vote that waits for it is late for the other warpgroup's turn. Of a ladder that of bit
  // number lane % kLadder.
  float kept_tau;
  LadderWalk<Traits, Traits::kDimTiles * 2, Traits::kConsumerThreads> ladder;

  static constexpr int kFirstGroup = Traits::kFirstConsumer / kWarpgroup;  // of the block's warpgroups
  // `group` from one lane: the compiler then knows that a warp has one, and what describes its queries to wgmma stays
  // in uniform registers.
  __device__ __forceinline__ Consumer(typename Traits::Shared& shared_, const AttentionParams& params_)
      : params(params_),
        group(__shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kWarpgroup - kFirstGroup, 0)),
        lane(threadIdx.x % 32), shared(shared_) {
    first_row = group * 64 + threadIdx.x % kWarpgroup / 32 * 16 + lane / 4;
    if (Traits::kTakesTurns && group == 1) named_arrive(kTurn, Traits::kConsumerThreads);  // the first goes first
  }
};

// Two warpgroups issue their products in turn (kTakesTurns). Where a multiprocessor holds two blocks they need none:
// the other block is beside them.
template <class Traits>
__device__ __forceinline__ void await_turn(const Consumer<Traits>& my) {
  if constexpr (Traits::kTakesTurns) named_sync(kTurn + my.group, Traits::kConsumerThreads);
}
template <class Traits>
__device__ __forceinline__ void pass_turn(const Consumer<Traits>& my) {
  if constexpr (Traits::kTakesTurns) named_arrive(kTurn + 1 - my.group, Traits::kConsumerThreads);
}

template <class Traits>
__device__ __forceinline__ void release(const Consumer<Traits>& my, uint64& barrier) {
  __syncwarp();
  if (my.lane == 0) barrier_arrive(barrier);
}

// Waits for the block's q tile number `n`; false after the last.
template <class Traits>
__device__ __forceinline__ bool take(const Consumer<Traits>& my, uint32 n) {
  await_q_tile(my.shared, n);
  return my.shared.q_tile[n % kPlaces] >= 0;
}
template <class Traits>
__device__ __forceinline__ const QTile& q_tile_at(const Consumer<Traits>& my, uint32 n) {
  return my.shared.described[n % kPlaces];
}

template <class Traits>
__device__ __forceinline__ void wait_for_queries(const Consumer<Traits>& my, uint32 nth) {
  barrier_wait(my.shared.q_full[nth % Traits::kQueryPlaces], nth / Traits::kQueryPlaces & 1);
}

// Descriptor of this warpgroup's rows of a q tile.
template <class Traits>
__device__ __forceinline__ uint32 queries(const Consumer<Traits>& my, uint32 nth) {
  uint32 q = tile_descriptor(shared_address(my.shared.q[nth % Traits::kQueryPlaces]) + my.group * 64 * 128, 0);
  asm volatile("" : "+r"(q));  // or it is computed anew for each key tile, while the other warpgroup waits
  return q;
}

}  // namespace sm90
}  // namespace s2o
