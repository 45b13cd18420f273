// What rank="weight" scores in place of a unit's keys: their mean, found in float32 and rounded to the input's dtype,
// and the key that is furthest from it, which a mean of many would hide.
//
//   k [batch, kv_heads, seqlen_k, head_dim] or pages -> unit_keys [batch * kv_heads, units, 2, kHeadDim], of whole
//                                                       units alone, 0 past head_dim
#include "selection/key_block.cuh"

namespace s2o {

struct UnitKeysParams {
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  uint16* unit_keys;       // [batch * kv_heads, units, 2, kHeadDim]
  Geometry geometry;
  int kv_heads;
  int head_blocks;         // blocks that cover a KV head's units
  int aligned;             // every row of k starts on 16 bytes
  Pages pages;             // of a paged cache
};

template <class Element, int kHeadDim, bool kPaged>
struct UnitKeysTraits : KeyBlockTraits<Element, kHeadDim, kPaged, 128> {
  using Shared = KeyBlockShared<KeyBlockTraits<Element, kHeadDim, kPaged, 128>>;
};

// Block: a KV head and kKeys keys, whose rows all threads copy; then a thread has eight elements of a unit.
template <class Traits>
__device__ __forceinline__ void unit_keys(const UnitKeysParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kKeys = Traits::kKeys, kLanes = Traits::kLanes;
  const Geometry& g = p.geometry;
  const int kv_head = blockIdx.x / p.head_blocks, begin = blockIdx.x % p.head_blocks * kKeys;
  const int count = load_key_block<Traits>(p, kv_head, begin, shared);
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const float factor = 1.f / (1 << g.unit_shift);  // of each key, as a sum of large ones may be too large
  const int units = count >> g.unit_shift;
  for (int first = 0; first < units; first += Traits::kRows) {
    const bool is_unit = first + slot < units;  // lanes without one go along, as lanes of a row add up together
    const int u = is_unit ? first + slot : units - 1, begin_row = u << g.unit_shift, end_row = u + 1 << g.unit_shift;
    float mean[8] = {}, x[8];
    for (int r = begin_row; r < end_row; ++r) {
      read_row<Traits>(x, shared.rows + r * Traits::kHeadDim, lane, Traits::kHeadDim, true);
#pragma unroll
      for (int e = 0; e < 8; ++e) mean[e] += x[e] * factor;
    }
    float furthest = -1.f;  // squared; no distance that is not a number is larger
    int outlier = begin_row;
    for (int r = begin_row; r < end_row; ++r) {
      read_row<Traits>(x, shared.rows + r * Traits::kHeadDim, lane, Traits::kHeadDim, true);
      float distance = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) distance = fmaf(x[e] - mean[e], x[e] - mean[e], distance);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) distance += __shfl_xor_sync(kFullWarp, distance, step);
      if (distance > furthest) {
        furthest = distance;
        outlier = r;
      }
    }
    if (!is_unit) continue;
    uint16* row = p.unit_keys + (static_cast<int64>(kv_head) * g.units() + (begin >> g.unit_shift) + u) * 2 *
                                    Traits::kHeadDim + lane * 8;
    uint4 packed;
    packed.x = Element::pack(mean[0], mean[1]);
    packed.y = Element::pack(mean[2], mean[3]);
    packed.z = Element::pack(mean[4], mean[5]);
    packed.w = Element::pack(mean[6], mean[7]);
    *reinterpret_cast<uint4*>(row) = packed;
    *reinterpret_cast<uint4*>(row + Traits::kHeadDim) =
        *reinterpret_cast<const uint4*>(shared.rows + outlier * Traits::kHeadDim + lane * 8);
  }
}

}  // namespace s2o
