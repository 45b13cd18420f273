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
#include "consumer_sm90.cuh"
#include "producer_sm90.cuh"

namespace s2o {
namespace sm90 {

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
