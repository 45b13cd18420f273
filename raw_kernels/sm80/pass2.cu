// Pass 2: each q tile resumes its rows' states and walks its segment's candidates in descending importance until a
// key tile adds less than tau of the softmax mass to every row (the paper's Algorithm 3). One block computes kBlockM
// consecutive entries of q_order; rows of q, k and v are gathered through q_order and k_order as they are loaded,
// and outputs scattered; nothing is permuted in memory. What keys that are left weigh, if anything, adds add_tail.cu.
//
//   q_order [batch * heads, segments, segment]: offsets in the segment; null where that is one q tile
//   k_order, rows of the chunk: units of keys of a (head, segment) pair
//   -> out and lse of every row that has candidates; visited [batch * heads, segments, tiles]
//
// pass2_listed is the same with queries and keys as KeyLists says, and perhaps no state to resume; pass2_skipping
// leaves out values besides. pass2_ladder writes no output: it finds the error at each tau of a ladder, and its blocks
// take q tiles in turn, as each needs room for what it keeps.
#include "sm80/attention.cuh"
#include "common/value_skip.cuh"

namespace s2o {

// Keys are listed in units of 1 << unit_shift neighbours.
template <class Traits, class Rows, class Params>
__device__ __forceinline__ void attend_second(const Params& params, typename Traits::Shared& shared, int unit_shift) {
  AttentionTile<Traits> attention(shared, params);
  int visited;
  {
    const Rows rows(params, block_index());
    const int count = rows.keys(params.geometry);
    if (rows.count <= 0 || !rows.has_work(params)) return;
    if constexpr (kSkipsValues<Traits>)
      attention.values.start(params.values, rows.head_in_batch(params.heads), rows.visited_index(params));
    attention.point_to_keys(rows, 0, rows.key_order(params), count);
    if (threadIdx.x < Traits::kThreads / 32) shared.p_column[threadIdx.x] = 0.f;
    if (threadIdx.x == 0) {  // read after walk's first barrier
      shared.tau = params.tau_of(rows.head, count);
      shared.least_keys = rows.least_keys(params);
      shared.patience = patience(count, params.steps_per_tile * Traits::kStep);
    }
    const auto begin = [&] {
      attention.load_queries(rows);
      if (rows.resumes(params)) attention.resume(rows);
    };
    visited = attention.template walk<false, true>(UnitKeys<Traits>{shared, count, params.pages, unit_shift}, count,
                                                   rows.count, begin);
  }
  const Rows rows(params, block_index());
  if (threadIdx.x == 0) rows.visited(params) = visited;
  attention.template store<false>(rows);
  if constexpr (Rows::kListed) {
    if (params.lists.kept) attention.keep_state(rows, params.lists.kept);
  }
}

template <class Traits>
__device__ __forceinline__ void pass2(const AttentionParams& params, typename Traits::Shared& shared) {
  attend_second<Traits, OrderedRows<Traits::kBlockM>>(params, shared, params.geometry.unit_shift);
}

template <class Traits>
__device__ __forceinline__ void pass2_listed(const ListedAttentionParams& params, typename Traits::Shared& shared) {
  attend_second<Traits, ListedRows<Traits::kBlockM>>(params, shared, params.lists.unit_shift);
}

template <class Traits>
__device__ __forceinline__ void pass2_ladder(const LadderAttentionParams& params, typename Traits::Shared& shared) {
  int q_tile = block_index();
  do {
    __syncthreads();  // everybody is done with the shared memory of the one before
    AttentionTile<Traits> attention(shared, params);
    {
      const OrderedRows<Traits::kBlockM> rows(params, q_tile);
      const int count = rows.keys(params.geometry);
      if (threadIdx.x < kLadder)  // read after walk's first barrier, like q_tile, which so needs no register
        shared.p_column[threadIdx.x] = attention.ladder.tau_of_bit(params, rows.head, threadIdx.x);
      if (threadIdx.x == 0) shared.first_key = q_tile;
      if (rows.count > 0 && count > 0) {
        const auto begin = [&] {
          attention.load_queries(rows);
          attention.resume(rows);
        };
        attention.point_to_keys(rows, q_tile, rows.key_order(params), count);
        attention.template walk<false, true>(UnitKeys<Traits>{shared, count, params.pages, params.geometry.unit_shift},
                                             count, rows.count, begin);
        const OrderedRows<Traits::kBlockM> walked(params, shared.first_key);
        attention.finish_ladder(walked.visited_index(params), walked.count);
      }
    }
    __syncthreads();
    q_tile = shared.first_key + gridDim.x;
  } while (q_tile < params.q_tiles);
}

template <class Traits>
__device__ __forceinline__ void pass2_skipping(const SkippingAttentionParams& params, typename Traits::Shared& shared) {
  attend_second<Traits, ListedRows<Traits::kBlockM>>(params, shared, params.lists.unit_shift);
}

}  // namespace s2o
