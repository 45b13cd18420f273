// Which q tiles a persistent block of the Hopper kernels takes: each the next one of the launch, or its own by a rule.
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

__device__ __forceinline__ int take_q_tile(const AttentionParams& params) { return atomicAdd(params.next_q_tile, 1); }

// Of a launch without a counter the blocks are dealt q tiles, there and back again: these get shorter, and so each block
// has about as much work as the others.
struct DealtQTiles {
  uint32 round = 0;
  __device__ __forceinline__ int take(const AttentionParams& params) {
    if (params.next_q_tile) return take_q_tile(params);
    const uint32 place = round & 1 ? gridDim.x - 1 - block_index() : block_index();
    return static_cast<int>(round++ * gridDim.x + place);
  }
};

// The q tile `q_tile` if it has work, or else the next that has, or -1. Pass 1 also takes rows without keys: their
// state is to be written. The counter's answer takes a while: who needs it later takes `q_tile` early.
// `take`: gives another.
template <class Rows, class Params, class Take>
__device__ __forceinline__ int q_tile_from(const Params& params, int q_tile, Take take) {
  for (;; q_tile = take()) {
    if (q_tile >= params.q_tiles) return -1;
    if (!Rows::kMayBeEmpty) return q_tile;
    if constexpr (Rows::kOrdered) {
      const Rows rows(params, q_tile);
      if (rows.count > 0 && rows.has_work(params)) return q_tile;
    } else {
      if (Rows(params, q_tile).count > 0) return q_tile;
    }
  }
}
template <class Rows, class Params>
__device__ __forceinline__ int q_tile_from(const Params& params, int q_tile) {
  return q_tile_from<Rows>(params, q_tile, [&] { return take_q_tile(params); });
}
template <class Rows, class Params>
__device__ __forceinline__ int next_q_tile(const Params& params) {
  return q_tile_from<Rows>(params, take_q_tile(params));
}

template <int kBlockN, class Rows>
__device__ __forceinline__ QTile describe(const AttentionParams& params, const Rows& rows) {
  QTile tile;
  tile.head = rows.head;
  tile.batch = rows.batch(params.heads);
  tile.head_in_batch = rows.head_in_batch(params.heads);
  tile.first = rows.first_query();
  tile.rows = rows.count;
  tile.limit = rows.limit(params.geometry);
  tile.key_tiles = rows.template key_tiles<kBlockN>(params.geometry);
  tile.visited = rows.visited_index(params);
  if constexpr (!Rows::kOrdered) {
    tile.kv_head = rows.kv_head(params.heads, params.kv_heads);
    tile.first_key = rows.first_key(params.geometry);
    tile.table_row = rows.table_row(params.heads);
    tile.sequence_keys = rows.sequence_keys(params.geometry);
  }
  return tile;
}

// Tells the block its q tile number `n`, once all but kKnown - 1 of those before are done; one thread of the producer.
// `describe(place)` writes what else is to be known of it.
template <int kKnown, class Shared, class Describe>
__device__ __forceinline__ void publish(Shared& shared, uint32 n, int q_tile, const Describe& describe) {
  static_assert(kKnown < kPlaces, "nobody reads the place any more");
  if (n >= kKnown) barrier_wait(shared.q_tile_empty[(n - kKnown) % kPlaces], (n - kKnown) / kPlaces & 1);
  const uint32 place = n % kPlaces;
  shared.q_tile[place] = q_tile;
  describe(place);
  barrier_arrive(shared.q_tile_full[place]);
}

// Waits until the block knows its q tile number `n`.
template <class Shared>
__device__ __forceinline__ void await_q_tile(Shared& shared, uint32 n) {
  barrier_wait(shared.q_tile_full[n % kPlaces], n / kPlaces & 1);
}

}  // namespace sm90
}  // namespace s2o
