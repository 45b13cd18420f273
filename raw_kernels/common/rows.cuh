// Which queries the rows of a q tile are: rows(r) is the position of row r, or -1. Where rows.has(r) is false,
// rows.nearest(r) is the position of a row that is there, so that it can be loaded without a condition.
#pragma once
#include "common/attention_params.cuh"

namespace s2o {

// Pass 1: row r is query first + r.
template <int kBlockM>
struct ConsecutiveRows : QueryTile {
  static constexpr bool kOrdered = false;
  static constexpr bool kResumed = true;     // pass 2 may follow
  static constexpr bool kMayBeEmpty = true;  // a tile may have no row
  int first, count;
  __device__ __forceinline__ ConsecutiveRows(const AttentionParams& p, uint32 q_tile)
      : QueryTile(query_tile<false>(p.chunk, p.tiles, q_tile)),
        first(p.geometry.query_begin(segment) + tile * kBlockM),
        count(min(kBlockM, p.geometry.query_count(segment) - tile * kBlockM)) {}
  __device__ __forceinline__ int operator()(int r) const { return r < count ? first + r : -1; }
  __device__ __forceinline__ bool has(int r) const { return r < count; }
  __device__ __forceinline__ int nearest(int r) const { return first + min(r, count - 1); }
  __device__ __forceinline__ int first_query() const { return first; }
  __device__ __forceinline__ int visited_index(const AttentionParams&) const { return 0; }
  __device__ __forceinline__ int first_key(const Geometry& g) const { return g.dense_begin(segment); }
  __device__ __forceinline__ int sequence_keys(const Geometry& g) const { return g.seqlen_k; }

  // Row r sees the first `limit + r` (causal) or `limit` keys from first_key on; the tile reads `keys` of them.
  __device__ __forceinline__ int limit(const Geometry& g) const {
    return g.is_causal ? first + g.offset() - g.dense_begin(segment) + 1
                       : g.dense_end(segment) - g.dense_begin(segment);
  }
  __device__ __forceinline__ int keys(const Geometry& g) const {
    return g.is_causal ? limit(g) + count - 1 : limit(g);
  }
  // Where there are no keys one tile is read, of which no row sees a key.
  template <int kBlockN>
  __device__ __forceinline__ int key_tiles(const Geometry& g) const {
    return max(1, (keys(g) + kBlockN - 1) / kBlockN);
  }
};

// Pass 1 of packed sequences: row r is query first + r of all, and sees keys of its own sequence alone, which lie among
// those of all or (kPaged) in pages.
template <int kBlockM, bool kPaged>
struct PackedRows : QueryTile {
  static constexpr bool kOrdered = false, kResumed = false, kMayBeEmpty = false;
  int first, count;
  int begin_k, seqlen_k, causal_limit;
  __device__ __forceinline__ PackedRows(const PackedAttentionParams& p, uint32 q_tile)
      : PackedRows(p, p.sequence(static_cast<int>(q_tile)), q_tile) {}
  __device__ __forceinline__ PackedRows(const PackedAttentionParams& p, int n, uint32 q_tile)
      : PackedRows(p, p.of[n], q_tile - p.first_q_tile[n]) {}
  __device__ __forceinline__ PackedRows(const PackedAttentionParams& p, const PackedSequence& sequence, uint32 q_tile)
      : QueryTile(query_tile<false>({0, p.heads, 0, 1, 0, sequence.near_heads},
                                    (sequence.seqlen_q + kBlockM - 1) / kBlockM, q_tile)),
        first(sequence.begin_q + tile * kBlockM),
        count(min(kBlockM, sequence.seqlen_q - tile * kBlockM)),
        begin_k(sequence.begin_k),
        seqlen_k(sequence.seqlen_k),
        causal_limit(tile * kBlockM + sequence.seqlen_k - sequence.seqlen_q + 1) {}
  __device__ __forceinline__ int operator()(int r) const { return r < count ? first + r : -1; }
  __device__ __forceinline__ bool has(int r) const { return r < count; }
  __device__ __forceinline__ int nearest(int r) const { return first + min(r, count - 1); }
  __device__ __forceinline__ int first_query() const { return first; }
  __device__ __forceinline__ int visited_index(const AttentionParams&) const { return 0; }
  __device__ __forceinline__ int first_key(const Geometry&) const { return kPaged ? 0 : begin_k; }
  __device__ __forceinline__ int table_row(int) const { return begin_k; }
  __device__ __forceinline__ int sequence_keys(const Geometry&) const { return seqlen_k; }

  // As in ConsecutiveRows.
  __device__ __forceinline__ int limit(const Geometry& g) const { return g.is_causal ? causal_limit : seqlen_k; }
  __device__ __forceinline__ int keys(const Geometry& g) const {
    return g.is_causal ? causal_limit + count - 1 : seqlen_k;
  }
  template <int kBlockN>
  __device__ __forceinline__ int key_tiles(const Geometry& g) const {
    return max(1, (keys(g) + kBlockN - 1) / kBlockN);
  }
};

// After how many stop checks in a row, at which all rows gained too little, a tile of `keys` stops although its least keys
// have not been visited. `of_check`: keys between two checks.
__device__ __forceinline__ int patience(int keys, int of_check) {
  const int least = spec::kPatience + spec::kNearKeys / of_check;  // the first may be near keys, heavy or not
  return max(least, keys / (spec::kPatienceParts * of_check));
}

// What q tiles of pass 2 have in common: their rows visit a list of keys in its order.
struct VisitingRows : QueryTile {
  static constexpr bool kOrdered = true, kMayBeEmpty = true;
  static constexpr int kHeads = 1;  // query heads of a q tile
  static __device__ __forceinline__ int of_head(int r) { return r; }  // which of its head's rows row r is
  __device__ __forceinline__ explicit VisitingRows(const QueryTile& q_tile) : QueryTile(q_tile) {}
  __device__ __forceinline__ int64 order_row(const AttentionParams& p) const {
    return static_cast<int64>(head) * p.geometry.segments() + segment;
  }
  // Where in `visited` the number of key tiles of block_n goes: fewer than the blocks of a grid, so 32 bits hold it.
  __device__ __forceinline__ int visited_index(const AttentionParams& p) const {
    return static_cast<int>(order_row(p) * p.tiles + tile);
  }
  // Keys that the tile waits for.
  __device__ __forceinline__ int least_keys(const AttentionParams& p) const {
    return p.least_keys ? p.least_keys[order_row(p)] : 0;
  }
  __device__ __forceinline__ int& visited(const AttentionParams& p) const { return p.visited[visited_index(p)]; }
};

// Pass 2: row r is query begin + order[r]. Where a segment is one q tile there is no order, and queries stand as they lie.
template <int kBlockM>
struct OrderedRows : VisitingRows {
  const int* order;
  int begin, count;
  bool ordered;
  __device__ __forceinline__ OrderedRows(const AttentionParams& p, uint32 q_tile)
      : VisitingRows(query_tile<true>(p.chunk, p.tiles, q_tile)),
        order(p.q_order + order_row(p) * p.geometry.segment + tile * kBlockM),
        begin(p.geometry.query_begin(segment)),
        count(min(kBlockM, p.geometry.query_count(segment) - tile * kBlockM)),
        ordered(p.q_order != nullptr) {}
  // The query of a row is `begin` more than this; `order`: the tile's.
  static __device__ __forceinline__ int query(const Geometry&, const int* order, int r) { return order ? order[r] : r; }
  __device__ __forceinline__ const int* tile_order() const { return ordered ? order : nullptr; }
  __device__ __forceinline__ int operator()(int r) const { return r < count ? begin + (ordered ? order[r] : r) : -1; }
  __device__ __forceinline__ bool has(int r) const { return r < count; }
  __device__ __forceinline__ int nearest(int r) const {
    r = min(r, count - 1);
    return begin + (ordered ? order[r] : r);
  }
  __device__ __forceinline__ int first_query() const { return begin; }

  // Every row sees every candidate.
  __device__ __forceinline__ int limit(const Geometry& g) const { return g.candidates(segment); }
  __device__ __forceinline__ int keys(const Geometry& g) const { return g.candidates(segment); }
  template <int kBlockN>
  __device__ __forceinline__ int key_tiles(const Geometry& g) const {
    return (keys(g) + kBlockN - 1) / kBlockN;
  }
  static constexpr bool kListed = false;
  static __device__ __forceinline__ constexpr bool resumes(const AttentionParams&) { return true; }
  // Whether anything is to be written: pass 1 has written the rows of a tile without candidates.
  __device__ __forceinline__ bool has_work(const AttentionParams& p) const { return keys(p.geometry) > 0; }

  // Units of the candidates, most important first.
  __device__ __forceinline__ const int* key_order(const AttentionParams& p) const {
    return p.k_order + p.chunk.place(head, segment);
  }
  // The unit of key number i; `order`: what key_order gave.
  static __device__ __forceinline__ int unit(const AttentionParams& p, const int* order, int i) {
    asm volatile("" : "+r"(i));  // or what follows from a lane's first keys takes registers through all q tiles
    return order[i >> p.geometry.unit_shift];
  }
  // Key number i, of which that is the unit; negative if it is -1.
  static __device__ __forceinline__ int key(const AttentionParams& p, int unit, int i) {
    return (unit << p.geometry.unit_shift) + (i & p.geometry.unit_mask());
  }
};

}  // namespace s2o
