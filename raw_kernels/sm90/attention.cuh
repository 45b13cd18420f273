// The Hopper attention tile (sm_90a): one producer warpgroup brings rows of q, k and v to shared memory, by the
// copy engine or gathered with cp.async, two consumer warpgroups hold 64 query rows each and multiply with wgmma. With
// q tiles of 64 rows there is one consumer, and a multiprocessor holds two blocks; of pass 2 with a head_dim of 64 and
// no tail, value skips or ladder it holds two with both consumers, and a producer of two warps (TwoBlockTraits).
// Blocks are persistent: each takes q tiles from a counter until none is left, and the producer runs ahead into the
// next tile.
//
// Consumers: the scores of key tile t + 1 and the output of key tile t are in flight together, and softmax of one
// warpgroup runs under the products of the other (named barriers let them issue in turn), or of one block under those of
// the other; of TwoBlockTraits one product is in flight at a time.
//
// Stopping: there is a *stop check* every block_n = 128 keys. Tau, the lag and `visited` count in these, and what lies
// between two of them is called a key tile outside of this folder. Here it is one key tile of kBlockN keys, or two of
// 64 with head_dim 256 or q tiles of 64. After softmax of the last one, under the products of the next, each warp votes. The votes of
// stop check n are read before the scores that stop check n + 2 is about are issued, so those of stop check n + 1,
// already in flight, still count (STOP_LAG in s2o_cupy/spec). Producer and consumers read the same votes, so both
// know which copies were started; consumers release those that nobody will use.
//
// Shared memory keeps tiles in atoms of 64 columns, rows of 128 bytes, swizzled as wgmma reads them: the 16-byte chunk
// c of row r stands at c ^ (r & 7).
#pragma once
#include "sm90/checker.cuh"
#include "sm90/consumers.cuh"
#include "sm90/copier.cuh"
#include "sm90/page_copier.cuh"
#include "sm90/pager.cuh"
#include "sm90/producer.cuh"
#include "sm90/scheduler.cuh"

namespace s2o {
namespace sm90 {

// One block of pass 1: consecutive rows, by tensor maps.
template <class Traits, class Rows, class Params>
__device__ __forceinline__ void attend_first(const Mapped<Params>& params, typename Traits::Shared& shared) {
  static_assert(kFitsRegisters<Traits, kCopierRegisters, kFirstConsumerRegisters>);
  initialise<Traits, false>(shared);
  if (threadIdx.x < kWarpgroup) {
    registers_shrink<kCopierRegisters>();
    if (threadIdx.x < 32) {
      if constexpr (Traits::kPaged) {
        produce_by_page_maps<Traits>(params, shared);
      } else {
        produce_by_tensor_maps<Traits>(params, shared);
      }
    } else if (threadIdx.x < 64) {
      schedule<Traits, Rows>(params, shared);
    } else {
      check_values<Traits>(shared);
    }
  } else {
    registers_grow<kFirstConsumerRegisters>();
    Consumer<FirstTraits<Traits>> my(shared, params.attention);
    run_first<kStoresLate<Traits>>(my);
  }
}

// One block of pass 1 of a paged cache: consecutive rows, gathered through the page table.
template <class Traits, class Rows, class Params>
__device__ __forceinline__ void attend_first_in_pages(const Params& params, typename Traits::Shared& shared) {
  static_assert(kFitsRegisters<Traits, kProducerRegisters<Traits>, kConsumerRegisters<Traits>>);
  initialise<Traits, true>(shared);
  if (threadIdx.x < kWarpgroup) {
    registers_shrink<kProducerRegisters<Traits>>();
    produce_from_pages<Traits, Rows>(params, shared);
  } else {
    registers_grow<kConsumerRegisters<Traits>>();
    Consumer<Traits> my(shared, params);
    run_first<Traits::kHeadDim == 128>(my);  // with 256 a late store would spill
  }
}

// One block of pass 2: rows of queries and of keys gathered as `Rows` says. `maps`: MappedUnits, of rows that come by boxes.
template <class Traits, class Rows, class Params, class Maps = int>
__device__ __forceinline__ void attend_second(const Params& params, typename Traits::Shared& shared, const Maps& maps = {}) {
  static_assert(Traits::kInHalves || kFitsRegisters<Traits, kProducerRegisters<Traits>, kConsumerRegisters<Traits>>);
  initialise<Traits, true>(shared);
  if (Traits::kInHalves ? warp_of_block() >= Traits::kConsumerWarps : threadIdx.x < kWarpgroup) {
    if constexpr (!Traits::kInHalves) registers_shrink<kProducerRegisters<Traits>>();
    produce_second<Traits, Rows>(params, shared, maps);
  } else {
    if constexpr (!Traits::kInHalves) registers_grow<kConsumerRegisters<Traits>>();
    Consumer<Traits> my(shared, params);
    run_second<Rows>(my, params);
  }
}

}  // namespace sm90
}  // namespace s2o
