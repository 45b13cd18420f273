// A block's neighbouring keys of a KV head in shared memory, wherever they lie: in rows of any alignment or in pages.
#pragma once
#include "common/pages.cuh"
#include "common/row_sums.cuh"

namespace s2o {

// kKeys: of a block, a multiple of every unit.
template <class Element, int kHeadDim, bool kPaged_, int kKeys_>
struct KeyBlockTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kPaged = kPaged_;
  static constexpr int kKeys = kKeys_;
  static_assert(kKeys % 128 == 0 && kKeys <= kRankThreads);
};

template <class Traits>
struct KeyBlockShared {
  int64 offsets[Traits::kKeys];  // of their rows, in elements
  uint16 rows[Traits::kKeys * Traits::kHeadDim];
};

// Copies keys [begin, + kKeys) as far as they are in whole units, zeros past head_dim; returns how many.
template <class Traits, class Params, class Shared>
__device__ __forceinline__ int load_key_block(const Params& p, int kv_head, int begin, Shared& shared) {
  const Geometry& g = p.geometry;
  const int batch = kv_head / p.kv_heads;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, kv_head % p.kv_heads);
  const int count = min(Traits::kKeys, (g.units() << g.unit_shift) - begin);
  if (threadIdx.x < count) {
    if constexpr (Traits::kPaged) {
      shared.offsets[threadIdx.x] = PagedRows{p.k, p.pages, batch, 0}.offset(begin + threadIdx.x);
    } else {
      shared.offsets[threadIdx.x] = (begin + static_cast<int>(threadIdx.x)) * p.k.row;
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % Traits::kLanes, slot = threadIdx.x / Traits::kLanes;
  if (p.aligned) {  // all on their way at once
#pragma unroll 4
    for (int r = slot; r < count; r += Traits::kRows)
      cp_async_16_or_zeros(shared_address(shared.rows + r * Traits::kHeadDim + lane * 8),
                           k + shared.offsets[r] + lane * 8, lane * 8 < g.head_dim);
    cp_async_wait_all();
    __syncthreads();
    return count;
  }
#pragma unroll 4
  for (int r = slot; r < count; r += Traits::kRows) {
    const uint4 x = load_unaligned(k + shared.offsets[r], lane * 8, g.head_dim);
    *reinterpret_cast<uint4*>(shared.rows + r * Traits::kHeadDim + lane * 8) = x;
  }
  __syncthreads();
  return count;
}

}  // namespace s2o
