// Mean keys of units of neighbours, which rank="weight" scores in place of keys: in float32, rounded to the input's
// dtype.
//
//   k [batch, kv_heads, seqlen_k, head_dim] or pages -> unit_means [batch * kv_heads, units, kHeadDim], of whole units
//                                                       alone, 0 past head_dim
#include "common/pages.cuh"
#include "common/row_sums.cuh"

namespace s2o {

struct UnitMeansParams {
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  uint16* unit_means;      // [batch * kv_heads, units, kHeadDim]
  Geometry geometry;
  int kv_heads;
  int head_blocks;         // blocks that cover a KV head's units
  int aligned;             // every row of k starts on 16 bytes
  Pages pages;             // of a paged cache
};

template <class Element, int kHeadDim, bool kPaged_>
struct UnitMeansTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kPaged = kPaged_;
  static constexpr int kBlockKeys = 128;  // of a block: a multiple of every unit
  struct Shared {
    int64 offsets[kBlockKeys];      // of their rows, in elements
    uint16 rows[kBlockKeys * kHeadDim];
  };
};

// Block: a KV head and kBlockKeys keys, whose rows all threads copy; then a thread adds up eight elements of a unit.
template <class Traits>
__device__ __forceinline__ void unit_means(const UnitMeansParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kKeys = Traits::kBlockKeys, kLanes = Traits::kLanes;
  const Geometry& g = p.geometry;
  const int kv_head = blockIdx.x / p.head_blocks, begin = blockIdx.x % p.head_blocks * kKeys;
  const int batch = kv_head / p.kv_heads;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, kv_head % p.kv_heads);
  const int count = min(kKeys, (g.units() << g.unit_shift) - begin);
  if (threadIdx.x < count) {
    if constexpr (Traits::kPaged) {
      shared.offsets[threadIdx.x] = PagedRows{p.k, p.pages, batch, 0}.offset(begin + threadIdx.x);
    } else {
      shared.offsets[threadIdx.x] = (begin + static_cast<int>(threadIdx.x)) * p.k.row;
    }
  }
  __syncthreads();
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
#pragma unroll 4
  for (int r = slot; r < count; r += Traits::kRows) {
    const uint16* row = k + shared.offsets[r];
    uint4 x = make_uint4(0, 0, 0, 0);
    if (p.aligned && lane * 8 + 8 <= g.head_dim) {
      x = *reinterpret_cast<const uint4*>(row + lane * 8);
    } else {
      x = load_unaligned(row, lane * 8, g.head_dim);
    }
    *reinterpret_cast<uint4*>(shared.rows + r * Traits::kHeadDim + lane * 8) = x;
  }
  __syncthreads();
  const float factor = 1.f / (1 << g.unit_shift);  // of each key, as a sum of large ones may be too large
  for (int u = slot; u < count >> g.unit_shift; u += Traits::kRows) {
    float sum[8] = {};
    for (int r = u << g.unit_shift; r < u + 1 << g.unit_shift; ++r) {
      float x[8];
      read_row<Traits>(x, shared.rows + r * Traits::kHeadDim, lane, Traits::kHeadDim, true);
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[e] += x[e] * factor;
    }
    const int64 row = static_cast<int64>(kv_head) * g.units() + (begin >> g.unit_shift) + u;
    uint4 packed;
    packed.x = Element::pack(sum[0], sum[1]);
    packed.y = Element::pack(sum[2], sum[3]);
    packed.z = Element::pack(sum[4], sum[5]);
    packed.w = Element::pack(sum[6], sum[7]);
    *reinterpret_cast<uint4*>(p.unit_means + row * Traits::kHeadDim + lane * 8) = packed;
  }
}

}  // namespace s2o
