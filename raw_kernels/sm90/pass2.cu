// Pass 2 on Hopper: each q tile resumes its rows' states and walks its segment's candidates in descending importance
// until a stop check finds less than tau of the softmax mass added in every row, and to the next one (the paper's
// Algorithm 3). Rows of q, k and v are gathered through q_order and k_order; nothing is permuted in memory.
//
//   q_order [batch * heads, segments, segment]: offsets in the segment; null where that is one q tile
//   k_order, rows of the chunk: units of keys of a (head, segment) pair
//   -> out and lse of every row that has candidates; visited [batch * heads, segments, tiles]
//
// pass2_listed_sm90 is the same with queries and keys as KeyLists says, and perhaps no state to resume;
// pass2_listed_pairs_sm90's q tiles have 64 queries of each of two heads that share lists, at tau 0;
// pass2_skipping_sm90 leaves out values besides.
// pass2_ladder_sm90 writes no output: it finds the error at each tau of a ladder.
// pass2_tail_sm90 adds what the candidates that are left weigh, where they count; other q tiles leave that to add_tail.cu.
#include "sm90/attention.cuh"

namespace s2o {

template <class Traits>
__device__ __forceinline__ void pass2_sm90(const AttentionParams& params, typename Traits::Shared& shared) {
  sm90::attend_second<Traits, OrderedRows<Traits::kBlockM>>(params, shared);
}

template <class Traits>
__device__ __forceinline__ void pass2_tail_sm90(const TailAttentionParams& params, typename Traits::Shared& shared) {
  sm90::attend_second<Traits, OrderedRows<Traits::kBlockM>>(params, shared);
}

template <class Traits>
__device__ __forceinline__ void pass2_boxes_sm90(const MappedUnitsParams& params, typename Traits::Shared& shared) {
  sm90::attend_second<Traits, OrderedRows<Traits::kBlockM>>(params.attention, shared, params);
}

template <class Traits>
__device__ __forceinline__ void pass2_boxes_tail_sm90(const MappedUnitsTailParams& params,
                                                      typename Traits::Shared& shared) {
  sm90::attend_second<Traits, OrderedRows<Traits::kBlockM>>(params.attention, shared, params);
}

template <class Traits>
__device__ __forceinline__ void pass2_boxes_listed_sm90(const MappedUnitsListedParams& params,
                                                        typename Traits::Shared& shared) {
  sm90::attend_second<Traits, ListedRows<Traits::kBlockM>>(params.attention, shared, params);
}

template <class Traits>
__device__ __forceinline__ void pass2_boxes_listed_pairs_sm90(const MappedUnitsListedParams& params,
                                                              typename Traits::Shared& shared) {
  sm90::attend_second<Traits, ListedRows<Traits::kBlockM, 2>>(params.attention, shared, params);
}

template <class Traits>
__device__ __forceinline__ void pass2_boxes_skipping_sm90(const MappedUnitsSkippingParams& params,
                                                          typename Traits::Shared& shared) {
  sm90::attend_second<Traits, ListedRows<Traits::kBlockM>>(params.attention, shared, params);
}

template <class Traits>
__device__ __forceinline__ void pass2_listed_sm90(const ListedAttentionParams& params,
                                                  typename Traits::Shared& shared) {
  sm90::attend_second<Traits, ListedRows<Traits::kBlockM>>(params, shared);
}

template <class Traits>
__device__ __forceinline__ void pass2_listed_pairs_sm90(const ListedAttentionParams& params,
                                                        typename Traits::Shared& shared) {
  sm90::attend_second<Traits, ListedRows<Traits::kBlockM, 2>>(params, shared);
}

template <class Traits>
__device__ __forceinline__ void pass2_ladder_sm90(const LadderAttentionParams& params,
                                                  typename Traits::Shared& shared) {
  sm90::attend_second<Traits, OrderedRows<Traits::kBlockM>>(params, shared);
}

template <class Traits>
__device__ __forceinline__ void pass2_skipping_sm90(const SkippingAttentionParams& params,
                                                    typename Traits::Shared& shared) {
  sm90::attend_second<Traits, ListedRows<Traits::kBlockM>>(params, shared);
}

}  // namespace s2o
