// What producer and consumers of the Hopper tile share: sizes, shared memory, barriers and votes.
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

}  // namespace sm90
}  // namespace s2o
