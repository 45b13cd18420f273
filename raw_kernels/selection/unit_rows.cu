// What rank="query" multiplies queries with, made of the means of each unit's groups of keys (unit_clusters.cu).
//
//   block_keys [batch * kv_heads, 1 + blocks, kHeadDim], in the input's dtype: the centre, which is the mean of the first
//              units' means; then of each kBlockUnits neighbouring whole units the mean of their means
//   unit_rows  [batch * kv_heads, tiles, KeyTile::kBytes], for wgmma: cluster_keys less the centre and times a power of
//              two, in e4m3, of every four elements the two largest, and which these are, in the order in which
//              query_weights_sm90.cu reads them (unit_tile.cuh)
//   row_shares [batch * kv_heads, tiles, 64]: cluster_shares in that order
//   key_exponents [batch * kv_heads]: that power of two
//
// The centre moves all scores of a query alike, so that it changes no weight; without it keys that lie far from zero, all
// on one side, would share few of the steps of 8 bits. It comes of the first keys, which every segment with candidates
// has before it: no later key changes a bit of an earlier segment's order.
#include "common/pages.cuh"
#include "common/row_sums.cuh"
#include "selection/unit_tile.cuh"

namespace s2o {

struct UnitRowsParams {
  const uint16* unit_means;      // [batch * kv_heads, units, kHeadDim]
  Tensor<const uint16> k;        // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  const uint16* cluster_keys;    // [batch * kv_heads, units, clusters, kHeadDim]; null: each key is a group
  const uint16* cluster_shares;  // [batch * kv_heads, units, clusters]
  uint16* block_keys;            // [batch * kv_heads, 1 + blocks, kHeadDim]
  uint32* unit_rows;             // [batch * kv_heads, tiles, KeyTile::kBytes / 4]: four bytes each; null: not wanted
  uint16* row_shares;            // [batch * kv_heads, tiles, 64]
  int* key_exponents;            // [batch * kv_heads]
  Geometry geometry;
  int kv_heads;
  int leading;              // units that the centre is the mean of
  int head_blocks;          // blocks that cover a KV head's units
  Pages pages;              // of a paged cache
};

template <class Element, int kHeadDim, bool kPaged_, int kClusters_>
struct UnitRowsTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kPaged = kPaged_;
  static constexpr int kClusters = kClusters_;
};

// A thread has so many rows, or means, on their way at once: each takes long to come.
constexpr int kRowsAhead = 4, kMeansAhead = 8;

// Block: kSuperUnits neighbouring units of a KV head. A row is that of a few neighbouring threads, eight elements each.
template <class Traits>
__device__ __forceinline__ void unit_rows(const UnitRowsParams& p) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kHeadDim = Traits::kHeadDim, kClusters = Traits::kClusters;
  const Geometry& g = p.geometry;
  const int kv_head = blockIdx.x / p.head_blocks, first = blockIdx.x % p.head_blocks * kSuperUnits, units = g.units();
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const int64 of_head = static_cast<int64>(kv_head) * units;
  // Adds the means of `count` units from `first_unit` on, times `factor` each.
  const auto add_means = [&](float (&sum)[8], int first_unit, int count, float factor) {
    const uint16* from = p.unit_means + (of_head + first_unit) * kHeadDim + lane * 8;
    for (int u = 0; u < count; u += kMeansAhead) {
      uint4 rows[kMeansAhead];
#pragma unroll
      for (int i = 0; i < kMeansAhead; ++i) rows[i] = load_16_or_zeros(from + (u + i) * kHeadDim, u + i < count);
#pragma unroll
      for (int i = 0; i < kMeansAhead; ++i) {
        float x[8];
        unpack_row<Traits>(x, rows[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] += x[e] * factor;
      }
    }
  };
  const bool each_key = p.cluster_keys == nullptr;  // whose rows start on 16 bytes then
  const int batch = kv_head / p.kv_heads;
  const uint16* keys = head_rows<Traits::kPaged>(p.k, batch, kv_head % p.kv_heads);
  const int dims = each_key ? g.head_dim : kHeadDim;
  const auto load = [&](int row, bool present) {  // of a group, or a key
    const uint16* from = p.cluster_keys + (of_head * kClusters + row) * kHeadDim;
    if (each_key) {
      if constexpr (Traits::kPaged) {
        from = keys + PagedRows{p.k, p.pages, batch, 0}.offset(row);
      } else {
        from = keys + row * p.k.row;
      }
    }
    return load_16_or_zeros(from + lane * 8, present && lane * 8 < dims);
  };
  const auto write = [&](int row, const float (&x)[8]) {
    uint16* to = p.block_keys + (static_cast<int64>(kv_head) * (1 + units / kBlockUnits) + row) * kHeadDim + lane * 8;
    store_global_16(to, Element::pack(x[0], x[1]), Element::pack(x[2], x[3]), Element::pack(x[4], x[5]),
                    Element::pack(x[6], x[7]));
  };
  float centre[8] = {};
  add_means(centre, 0, p.leading, 1.f);
  const float share = 1.f / p.leading;
#pragma unroll
  for (int e = 0; e < 8; e += 2) {
    const uint32 pair = Element::pack(centre[e] * share, centre[e + 1] * share);
    centre[e] = Element::low(pair);
    centre[e + 1] = Element::high(pair);
  }
  if (first == 0 && slot == 0) write(0, centre);
  // Means of blocks: a slot has one of those that begin here.
  for (int i = slot; i < kSuperUnits / kBlockUnits; i += Traits::kRows) {
    const int block = first / kBlockUnits + i;
    if ((block + 1) * kBlockUnits > units) break;
    float mean[8] = {};
    add_means(mean, block * kBlockUnits, kBlockUnits, 1.f / kBlockUnits);
    write(1 + block, mean);
  }
  if constexpr (kHeadDim > 128) return;  // there is no kernel that reads them
  if (p.unit_rows == nullptr) return;

  // The longest of the first rows says how all are scaled, or a part of the centre where that is longer.
  // A slot finds that of every kRows-th row.
  float longest = 0.f;
  for (int first_row = 0; first_row < kClusters * p.leading; first_row += kRowsAhead * Traits::kRows) {
    uint4 rows[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i)
      rows[i] = load(min(first_row + i * Traits::kRows + slot, kClusters * p.leading - 1), true);
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      float x[8], length = 0.f;
      unpack_row<Traits>(x, rows[i]);
#pragma unroll
      for (int e = 0; e < 8; ++e) length = fmaf(x[e] - centre[e], x[e] - centre[e], length);
#pragma unroll
      for (int step = kLanes / 2; step > 0; step /= 2) length += __shfl_xor_sync(kFullWarp, length, step);
      if (length < infinity()) longest = fmaxf(longest, length);
    }
  }
  __shared__ float of_slots[Traits::kRows];
  of_slots[slot] = longest;  // of all lanes the same
  __syncthreads();
#pragma unroll
  for (int i = 0; i < Traits::kRows; ++i) longest = fmaxf(longest, of_slots[i]);
  // The first keys may be nearly alike, as those of repeated tokens are, and later ones are not: these need room.
  float of_centre = 0.f;
#pragma unroll
  for (int e = 0; e < 8; ++e) of_centre = fmaf(centre[e], centre[e], of_centre);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) of_centre += __shfl_xor_sync(kFullWarp, of_centre, step);
  if (of_centre < infinity()) longest = fmaxf(longest, of_centre * (1.f / (spec::kCentrePart * spec::kCentrePart)));
  const int exponent = kKeyExponent - half_exponent(longest);
  if (first == 0 && threadIdx.x == 0) p.key_exponents[kv_head] = exponent;
  const float factor = power_of_two(exponent);
  using Row = UnitRow<kClusters>;
  constexpr uint16 kShareOfKey = kClusters == 2 ? 0xbc00 : kClusters == 4 ? 0xc000 : 0xc200;  // -1, -2 and -3
  const int64 first_tile = (static_cast<int64>(kv_head) * p.head_blocks + first / kSuperUnits) * Row::kTiles;
  using Tile = KeyTile<kHeadDim == 64 ? 64 : 128>;
  unsigned char* tiles = reinterpret_cast<unsigned char*>(p.unit_rows) + first_tile * Tile::kBytes;
  uint16* shares = p.row_shares + first_tile * kTileRows;
  // Writes what becomes of this thread's row number `r`, whose elements are `row`.
  const auto store_row = [&](int r, const uint4& row) {
    const int unit = r / kClusters;
    float kept[4] = {};
    uint32 choices = 0x44;  // the first two of each four
    uint16 share = 0xfc00;  // minus infinity
    if (first + unit < units) {
      float x[8];
      unpack_row<Traits>(x, row);
      share = each_key ? kShareOfKey : p.cluster_shares[of_head * kClusters + first * kClusters + r];
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = share == 0xfc00 ? 0.f : (x[e] - centre[e]) * factor;
      uint32 choice[2];
      keep_two({x[0], x[1], x[2], x[3]}, kept[0], kept[1], choice[0]);
      keep_two({x[4], x[5], x[6], x[7]}, kept[2], kept[3], choice[1]);
      choices = choice[0] | choice[1] << 4;
    }
    choices <<= lane % 4 * 8;
    choices |= __shfl_xor_sync(kFullWarp, choices, 1);
    choices |= __shfl_xor_sync(kFullWarp, choices, 2);
    const Row at(unit, r % kClusters);
    unsigned char* tile = tiles + at.tile * Tile::kBytes;
    *reinterpret_cast<uint32*>(tile + Tile::kept_at(at.row, lane)) = pack_e4m3(kept[0], kept[1], kept[2], kept[3]);
    if (lane % 4 == 0) *reinterpret_cast<uint32*>(tile + Tile::choices_at(at.row, lane)) = choices;
    if (lane == 0) shares[at.tile * kTileRows + at.row] = share;
  };
  constexpr int kLast = kClusters * kSuperUnits;
  static_assert(kLast % (kRowsAhead * Traits::kRows) == 0);
#pragma unroll 1
  for (int r = slot; r < kLast; r += kRowsAhead * Traits::kRows) {
    uint4 rows[kRowsAhead];
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const int row = r + i * Traits::kRows, last = units * kClusters - 1;
      rows[i] = load(min(first * kClusters + row, last), first * kClusters + row <= last);
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) store_row(r + i * Traits::kRows, rows[i]);
  }
}

}  // namespace s2o
