// Pass 2 with the keys of each q tile given as data: which lists there are, and a q tile's rows and keys by them.
#pragma once
#include "common/rows.cuh"

namespace s2o {

// The keys that q tiles visit, in the order in which they do. A list belongs to a q tile or to all q tiles of a
// segment, and to one query head or to several neighbours. Keys are listed in units of 1 << unit_shift neighbours, of
// which only the last of a list may be short. Nobody checks them: the keys of a list are distinct, and all are before
// seqlen_k.
struct KeyLists {
  const int* entries;   // [any]: the units of all lists; unit e has the keys from e << unit_shift on
  const int64* begins;  // [chunk's list heads, chunk's segments], or [.., .., tiles]: each list's first entry
  const int* keys;      // like begins: how many keys a list has; no entry beyond them is read
  const int* q_order;   // [batch * heads, seqlen_q]: queries in the order in which q tiles take them; null: as they lie
  float2* kept;         // [batch * heads, seqlen_q]: where the state of rows goes that visit keys; null: nowhere
  int unit_shift;       // 0 to 7
  int unit_mask;        // (1 << unit_shift) - 1
  int shared_heads;     // neighbouring query heads that share a list; divides the heads
  int per_tile;         // 1: a list for each q tile
  int table_heads;      // neighbouring query heads that share a row of the page table (kPaged)

  // The key number i of a list, of whose entry that is number `i >> unit_shift`.
  __device__ __forceinline__ int key(int entry, int i) const {
    return (entry << unit_shift) + (i & unit_mask);
  }
};

// Of AttentionParams, q_order and k_order are not read, and state may be null: rows then start without any key, and
// those whose list is empty have an output of 0.
struct ListedAttentionParams : AttentionParams {
  KeyLists lists;
};

// Row r of a q tile is the r-th of its queries in the caller's order. With kHeads = 2 a q tile has the same queries of
// two neighbouring heads, which share the list: row r of the first, and behind kRows of these row r of the second.
template <int kBlockM, int kHeads_ = 1>
struct ListedRows : VisitingRows {
  static constexpr int kHeads = kHeads_, kRows = kBlockM / kHeads;
  const int* order;  // of the tile's rows: query positions; null: they are neighbours
  int begin, count;
  int listed;        // keys of the tile's list
  int table_heads;
  const Geometry& geometry;
  __device__ __forceinline__ ListedRows(const ListedAttentionParams& p, uint32 q_tile)
      : VisitingRows(first_heads_tile(p, q_tile)), geometry(p.geometry) {
    const int first = p.geometry.query_begin(segment) + tile * kRows;
    order = p.lists.q_order ? p.lists.q_order + static_cast<int64>(head) * p.geometry.seqlen_q + first : nullptr;
    begin = order ? 0 : first;
    count = min(kRows, p.geometry.query_count(segment) - tile * kRows);
    listed = p.lists.keys[list(p)];
    table_heads = p.lists.table_heads;
  }
  static __device__ __forceinline__ QueryTile first_heads_tile(const ListedAttentionParams& p, uint32 q_tile) {
    if constexpr (kHeads == 1) {
      return query_tile(p.chunk, p.tiles, q_tile, !p.lists.per_tile);
    } else {
      Chunk of_pairs = p.chunk;
      of_pairs.near_heads /= kHeads;
      QueryTile t = query_tile(of_pairs, p.tiles, q_tile, !p.lists.per_tile);
      t.head += (t.head - of_pairs.first_head) * (kHeads - 1);
      return t;
    }
  }
  // A permutation of keys is a table of pages of one key, and may differ by head.
  __device__ __forceinline__ int table_row(int) const { return head / table_heads; }
  __device__ __forceinline__ int64 list(const ListedAttentionParams& p) const {
    const int64 list_head = (head - p.chunk.first_head) / p.lists.shared_heads;
    const int64 of_segment = list_head * p.chunk.segments + (segment - p.chunk.first_segment);
    return p.lists.per_tile ? of_segment * p.tiles + tile : of_segment;
  }
  static __device__ __forceinline__ int of_head(int r) { return kHeads == 1 ? r : r % kRows; }
  // The query of a row is `begin` more than this; `order`: the tile's, of its first head.
  static __device__ __forceinline__ int query(const Geometry& g, const int* order, int r) {
    if constexpr (kHeads > 1) {
      asm volatile("" : "+r"(r));  // as `unit` does it
      if (order) order += r / kRows * g.seqlen_q;
      r = of_head(r);
    }
    return order ? order[r] : r;
  }
  __device__ __forceinline__ const int* tile_order() const { return order; }
  __device__ __forceinline__ int operator()(int r) const {
    return of_head(r) < count ? begin + query(geometry, order, r) : -1;
  }
  __device__ __forceinline__ bool has(int r) const { return of_head(r) < count; }
  __device__ __forceinline__ int nearest(int r) const {
    return begin + query(geometry, order, r - max(of_head(r) - count + 1, 0));
  }
  __device__ __forceinline__ int first_query() const { return begin; }

  // Every row sees every key of the list.
  __device__ __forceinline__ int limit(const Geometry&) const { return listed; }
  __device__ __forceinline__ int keys(const Geometry&) const { return listed; }
  template <int kBlockN>
  __device__ __forceinline__ int key_tiles(const Geometry&) const {
    return (listed + kBlockN - 1) / kBlockN;
  }
  static constexpr bool kListed = true;  // a tile with work may have no keys
  static __device__ __forceinline__ bool resumes(const ListedAttentionParams& p) { return p.state != nullptr; }
  // Whether anything is to be written: pass 1 has written what a tile without keys resumes.
  __device__ __forceinline__ bool has_work(const ListedAttentionParams& p) const { return listed > 0 || !resumes(p); }

  __device__ __forceinline__ int least_keys(const ListedAttentionParams&) const { return 0; }
  __device__ __forceinline__ const int* key_order(const ListedAttentionParams& p) const {
    return p.lists.entries + p.lists.begins[list(p)];
  }
  // The unit of key number i; `order`: what key_order gave.
  static __device__ __forceinline__ int unit(const ListedAttentionParams& p, const int* order, int i) {
    asm volatile("" : "+r"(i));  // or what follows from a lane's first keys takes registers through all q tiles
    return order[i >> p.lists.unit_shift];
  }
  // Key number i, of which that is the unit; negative if it is -1.
  static __device__ __forceinline__ int key(const ListedAttentionParams& p, int unit, int i) {
    return p.lists.key(unit, i);
  }
};

}  // namespace s2o
