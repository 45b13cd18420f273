// Which keys a segment reads, and which q tile a block owns. The same formulas as s2o_cupy/spec: Geometry.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

struct Geometry {
  int seqlen_q, seqlen_k, segment, window, is_causal;
  int head_dim;
  int unit_shift;  // candidates come in units of 1 << unit_shift neighbours from key 0 on
  int drawn;  // above 0, with spec::kDrawn: only so many segments are attended, one from each run of neighbours
  int least_run, longer_runs;  // segments of a run at least; the first runs have one more

  __device__ __forceinline__ int offset() const { return seqlen_k - seqlen_q; }
  __device__ __forceinline__ int all_segments() const { return (seqlen_q + segment - 1) / segment; }
  __device__ __forceinline__ bool draws() const { return spec::kDrawn && drawn > 0; }
  __device__ __forceinline__ int segments() const { return draws() ? drawn : all_segments(); }
  // Which of all segments number n is.
  __device__ __forceinline__ int place(int n) const {
    if (!draws()) return n;
    const uint32 part = static_cast<uint32>(n) * spec::kDrawStep + 0x80000000u;
    return n * least_run + min(n, longer_runs) + __umulhi(part, least_run + (n < longer_runs));
  }
  __device__ __forceinline__ int query_begin(int n) const { return place(n) * segment; }
  __device__ __forceinline__ int query_count(int n) const { return min(segment, seqlen_q - query_begin(n)); }
  __device__ __forceinline__ int clip(int key) const { return min(max(key, 0), seqlen_k); }
  __device__ __forceinline__ int unit_mask() const { return (1 << unit_shift) - 1; }
  __device__ __forceinline__ int units() const { return seqlen_k >> unit_shift; }  // whole ones
  __device__ __forceinline__ int dense_begin(int n) const {
    return clip(query_begin(n) + offset() - window) & ~unit_mask();
  }
  __device__ __forceinline__ int dense_end(int n) const {
    const int end = clip(query_begin(n) + query_count(n) + offset());
    return is_causal ? end : clip(end + unit_mask() & ~unit_mask());
  }
  __device__ __forceinline__ int candidates(int n) const {
    return is_causal ? dense_begin(n) : seqlen_k - (dense_end(n) - dense_begin(n));
  }
  // Whole units among them: these are put in order. A short one comes last.
  __device__ __forceinline__ int ranked(int n) const { return candidates(n) >> unit_shift; }
  __device__ __forceinline__ int guide_keys(int n) const {
    return max(0, min(segment, is_causal ? query_begin(n) + offset() : seqlen_k));
  }
};

// The part of the work that one launch covers: `heads` flattened (batch, head) pairs from `first_head`,
// `segments` segments from `first_segment`.
struct Chunk {
  int first_head, heads;
  int first_segment, segments;
  int shared_heads;  // consecutive heads that read one KV head and divide `heads`
  int near_heads;    // consecutive heads whose keys L2 holds at once; divides `heads`
  int64 stride;      // elements of the first segment's row of scores or of a key order
  int64 growth;      // how many more each further segment's has; multiples of 64, of larger units of 8

  // Row of a (head, segment) pair among the chunk's.
  __device__ __forceinline__ int64 row(int head, int n) const {
    return static_cast<int64>(head - first_head) * segments + (n - first_segment);
  }
  // Elements of a head's rows before its segment first_segment + i.
  __device__ __forceinline__ int64 before(int64 i) const { return i * stride + i * (i - 1) / 2 * growth; }
  // Where a pair's row begins.
  __device__ __forceinline__ int64 place(int head, int n) const {
    return (head - first_head) * before(segments) + before(n - first_segment);
  }
  __device__ __forceinline__ int64 longest_row() const { return stride + (segments - 1) * growth; }
};

struct QueryTile {
  int head;     // flattened batch * heads + head
  int segment;
  int tile;     // of the segment
  __device__ __forceinline__ int batch(int heads) const { return head / heads; }
  __device__ __forceinline__ int head_in_batch(int heads) const { return head % heads; }
  __device__ __forceinline__ int kv_head(int heads, int kv_heads) const {
    return head % heads / (heads / kv_heads);
  }
  // The row of the page table that its sequence has, where keys lie in pages.
  __device__ __forceinline__ int table_row(int heads) const { return batch(heads); }
};

// blockIdx.x, read anew each time: what a block derives from it need not stay in registers through its main loop.
__device__ __forceinline__ uint32 block_index() {
  uint32 x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}

// Longest tiles first, and neighbouring blocks share keys in L2: the tiles of a segment from the last, and near heads;
// then segments from the longest prefix to the shortest, then other heads. tiles_first: tiles of a segment that walk
// one list of keys go side by side; otherwise heads do, so that the longest tiles of all of them come first.
__device__ __forceinline__ QueryTile query_tile(const Chunk& chunk, int tiles, uint32 block, bool tiles_first) {
  QueryTile t;
  const int inner = tiles_first ? tiles : chunk.near_heads, outer = tiles_first ? chunk.near_heads : tiles;
  const int first = block % inner;
  block /= inner;
  const int second = block % outer;
  block /= outer;
  t.tile = tiles - 1 - (tiles_first ? first : second);
  t.segment = chunk.first_segment + chunk.segments - 1 - static_cast<int>(block % chunk.segments);
  t.head = chunk.first_head + static_cast<int>(block / chunk.segments) * chunk.near_heads +
           (tiles_first ? second : first);
  return t;
}
template <bool kTilesFirst>
__device__ __forceinline__ QueryTile query_tile(const Chunk& chunk, int tiles, uint32 block) {
  return query_tile(chunk, tiles, block, kTilesFirst);
}

// A 4-D array with a contiguous last axis; strides in elements.
template <class T>
struct Tensor {
  T* data;
  int64 batch, head, row;
  __device__ __forceinline__ T* at(int b, int h) const { return data + b * batch + h * head; }
};

}  // namespace s2o
