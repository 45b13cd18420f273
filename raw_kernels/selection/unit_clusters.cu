// What rank="query" scores in place of a unit's keys: the means of a few groups of keys that lie close together, each found
// in float32 and rounded to the input's dtype. A key that a query looks for weighs most in the mean of its own group.
//
//   k [batch, kv_heads, seqlen_k, head_dim] or pages ->
//     cluster_keys   [batch * kv_heads, units, kClusters, kHeadDim], of whole units alone, 0 past head_dim
//     cluster_shares [batch * kv_heads, units, kClusters]: log2 of a group's part of the unit's keys, float16; -inf where
//                    a group has none
//     unit_means     [batch * kv_heads, units, kHeadDim]
//     sampled_keys   [batch * kv_heads, kSampledOfBlock * blocks, kHeadDim]: the first keys of units evenly apart in each block
//                    of units
//
// The first centre is the key furthest from the unit's mean, each further one the key furthest from all centres before it,
// of equally far ones the first. A key belongs to the centre nearest to it, of equally near ones the first. Where a unit has
// as many keys as groups each key is one, in their order.
#include "selection/key_block.cuh"

namespace s2o {

struct UnitClustersParams {
  Tensor<const uint16> k;   // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  uint16* cluster_keys;     // [batch * kv_heads, units, clusters, kHeadDim]; null: not wanted, as each key is a group
  uint16* cluster_shares;   // [batch * kv_heads, units, clusters]
  uint16* unit_means;       // [batch * kv_heads, units, kHeadDim]
  uint16* sampled_keys;     // [batch * kv_heads, kSampledOfBlock * blocks, kHeadDim]
  Geometry geometry;
  int kv_heads;
  int head_blocks;          // blocks that cover a KV head's units
  int aligned;              // every row of k starts on 16 bytes
  Pages pages;              // of a paged cache
};

template <class Element, int kHeadDim, bool kPaged>
using ClusterKeys = KeyBlockTraits<Element, kHeadDim, kPaged, (kHeadDim > 128 ? 128 : 256)>;

template <class Element, int kHeadDim, bool kPaged, int kClusters_>
struct ClusterTraits : ClusterKeys<Element, kHeadDim, kPaged> {
  static constexpr int kClusters = kClusters_;
  struct Shared : KeyBlockShared<ClusterKeys<Element, kHeadDim, kPaged>> {
    float nearest[ClusterKeys<Element, kHeadDim, kPaged>::kKeys];  // squared distances of keys to the nearest centre so far
    int cluster[ClusterKeys<Element, kHeadDim, kPaged>::kKeys];    // whose centre that is
  };
};

// Block: a KV head and kKeys keys; then a few threads have a unit, eight elements of its rows each.
template <class Traits>
__device__ __forceinline__ void unit_clusters(const UnitClustersParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kHeadDim = Traits::kHeadDim, kClusters = Traits::kClusters;
  const Geometry& g = p.geometry;
  const int kv_head = blockIdx.x / p.head_blocks, begin = blockIdx.x % p.head_blocks * Traits::kKeys;
  const int count = load_key_block<Traits>(p, kv_head, begin, shared);
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes, units = count >> g.unit_shift;
  const auto read = [&](float (&x)[8], int r) {
    read_row<Traits>(x, shared.rows + r * kHeadDim, lane, kHeadDim, true);
  };
  // Of all lanes of a row: the squared distance of key r to `from`.
  const auto distance = [&](int r, const float (&from)[8]) {
    float x[8], found = 0.f;
    read(x, r);
#pragma unroll
    for (int e = 0; e < 8; ++e) found = fmaf(x[e] - from[e], x[e] - from[e], found);
#pragma unroll
    for (int step = kLanes / 2; step > 0; step /= 2) found += __shfl_xor_sync(kFullWarp, found, step);
    return found;
  };
  const auto store = [&](uint16* to, const float (&x)[8]) {
    store_global_16(to + lane * 8, Element::pack(x[0], x[1]), Element::pack(x[2], x[3]), Element::pack(x[4], x[5]),
                    Element::pack(x[6], x[7]));
  };
  for (int first = 0; first < units; first += Traits::kRows) {
    const bool is_unit = first + slot < units;  // lanes without one go along, as lanes of a row add up together
    const int u = is_unit ? first + slot : units - 1, begin_row = u << g.unit_shift, end_row = u + 1 << g.unit_shift;
    const float factor = 1.f / (1 << g.unit_shift);  // of each key, as a sum of large ones may be too large
    float x[8], from[8] = {};
    for (int r = begin_row; r < end_row; ++r) {
      read(x, r);
#pragma unroll
      for (int e = 0; e < 8; ++e) from[e] += x[e] * factor;
    }
    const int number = (begin >> g.unit_shift) + u, blocks = g.units() / spec::kBlockUnits;
    const int64 unit = static_cast<int64>(kv_head) * g.units() + number;
    if (is_unit) store(p.unit_means + unit * kHeadDim, from);
    constexpr int kApart = spec::kBlockUnits / spec::kSampledOfBlock;
    static_assert(spec::kBlockUnits % spec::kSampledOfBlock == 0);
    if (is_unit && number % kApart == kApart / 2 && number < blocks * spec::kBlockUnits) {
      read(x, begin_row);
      store(p.sampled_keys + (static_cast<int64>(kv_head) * blocks * spec::kSampledOfBlock + number / kApart) * kHeadDim, x);
    }
    if (p.cluster_keys == nullptr) continue;
    const bool each_key = 1 << g.unit_shift == kClusters;
    // Round 0 finds the key furthest from the mean, round c + 1 the one furthest from the first c + 1 centres.
    float furthest = -1.f;  // no distance that is not a number is larger
    int centre = begin_row;
    for (int r = begin_row; r < end_row && !each_key; ++r) {
      const float d = distance(r, from);
      if (d > furthest) furthest = d, centre = r;
    }
#pragma unroll 1
    for (int c = 0; c < kClusters && !each_key; ++c) {
      read(from, centre);
      furthest = -1.f, centre = begin_row;
      for (int r = begin_row; r < end_row; ++r) {
        float d = distance(r, from);
        const float so_far = is_unit && c > 0 ? shared.nearest[r] : 0.f;
        const bool nearer = c == 0 || d < so_far;
        if (!nearer) d = so_far;
        __syncwarp();  // all lanes of the row have read
        if (is_unit && lane == 0 && nearer) shared.nearest[r] = d, shared.cluster[r] = c;
        __syncwarp();
        if (d > furthest) furthest = d, centre = r;
      }
    }
    float sum[kClusters][8] = {};
    int size[kClusters] = {};
    for (int r = begin_row; r < end_row; ++r) {
      read(x, r);
      const int mine = each_key ? r - begin_row : is_unit ? shared.cluster[r] : 0;
#pragma unroll
      for (int c = 0; c < kClusters; ++c) {
        if (mine != c) continue;
        ++size[c];
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[c][e] += x[e] * factor;
      }
    }
    if (!is_unit) continue;
#pragma unroll
    for (int c = 0; c < kClusters; ++c) {
      const float share = size[c] * factor, whole = size[c] ? 1.f / share : 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) sum[c][e] *= whole;
      store(p.cluster_keys + (unit * kClusters + c) * kHeadDim, sum[c]);
      if (lane == 0)
        p.cluster_shares[unit * kClusters + c] =
            static_cast<uint16>(Float16::pack(size[c] ? __log2f(share) : -infinity(), 0.f));
    }
  }
}

}  // namespace s2o
