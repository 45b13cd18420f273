// What rank="query" multiplies queries with, made of the means of each unit's groups of keys (unit_clusters.cu).
//
//   block_keys [batch * kv_heads, 1 + blocks, kHeadDim], in the input's dtype: the centre, which is the mean of the first
//              units' means; then of each kBlockUnits neighbouring whole units the mean of their means
//   deviations [batch * kv_heads, kSampledOfBlock * blocks, kHeadDim]: half of what each block's sampled keys differ from its
//              mean by
//   unit_rows  [batch * kv_heads, tiles, bytes of a tile]: cluster_keys less the centre in 8 bits, in the order in which they
//              are multiplied (unit_tile.cuh)
//   row_shares [batch * kv_heads, tiles, 64]: cluster_shares in that order
//
// unit_rows, for query_weights_sm90.cu, has e4m3 of rows times a power of two, of every four elements (Spread) the two
// largest, and which these are:
//   key_exponents [batch * kv_heads]: that power of two
//
// unit_rows_int8, for query_weights_int8.cu, has integers, which know no NaN; of a row that is not finite the share is NaN:
//   unit_scales [batch * kv_heads, runs * kSuperUnits]: what a step of the elements of each unit is
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
  const uint16* sampled_keys;    // [batch * kv_heads, kSampledOfBlock * blocks, kHeadDim]
  uint16* deviations;            // like sampled_keys
  uint32* unit_rows;             // [batch * kv_heads, tiles, bytes of a tile / 4]: four bytes each; null: not wanted
  uint16* row_shares;            // [batch * kv_heads, tiles, 64]
  int* key_exponents;            // [batch * kv_heads], of unit_rows alone
  float* unit_scales;            // [batch * kv_heads, runs * kSuperUnits], of unit_rows_int8 alone
  Geometry geometry;
  int kv_heads;
  int leading;              // units that the centre is the mean of
  int runs;                 // of kSuperUnits units, that cover a KV head's
  int parts;                // blocks of a run: 1, 2, 4, ...
  Pages pages;              // of a paged cache
};

template <class Element, int kHeadDim, bool kPaged_, int kClusters_>
struct UnitRowsTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kPaged = kPaged_, kIntegers = false;
  static constexpr int kClusters = kClusters_;
  using Row = UnitRow<kClusters>;  // where rows stand, and their shares
  using Tile = KeyTile<kHeadDim == 64 ? 64 : 128>;
  static __device__ __forceinline__ int share_at(int row) { return row; }
};
template <class Traits>
struct IntegerRowsTraits : Traits {
  static constexpr bool kIntegers = true;
  using Row = ThreadUnits<Traits::kClusters>;
  using Tile = IntegerTile<Traits::kHeadDim>;
  static __device__ __forceinline__ int share_at(int row) { return row % 8 * 8 + row / 8; }  // of a lane side by side
};

constexpr float kShortest = 0x1p-60f;  // squared length of what counts as a key that is not zero

// A thread has so many rows, or pairs of elements of means, on their way at once: each takes long to come.
constexpr int kRowsAhead = 4, kMeansAhead = 32;

// Block: a part of kSuperUnits neighbouring units of a KV head. A row is that of a few neighbouring threads, eight elements
// each; of a mean a thread has two. Each sum is one thread's, in order: the same bits whatever the parts.
template <class Traits>
__device__ __forceinline__ void unit_rows(const UnitRowsParams& p) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kHeadDim = Traits::kHeadDim, kClusters = Traits::kClusters;
  constexpr bool kIntegers = Traits::kIntegers;
  using Columns = Spread<kHeadDim>;
  const Geometry& g = p.geometry;
  const int run = blockIdx.x / p.parts, part = blockIdx.x % p.parts, kv_head = run / p.runs;
  const int first = run % p.runs * kSuperUnits, units = g.units();
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const int64 of_head = static_cast<int64>(kv_head) * units;
  const bool each_key = p.cluster_keys == nullptr;  // whose rows start on 16 bytes then
  const int batch = kv_head / p.kv_heads;
  const uint16* keys = head_rows<Traits::kPaged>(p.k, batch, kv_head % p.kv_heads);
  const int dims = each_key ? g.head_dim : kHeadDim;
  const auto load = [&](int row) {  // of a group, or a key
    const uint16* from = p.cluster_keys + (of_head * kClusters + row) * kHeadDim;
    if (each_key) {
      if constexpr (Traits::kPaged) {
        from = keys + PagedRows{p.k, p.pages, batch, 0}.offset(row);
      } else {
        from = keys + row * p.k.row;
      }
    }
    if constexpr (kIntegers) {
      return load_16_or_zeros(from + lane * 8, lane * 8 < dims);
    } else {
      return Columns::load(from, lane, dims);
    }
  };
  const auto unpack = [](float (&x)[8], const uint4& row) {  // as they are multiplied
    if constexpr (kIntegers) {
      unpack_row<Traits>(x, row);
    } else {
      Columns::template unpack<Element>(x, row);
    }
  };
  const auto load_rows = [&](uint4 (&rows)[kRowsAhead], int row, int last) {  // past the last that one
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) rows[i] = load(min(row + i * Traits::kRows, last));
  };
  // Of more than 128 dimensions there is no kernel that reads floats.
  const bool has_rows = (kHeadDim <= 128 || kIntegers) && p.unit_rows != nullptr;
  const int last_leading = kClusters * p.leading - 1;
  uint4 rows[kRowsAhead];
  if (has_rows && !kIntegers) load_rows(rows, slot, last_leading);  // on their way while the centre is found

  // Threads that have a row's elements find the centre, others meanwhile means of the blocks that begin here.
  constexpr int kPairs = kHeadDim / 2, kMeans = kSuperUnits / kBlockUnits;
  __shared__ uint32 centre_row[kPairs];
#pragma unroll 1
  for (int i = threadIdx.x / kPairs; i <= kMeans; i += kRankThreads / kPairs) {
    const bool is_centre = i == 0;
    const int number = part + (i - 1) * p.parts, block = first / kBlockUnits + number;  // a mean is one part's
    if (!is_centre && (number >= kMeans || (block + 1) * kBlockUnits > units)) break;
    const int pair = threadIdx.x % kPairs, count = is_centre ? p.leading : kBlockUnits;
    const float factor = is_centre ? 1.f : 1.f / kBlockUnits, share = is_centre ? 1.f / p.leading : 1.f;
    const uint16* from = p.unit_means + (of_head + (is_centre ? 0 : block * kBlockUnits)) * kHeadDim + pair * 2;
    float low = 0.f, high = 0.f;
#pragma unroll 1
    for (int u = 0; u < count; u += kMeansAhead, from += kMeansAhead * kHeadDim) {
      uint32 pairs[kMeansAhead];
#pragma unroll
      for (int j = 0; j < kMeansAhead; ++j) pairs[j] = load_4_or_zeros(from + j * kHeadDim, u + j < count);
#pragma unroll
      for (int j = 0; j < kMeansAhead; ++j) {
        low += Element::low(pairs[j]) * factor;
        high += Element::high(pairs[j]) * factor;
      }
    }
    const uint32 mean = Element::pack(low * share, high * share);
    const int row = is_centre ? 0 : 1 + block;
    uint16* to = p.block_keys + (static_cast<int64>(kv_head) * (1 + units / kBlockUnits) + row) * kHeadDim + pair * 2;
    if (!is_centre || (first == 0 && part == 0)) *reinterpret_cast<uint32*>(to) = mean;
    if (is_centre) {
      centre_row[pair] = mean;
    } else {
      const int64 of_head_block = static_cast<int64>(kv_head) * (units / kBlockUnits) + block;
      const int64 of_samples = of_head_block * spec::kSampledOfBlock * kHeadDim + pair * 2;
      const uint16* sampled = p.sampled_keys + of_samples;
      uint32 keys[spec::kSampledOfBlock];
#pragma unroll
      for (int j = 0; j < spec::kSampledOfBlock; ++j) keys[j] = *reinterpret_cast<const uint32*>(sampled + j * kHeadDim);
#pragma unroll
      for (int j = 0; j < spec::kSampledOfBlock; ++j)  // half, as a difference of two float16 may be more than float16 holds
        *reinterpret_cast<uint32*>(p.deviations + of_samples + j * kHeadDim) =
            Element::pack((Element::low(keys[j]) - low) * .5f, (Element::high(keys[j]) - high) * .5f);
    }
  }
  if (!has_rows) return;
  __syncthreads();
  float centre[8];
  const auto of_centre_row = [&](int i) { return centre_row[kIntegers ? lane * 4 + i : Columns::pair(lane, i)]; };
  unpack(centre, make_uint4(of_centre_row(0), of_centre_row(1), of_centre_row(2), of_centre_row(3)));

  // This part's rows of the run.
  const int part_rows = kClusters * kSuperUnits / p.parts, begin = part * part_rows, last = units * kClusters - 1;
  const int of_run = first * kClusters;
  constexpr int kAtOnce = kRowsAhead * Traits::kRows;
  float factor = 1.f;
  if constexpr (kIntegers) {
    load_rows(rows, of_run + begin + slot, last);
  } else {
    // The longest of the first rows says how all are scaled, or a part of the centre where that is longer.
    // A slot finds that of every kRows-th row.
    float longest = 0.f;
#pragma unroll 1
    for (int first_row = 0; first_row <= last_leading; first_row += kAtOnce) {
      if (first_row > 0) load_rows(rows, first_row + slot, last_leading);
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        float x[8], length = 0.f;
        unpack(x, rows[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) length = fmaf(x[e] - centre[e], x[e] - centre[e], length);
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) length += __shfl_xor_sync(kFullWarp, length, step);
        if (length < infinity()) longest = fmaxf(longest, length);
      }
    }
    // The part's first rows come while slots compare what they have found.
    load_rows(rows, of_run + begin + slot, last);
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
    // Zeros say nothing of the others, which are then scaled as keys of a length of 1 are.
    const int exponent = kKeyExponent - (longest < kShortest ? 0 : half_exponent(longest));
    if (first == 0 && part == 0 && threadIdx.x == 0) p.key_exponents[kv_head] = exponent;
    factor = power_of_two(exponent);
  }
  using Row = typename Traits::Row;
  constexpr uint16 kShareOfKey = kClusters == 2 ? 0xbc00 : kClusters == 4 ? 0xc000 : 0xc200;  // -1, -2 and -3
  constexpr uint16 kShareOfNone = 0xfc00, kShareOfNan = 0x7fff;
  const int64 first_tile = static_cast<int64>(run) * (2 * kClusters);
  using Tile = typename Traits::Tile;
  unsigned char* tiles = reinterpret_cast<unsigned char*>(p.unit_rows) + first_tile * Tile::kBytes;
  uint16* shares = p.row_shares + first_tile * kTileRows;
  const auto share_of = [&](uint32 r) -> uint16 {  // row number r of the run
    if (first + static_cast<int>(r / kClusters) >= units) return kShareOfNone;
    return each_key ? kShareOfKey : p.cluster_shares[of_head * kClusters + of_run + r];
  };
  // Writes what becomes of this thread's row number `r` of the run, whose elements are `row`.
  const auto store_row = [&](uint32 r, const uint4& row, uint16 share) {
    const Row at(r / kClusters, r % kClusters);
    unsigned char* tile = tiles + at.tile * Tile::kBytes;
    float x[8] = {};
    if (share != kShareOfNone) {
      unpack(x, row);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] = kIntegers ? x[e] - centre[e] : (x[e] - centre[e]) * factor;
    }
    if constexpr (kIntegers) {
      uint32* to = reinterpret_cast<uint32*>(tile + Tile::at(at.row, lane));
      to[0] = pack_int8(x[0], x[1], x[2], x[3], factor);
      to[2] = pack_int8(x[4], x[5], x[6], x[7], factor);
    } else {
      float kept[4];
      uint32 choice[2];
      keep_two({x[0], x[1], x[2], x[3]}, kept[0], kept[1], choice[0]);
      keep_two({x[4], x[5], x[6], x[7]}, kept[2], kept[3], choice[1]);
      uint32 choices = (choice[0] | choice[1] << 4) << lane % 4 * 8;
      choices |= __shfl_xor_sync(kFullWarp, choices, 1);
      choices |= __shfl_xor_sync(kFullWarp, choices, 2);
      *reinterpret_cast<uint32*>(tile + Tile::kept_at(at.row, lane)) = pack_e4m3(kept[0], kept[1], kept[2], kept[3]);
      if (lane % 4 == 0) *reinterpret_cast<uint32*>(tile + Tile::choices_at(at.row, lane)) = choices;
    }
    if (lane == 0) shares[at.tile * kTileRows + Traits::share_at(at.row)] = share;
  };
  __shared__ float largest[2][kIntegers ? kAtOnce : 1];  // element of each row of a turn; of every other turn
  int turn = 0;
#pragma unroll 1
  for (int r = begin + slot; r < begin + part_rows; r += kAtOnce, turn ^= 1) {
    if constexpr (kIntegers) {
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        float x[8], size = 0.f;
        unpack(x, rows[i]);
#pragma unroll
        for (int e = 0; e < 8; ++e) size = max_or_nan(size, fabsf(x[e] - centre[e]));
#pragma unroll
        for (int step = kLanes / 2; step > 0; step /= 2) size = max_or_nan(size, __shfl_xor_sync(kFullWarp, size, step));
        if (share_of(r + i * Traits::kRows) == kShareOfNone) size = 0.f;
        if (lane == 0) largest[turn][i * Traits::kRows + slot] = size;
      }
      __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < kRowsAhead; ++i) {
      const int at = r + i * Traits::kRows;
      const uint4 row = rows[i];
      if (r + kAtOnce < begin + part_rows) rows[i] = load(min(of_run + at + kAtOnce, last));
      uint16 share = share_of(at);
      if constexpr (kIntegers) {
        const float* of_turn = largest[turn] + i * Traits::kRows + slot;
        float of_unit = 0.f;  // of rows that are finite
#pragma unroll
        for (int c = 0; c < kClusters; ++c) {
          const float of_row = of_turn[c - at % kClusters];
          of_unit = fmaxf(of_unit, of_row < infinity() ? of_row : 0.f);
        }
        if (!(*of_turn < infinity())) share = kShareOfNan;
        const float step = step_of_int8<kHeadDim>(of_unit);
        factor = __frcp_rn(step);
        if (lane == 0 && at % kClusters == 0)
          p.unit_scales[static_cast<int64>(run) * kSuperUnits + at / kClusters] = step;
      }
      store_row(at, row, share);
    }
  }
}

// The same with rows of integers.
template <class Traits>
__device__ __forceinline__ void unit_rows_int8(const UnitRowsParams& p) {
  unit_rows<IntegerRowsTraits<Traits>>(p);
}

}  // namespace s2o
