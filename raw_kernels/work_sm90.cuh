// Which q tiles a persistent block of the Hopper kernels takes: each the next one of the launch.
#pragma once
#include "shared_sm90.cuh"

namespace s2o {
namespace sm90 {

__device__ __forceinline__ int take_work(const AttentionParams& params) { return atomicAdd(params.next_work, 1); }

// The q tile `work` if it has work, or else the next that has, or -1. Pass 1 also takes rows without keys: their state is
// to be written. The counter's answer takes a while: who needs it later takes `work` early.
template <class Rows, class Params>
__device__ __forceinline__ int work_from(const Params& params, int work) {
  for (;; work = take_work(params)) {
    if (work >= params.works) return -1;
    if (!Rows::kMayBeEmpty) return work;
    const Rows rows(params, work);
    if (rows.count > 0 && (!Rows::kOrdered || rows.keys(params.geometry) > 0)) return work;
  }
}
template <class Rows, class Params>
__device__ __forceinline__ int next_work(const Params& params) {
  return work_from<Rows>(params, take_work(params));
}

template <int kBlockN, class Rows>
__device__ __forceinline__ Item describe(const AttentionParams& params, const Rows& rows) {
  Item item;
  item.head = rows.head;
  item.batch = rows.batch(params.heads);
  item.head_in_batch = rows.head_in_batch(params.heads);
  item.first = rows.first_query();
  item.rows = rows.count;
  item.limit = rows.limit(params.geometry);
  item.key_tiles = rows.template key_tiles<kBlockN>(params.geometry);
  item.visited = rows.visited_index(params);
  if constexpr (!Rows::kOrdered) {
    item.kv_head = rows.kv_head(params.heads, params.kv_heads);
    item.first_key = rows.first_key(params.geometry);
  }
  return item;
}

// Tells the block its q tile number `n`, once all but kKnown - 1 of those before it are done; one thread of the producer.
template <int kKnown, class Shared>
__device__ __forceinline__ void publish(Shared& shared, uint32 n, int work, const Item* item = nullptr) {
  static_assert(kKnown < kPlaces, "nobody reads the place any more");
  if (n >= kKnown) barrier_wait(shared.work_empty[(n - kKnown) % kPlaces], (n - kKnown) / kPlaces & 1);
  const uint32 place = n % kPlaces;
  shared.work[place] = work;
  if (item) shared.items[place] = *item;
  barrier_arrive(shared.work_full[place]);
}

// Waits until the block knows its q tile number `n`.
template <class Shared>
__device__ __forceinline__ void await_work(Shared& shared, uint32 n) {
  barrier_wait(shared.work_full[n % kPlaces], n / kPlaces & 1);
}

}  // namespace sm90
}  // namespace s2o
