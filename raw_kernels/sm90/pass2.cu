// Pass 2 on Hopper: each q tile resumes its rows' states and walks its segment's candidates in descending importance
// until a look adds less than tau of the softmax mass to every row, and one look more (the paper's Algorithm 3).
// The candidates that are left count as their mean. Rows of q, k and v are gathered through q_order and k_order; nothing is permuted in memory.
//
//   q_order [batch * heads, segments, segment]: offsets in the segment
//   k_order, rows of the chunk: key positions of a (head, segment) pair
//   -> out and lse of every row that has candidates; visited [batch * heads, segments, tiles]
#include "sm90/attention.cuh"

namespace s2o {

template <class Traits>
__device__ __forceinline__ void pass2_sm90(const AttentionParams& params, typename Traits::Shared& shared) {
  sm90::attend_second<Traits>(params, shared);
}

}  // namespace s2o
