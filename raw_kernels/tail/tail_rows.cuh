// The rows of a q tile and of its samples, and outputs, as add_tail.cu has them.
#pragma once
#include "common/keep_finite.cuh"
#include "common/rows.cuh"
#include "tail/tail_places.cuh"

namespace s2o {

constexpr int kTailSlice = 32;           // samples, or dimensions of values, at a time
constexpr int kTailQueries = 128;        // of a block
static_assert(kTailSlice == spec::kTailEvidence, "the first slice says how far samples are to be believed");
constexpr float kLargestFactor = 1e38f;  // of a product

struct AddTailParams {
  Tensor<const uint16> q;    // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;    // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  Tensor<const uint16> v;    // like k
  Tensor<uint16> out;        // like q
  float* lse;                // [batch * heads, seqlen_q]
  const int* q_order;        // [batch * heads, segments, segment]; null where a segment is one q tile
  const int* k_order;        // rows of the chunk (Chunk::place): units of keys
  const int* visited;        // [batch * heads, segments, tiles]
  const float* mean_values;  // [batch * kv_heads, groups, kHeadDim]
  const uint16* covariances; // [batch * kv_heads, groups, kHeadDim, kHeadDim], bfloat16
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int tiles;                 // q tiles of a full segment
  int groups, first_group;
  int block_m, block_n;      // queries of a q tile, up to 128, and keys of a visited tile
  float scale;               // of scores, with its sign
  float softcap;             // of scores; not read without spec::kSoftcap
  Pages pages;               // of a paged cache
};

// What a block has to do, worked out by one warp: a dozen integer divisions.
struct TailWork {
  const int *q_order, *k_order;  // of its queries, of the candidates from the first unvisited one's unit on
  const uint16 *q, *k, *v;       // of its head
  uint16* out;
  float* lse;
  const float* mean_value;       // [kHeadDim]
  const uint16* covariance;      // [kHeadDim, kHeadDim]
  int count, begin;              // queries of the tile, and the segment's first
  int left, visited, batch;      // candidates that it has not visited, and those that it has
};

// Of a block's shared memory, beside what it multiplies.
template <int kHeadDim>
struct TailRowsShared {
  const uint16* samples[kTailSamples];  // their rows of keys, those of the second half behind the first's
  const uint16* values[kTailSamples];   // and of values
  const uint16* queries[kTailQueries];  // rows of queries; null where there is none
  uint16* outputs[kTailQueries];        // of queries
  float* lse[kTailQueries];
  float mean_values[kHeadDim];
  TailWork work;
};

// The row of shared memory for row d of a covariance: so columns 2 t and 2 t + 1 of four products of 8 columns are
// dimensions 8 t .. 8 t + 7 of 32.
__device__ __forceinline__ constexpr int covariance_place(int d) { return (d & ~30) | (d & 6) << 2 | (d >> 2 & 6); }

// A thread has parts of rows lane / 4 and 8 more of its warp's 16. Of kTailSlice products with each a kernel gives
// number 8 j + lane % 4 * 2 + e as product(j, h, e).
template <class Traits>
struct TailRows {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kTiles = kTailSlice / 8;

  const AddTailParams& p;
  TailRowsShared<kHeadDim>& at;
  const int lane;
  float added[2];            // share of what is new
  uint16* out[2];            // from this thread's first dimension on that is still to do

  __device__ __forceinline__ TailRows(const AddTailParams& p_, TailRowsShared<kHeadDim>& at_)
      : p(p_), at(at_), lane(threadIdx.x % 32) {}

  // By one warp.
  __device__ __forceinline__ void describe() const {
    const Geometry& g = p.geometry;
    const QueryTile tile = query_tile<true>(p.chunk, p.tiles, blockIdx.x);
    const int batch = tile.batch(p.heads), head = tile.head_in_batch(p.heads);
    const int kv_head = tile.kv_head(p.heads, p.kv_heads);
    const int count = min(p.block_m, g.query_count(tile.segment) - tile.tile * p.block_m);
    const int64 order_row = static_cast<int64>(tile.head) * g.segments() + tile.segment;
    const int visited = count <= 0 ? 0 : p.visited[order_row * p.tiles + tile.tile] * p.block_n;
    const int64 moments = moments_of(p, tile);
    TailWork& work = at.work;
    if (lane != 0) return;
    work.q_order = p.q_order ? p.q_order + order_row * g.segment + tile.tile * p.block_m : nullptr;
    work.k_order = p.k_order + p.chunk.place(tile.head, tile.segment);
    work.q = p.q.at(batch, head);
    work.k = head_rows<Traits::kPaged>(p.k, batch, kv_head);
    work.v = head_rows<Traits::kPaged>(p.v, batch, kv_head);
    work.out = p.out.at(batch, head);
    work.lse = p.lse + static_cast<int64>(tile.head) * g.seqlen_q;
    work.mean_value = p.mean_values + moments * kHeadDim;
    work.covariance = p.covariances + moments * (kHeadDim * kHeadDim);
    work.count = count;
    work.begin = g.query_begin(tile.segment);
    work.left = count <= 0 ? 0 : g.candidates(tile.segment) - visited;
    work.visited = visited;
    work.batch = batch;
  }

  // A sample a thread, of even number first; half of the block finds queries too. Where there are fewer samples they come
  // again, and count for nothing then.
  __device__ __forceinline__ void find_rows() const {
    const TailWork& work = at.work;
    const int i = threadIdx.x;
    if (i < kTailQueries) {
      const bool present = i < work.count;
      const int position = present ? work.begin + (work.q_order ? work.q_order[i] : i) : 0;
      at.queries[i] = present ? work.q + position * p.q.row : nullptr;
      at.outputs[i] = work.out + position * p.out.row;
      at.lse[i] = work.lse + position;
    }
    const Geometry& g = p.geometry;
    const int samples = tail_samples(work.left), number = i % kTailHalf % (samples / 2) * 2 + i / kTailHalf;
    const int candidate = work.visited + sample_place(number, samples, work.left);
    const int key = (work.k_order[candidate >> g.unit_shift] << g.unit_shift) + (candidate & g.unit_mask());
    if constexpr (Traits::kPaged) {
      at.samples[i] = work.k + PagedRows{p.k, p.pages, work.batch, 0}.offset(key);
      at.values[i] = work.v + PagedRows{p.v, p.pages, work.batch, 0}.offset(key);
    } else {
      at.samples[i] = work.k + key * p.k.row;
      at.values[i] = work.v + key * p.v.row;
    }
  }

  // The first of this thread's rows of the tile; the other is 8 more.
  static __device__ __forceinline__ int row_of_tile() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

  __device__ __forceinline__ void load_mean() const {
    if (threadIdx.x < kHeadDim / 4)
      cp_async_16(shared_address(at.mean_values + threadIdx.x * 4), at.work.mean_value + threadIdx.x * 4);
    cp_async_commit();  // of its own: unaligned samples are no copies that the wait could wait for
  }
  // In units of log2.
  __device__ __forceinline__ void load_lse(float (&lse)[2]) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = row_of_tile() + 8 * h;
      lse[h] = row < at.work.count ? *at.lse[row] * kLog2E : infinity();
    }
  }
  // Rows of the output are needed when all else is done. By then they should be in L2.
  __device__ __forceinline__ void prefetch_outputs() const {
    const int i = threadIdx.x / 2, end = i < at.work.count ? p.geometry.head_dim : 0;
    const uint16* out = at.outputs[i];
#pragma unroll
    for (int j = 0; j < kHeadDim; j += 32) {
      const int d = j + threadIdx.x % 2 * 16;  // 32 bytes
      if (d < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(out + d));
    }
  }

  __device__ __forceinline__ TailScores scores() const {
    if constexpr (!spec::kSoftcap) return {p.scale * kLog2E, 1.f};
    return {p.softcap * kLog2E, fminf(fmaxf(p.scale / p.softcap, -kLargestFactor), kLargestFactor)};
  }

  // From here on outputs change.
  __device__ __forceinline__ void begin_outputs(const float (&mass)[2]) {
    const int row = row_of_tile();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      added[h] = __fdividef(mass[h], 1.f + mass[h]);
      out[h] = at.outputs[row + 8 * h] + lane % 4 * 8;
      asm volatile("" : "+l"(out[h]));  // one address, not the terms of a sum
      if (mass[h] > 0.f && lane % 4 == 0) *at.lse[row + 8 * h] += log1pf(mass[h]);
    }
  }
  // From the first of this thread's dimensions in those from d on.
  __device__ __forceinline__ int dims_from(int d) const { return p.geometry.head_dim - d - lane % 4 * 8; }
  // Both rows are on their way before they are needed.
  __device__ __forceinline__ void load_outputs(uint4 (&before)[2], int d) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) before[h] = load_output(out[h], added[h] > 0.f ? dims_from(d) : 0);
  }
  // Dimensions of the next kTailSlice, in the order of covariance_place: value(j, h, e) is what is added.
  template <class Value>
  __device__ __forceinline__ void add_to_outputs(int d, const uint4 (&before)[2], const Value& value) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (added[h] > 0.f) {
        const float kept = 1.f - added[h];
        const uint32 pairs[4] = {before[h].x, before[h].y, before[h].z, before[h].w};
        uint32 sums[4];
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          // What is finite stays so, though a value to first order may be larger than any that it stands for.
          sums[j] = pack_finite<Element>(Element::low(pairs[j]) * kept + added[h] * value(j, h, 0),
                                         Element::high(pairs[j]) * kept + added[h] * value(j, h, 1));
        store_output(out[h], dims_from(d), sums);
      }
      out[h] += kTailSlice;
    }
  }
  // Covariances are bfloat16, and queries that they are multiplied with.
  static __device__ __forceinline__ uint32 as_bfloat16(uint32 pair) {
    return Element::kWide ? pair : Bfloat16::pack(Element::low(pair), Element::high(pair));
  }
  // Up to 8 elements of a row of the output, as many as there are.
  static __device__ __forceinline__ uint4 load_output(const uint16* row, int dims) {
    if constexpr (Traits::kAligned) return load_16_or_zeros(row, dims > 0);
    return load_unaligned(row, 0, dims);
  }
  static __device__ __forceinline__ void store_output(uint16* row, int dims, const uint32 (&pairs)[4]) {
    if constexpr (Traits::kAligned) {  // head_dim is then a multiple of 8
      if (dims > 0) store_global_16(row, pairs[0], pairs[1], pairs[2], pairs[3]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (i < dims) row[i] = static_cast<uint16>(pairs[i / 2] >> i % 2 * 16);
    }
  }
};

}  // namespace s2o
