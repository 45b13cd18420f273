// What unvisited candidates count for, added by pass 2 itself: what it is given besides, and which kernels do so.
#pragma once
#include "tail/tail_places.cuh"

namespace s2o {

struct TailAttentionParams : AttentionParams {
  const float* mean_values;   // [batch * kv_heads, groups, kHeadDim]
  const uint16* covariances;  // [batch * kv_heads, groups, kHeadDim, kHeadDim], bfloat16
  int groups, first_group;
  float scale;                // of scores
};

// What kernels that do so are compiled for.
template <class Traits>
struct WithTail : Traits {
  struct Shared : Traits::Shared {
    // Of the q tile's moments. The producer writes them again once all warps have voted on a later q tile.
    float mean_values[Traits::kHeadDim];
    // Barrier: outputs of pass 1 have been read, in whose place threads copy samples. v_empty says so as well; here each
    // reader arrives, as race detectors follow.
    uint64 outputs_read;
    // Each thread's first sums of the values of samples of even number: registers have no room for them.
    float even[spec::kTailEvidence / 2][Traits::kConsumerThreads];
  };
};
template <class Traits>
constexpr bool kAddsTail = false;
template <class Traits>
constexpr bool kAddsTail<WithTail<Traits>> = true;

}  // namespace s2o
