// Adds what candidates weigh that a q tile has not visited, and their values to first order. After pass 2, in place.
//
//   kTailSamples unvisited candidates, denser where they come earlier in the order, give for each query
//     mass  their sum of exp(score), by the share that each stands for, and less of it the fewer of them carry it
//     tilt  how far their mean score moves once they are weighted by it, over the variance of scores: 1 for scores that
//           are spread like a normal distribution, and kept within [0, 1]
//   value = mean_value + tilt * scale * covariance query, the regression of values on scores at the weighted mean score
//   out, lse <- with the mass at that value; as they are where something of it is not finite
//
// A warp has 16 queries and multiplies them with all samples, then with all rows of the covariance, kTailSlice at a time.
// A thread reads 16 bytes of a row at once, of queries and outputs from global and of what they are multiplied with from
// shared memory: it holds dimensions 8 t .. 8 t + 7 of each 32, t = lane % 4. A product takes dimensions in any order,
// if both sides have the same.
#include "common/keep_finite.cuh"
#include "common/rows.cuh"
#include "tail/tail_places.cuh"

namespace s2o {

constexpr int kTailSlice = 32;           // samples, or dimensions of values, at a time
constexpr float kLargestFactor = 1e38f;  // of a product

struct AddTailParams {
  Tensor<const uint16> q;    // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;    // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  Tensor<uint16> out;        // like q
  float* lse;                // [batch * heads, seqlen_q]
  const int* q_order;        // [batch * heads, segments, segment]
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
  const uint16 *q, *k;           // of its head
  uint16* out;
  float* lse;
  const float* mean_value;       // [kHeadDim]
  const uint16* covariance;      // [kHeadDim, kHeadDim]
  int count, begin;              // queries of the tile, and the segment's first
  int left, visited, batch;      // candidates that it has not visited, and those that it has
};

template <class Element_, int kHeadDim_, int kBuffers_, bool kAligned_, bool kPaged_>
struct TailTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256;
  static constexpr int kBuffers = kBuffers_;  // 2: samples and covariances are on their way together
  static constexpr bool kAligned = kAligned_;  // every row of q, k and out starts on 16 bytes
  static constexpr bool kPaged = kPaged_;
  static constexpr int kChunks = kHeadDim / 8;  // 16 bytes each, of a row
  static constexpr int kRows = kHeadDim < kTailSamples ? kHeadDim : kTailSamples;  // of the covariance in a buffer
  static_assert(kBuffers == 1 || kRows == kHeadDim, "one buffer for all of it");
  static_assert(kThreads / 32 * 16 == kTailSamples, "as many queries as samples");
  struct Shared {
    uint16 rows[kBuffers][kTailSamples * kHeadDim];  // samples, and covariances in the last
    const uint16* samples[kTailSamples];             // their rows
    const uint16* queries[kTailSamples];             // likewise; null where there is none
    uint16* outputs[kTailSamples];                   // of queries
    float* lse[kTailSamples];
    float mean_values[kHeadDim];
    TailWork work;
  };
};

// The row of shared memory for row d of a covariance: so columns 2 t and 2 t + 1 of four products of 8 columns are
// dimensions 8 t .. 8 t + 7 of 32.
__device__ __forceinline__ constexpr int covariance_place(int d) { return (d & ~30) | (d & 6) << 2 | (d >> 2 & 6); }

template <class Traits>
struct TailTile {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kChunks = Traits::kChunks, kThreads = Traits::kThreads;
  static constexpr int kBuffers = Traits::kBuffers, kGroups = kHeadDim / 32, kTiles = kTailSlice / 8;
  static constexpr int kRowsAtOnce = kThreads / kChunks;  // that the block copies

  const AddTailParams& p;
  typename Traits::Shared& shared;
  const int lane;
  uint4 q[2][kGroups];  // of rows lane / 4 and 8 more of the warp's 16

  __device__ __forceinline__ TailTile(const AddTailParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), lane(threadIdx.x % 32) {}

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
    TailWork& work = shared.work;
    if (lane != 0) return;
    work.q_order = p.q_order + order_row * g.segment + tile.tile * p.block_m;
    work.k_order = p.k_order + p.chunk.place(tile.head, tile.segment);
    work.q = p.q.at(batch, head);
    work.k = head_rows<Traits::kPaged>(p.k, batch, kv_head);
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

  // Where a chunk of a row stands in a buffer, in bytes: odd rows have halves of 8 chunks exchanged, so that reads meet
  // no two in a bank.
  static __device__ __forceinline__ uint32 place(int row, int chunk) {
    return row * (kHeadDim * 2) + (chunk ^ row % 2 * 4) * 16;
  }

  // Half of the block finds queries, half samples.
  __device__ __forceinline__ void find_rows() const {
    const TailWork& work = shared.work;
    const int i = threadIdx.x % kTailSamples;
    if (threadIdx.x >= kTailSamples) {
      const bool present = i < work.count;
      const int position = present ? work.begin + work.q_order[i] : 0;
      shared.queries[i] = present ? work.q + position * p.q.row : nullptr;
      shared.outputs[i] = work.out + position * p.out.row;
      shared.lse[i] = work.lse + position;
      return;
    }
    const Geometry& g = p.geometry;
    const int at = work.visited + sample_place(i, work.left);
    const int key = (work.k_order[at >> g.unit_shift] << g.unit_shift) + (at & g.unit_mask());
    if constexpr (Traits::kPaged) {
      shared.samples[i] = work.k + PagedRows{p.k, p.pages, work.batch, 0}.offset(key);
    } else {
      shared.samples[i] = work.k + key * p.k.row;
    }
  }
  // The first of this thread's rows of the tile; the other is 8 more.
  static __device__ __forceinline__ int row_of_tile() { return threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4; }

  __device__ __forceinline__ void load_samples() const {
    const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint32 to = shared_address(shared.rows[0]) + place(first, chunk);
    const int dims = p.geometry.head_dim - chunk * 8;  // from this chunk on
    if constexpr (Traits::kAligned) {
#pragma unroll
      for (int r = 0; r < kTailSamples; r += kRowsAtOnce)
        cp_async_16_or_zeros(to + r * (kHeadDim * 2), shared.samples[first + r] + chunk * 8, dims > 0);
      cp_async_commit();
    } else {
#pragma unroll 1
      for (int r = 0; r < kTailSamples; r += kRowsAtOnce)
        store_shared_16(to + r * (kHeadDim * 2), load_unaligned(shared.samples[first + r], chunk * 8, chunk * 8 + dims));
    }
  }
  // Rows `first` to first + kRows of it.
  __device__ __forceinline__ void load_covariance(int first) const {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint16* from = shared.work.covariance + first * kHeadDim + threadIdx.x * 8;
    const uint32 to = shared_address(shared.rows[kBuffers - 1]) + place(covariance_place(row), chunk);
#pragma unroll
    for (int r = 0; r < Traits::kRows; r += kRowsAtOnce)
      cp_async_16(to + covariance_place(r) * (kHeadDim * 2), from + r * kHeadDim);
    cp_async_commit();
  }
  __device__ __forceinline__ void load_mean() const {
    if (threadIdx.x < kHeadDim / 4)
      cp_async_16(shared_address(shared.mean_values + threadIdx.x * 4), shared.work.mean_value + threadIdx.x * 4);
    cp_async_commit();  // of its own: unaligned samples are no copies that the wait could wait for
  }
  __device__ __forceinline__ void load_queries() {
    if constexpr (Traits::kAligned) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint16* row = shared.queries[row_of_tile() + h * 8];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int first = g * 32 + lane % 4 * 8;
          q[h][g] = load_16_or_zeros(row + first, row != nullptr && first < p.geometry.head_dim);
        }
      }
    } else {
      const uint32 buffer = shared_address(shared.rows[0]);
#pragma unroll 1
      for (int i = threadIdx.x; i < kTailSamples * kChunks; i += kThreads) {
        const uint16* row = shared.queries[i / kChunks];
        store_shared_16(buffer + place(i / kChunks, i % kChunks),
                        load_unaligned(row, i % kChunks * 8, row == nullptr ? 0 : p.geometry.head_dim));
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          q[h][g] = load_shared_16(buffer + place(row_of_tile() + h * 8, g * 4 + lane % 4));
      __syncthreads();  // samples take the place
    }
  }
  // Rows of the output are needed when all else is done. By then they should be in L2.
  __device__ __forceinline__ void prefetch_outputs() const {
    const int i = threadIdx.x / 2, end = i < shared.work.count ? p.geometry.head_dim : 0;
    const uint16* out = shared.outputs[i];
#pragma unroll
    for (int j = 0; j < kHeadDim; j += 32) {
      const int d = j + threadIdx.x % 2 * 16;  // 32 bytes
      if (d < end) asm volatile("prefetch.global.L2 [%0];" ::"l"(out + d));
    }
  }

  // acc[16, kTailSlice] = queries times as many rows of a buffer; `rows`: of the first, the byte that this thread reads
  // first but for the exchange of odd rows.
  template <class Type>
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], uint32 rows) const {
    const uint32 odd = lane / 4 % 2 * 64, at[2] = {rows + odd, rows + 64 - odd};
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[j][e] = 0.f;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32 low[4] = {q[0][g].x, q[1][g].x, q[0][g].y, q[1][g].y};
      const uint32 high[4] = {q[0][g].z, q[1][g].z, q[0][g].w, q[1][g].w};
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        const uint32 from = at[g % 2] + g / 2 * 128 + j * (8 * kHeadDim * 2);
        const uint4 b = load_shared_16(from), c = load_shared_16(from + 8 * kHeadDim * 2);
        Type::mma(acc[j], low, b.x, b.y);
        Type::mma(acc[j + 1], low, c.x, c.y);
        Type::mma(acc[j], high, b.z, b.w);
        Type::mma(acc[j + 1], high, c.z, c.w);
      }
    }
  }
  __device__ __forceinline__ uint32 thread_rows(const uint16* buffer) const {
    return shared_address(buffer) + lane / 4 * (kHeadDim * 2) + lane % 4 * 16;
  }

  // Of rows lane / 4 and 8 more of the warp, from their lse in units of log2: mass as a multiple of what the row has
  // found, and tilt; mass 0 where one is not finite.
  __device__ __forceinline__ void find_mass(const float (&lse)[2], float (&mass)[2], float (&tilt)[2]) const {
    TailScores scores{p.scale * kLog2E, 1.f};
    if constexpr (spec::kSoftcap)
      scores = {p.softcap * kLog2E, fminf(fmaxf(p.scale / p.softcap, -kLargestFactor), kLargestFactor)};
    const uint32 rows = thread_rows(shared.rows[0]);
    SampleSums sums;
    sums.base[0] = lse[0];
    sums.base[1] = lse[1];
    float top[2];
    // Once, as a rule. Where weights are too large the second time finds the largest, and a third time sums are in
    // units of that.
#pragma unroll 1
    for (int time = 0;; ++time) {
      sums.clear();
      top[0] = top[1] = -infinity();
#pragma unroll 1
      for (int first = kTailSamples - kTailSlice; first >= 0; first -= kTailSlice) {
        float s[kTiles][4];
        multiply<Element>(s, rows + first * (kHeadDim * 2));
        const auto product = [&](int j, int h, int e) { return s[j][2 * h + e]; };
        if (time == 1) {
          sums.template find_top<kTiles>(top, scores, product);
        } else {
          if (first == kTailSamples - kTailSlice) sums.template find_middle<kTiles>(product);
          sums.template add<kTiles>(first, scores, product);
        }
      }
      if (time == 1) {
        sums.raise_base(top);
      } else if (time == 2 || !sums.overflow()) {
        break;
      }
    }
    sums.finish(shared.work.left, p.scale, lse, mass, tilt);
  }

  __device__ __forceinline__ void add() {
    if (threadIdx.x < 32) describe();
    __syncthreads();
    if (shared.work.left <= 0) return;
    load_mean();
    if constexpr (kBuffers == 2) load_covariance(0);
    find_rows();
    __syncthreads();
    if constexpr (Traits::kAligned) load_samples();
    load_queries();
    if constexpr (!Traits::kAligned) load_samples();  // in a place that queries are read from
    const int row = row_of_tile();
    float lse[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      lse[h] = row + 8 * h < shared.work.count ? *shared.lse[row + 8 * h] * kLog2E : infinity();
    prefetch_outputs();
    cp_async_wait<0>();
    __syncthreads();

    float mass[2] = {}, tilt[2] = {};
    if (__shfl_sync(kFullWarp, threadIdx.x / 32, 0) * 16 < shared.work.count) find_mass(lse, mass, tilt);
    if (!moments_are_finite(shared.mean_values)) mass[0] = mass[1] = 0.f;
    const bool adds = mass[0] > 0.f || mass[1] > 0.f;
    if constexpr (kBuffers == 1) {
      if (!__syncthreads_or(adds)) return;  // and everybody has read the samples
    } else {
      if (!__any_sync(kFullWarp, adds)) return;
    }
    to_bfloat16();
    float added[2], slope[2];
    uint16* out[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      added[h] = __fdividef(mass[h], 1.f + mass[h]);
      slope[h] = tilt[h] * p.scale;
      out[h] = shared.outputs[row + 8 * h] + lane % 4 * 8;
      asm volatile("" : "+l"(out[h]));  // one address, not the terms of a sum
      if (mass[h] > 0.f && lane % 4 == 0) *shared.lse[row + 8 * h] += log1pf(mass[h]);
    }
    const uint32 rows = thread_rows(shared.rows[kBuffers - 1]);
#pragma unroll 1
    for (int d = 0; d < p.geometry.head_dim; d += kTailSlice) {
      if (kBuffers == 1 && d % Traits::kRows == 0) {
        if (d) __syncthreads();  // everybody has read those before
        load_covariance(d);
      }
      const int dims = p.geometry.head_dim - d - lane % 4 * 8;  // from this thread's first on
      uint4 before[2];  // both on their way before they are needed
#pragma unroll
      for (int h = 0; h < 2; ++h) before[h] = load_output(out[h], added[h] > 0.f ? dims : 0);
      if (kBuffers == 1 && d % Traits::kRows == 0) {
        cp_async_wait<0>();
        __syncthreads();
      }
      float x[kTiles][4];
      multiply<Bfloat16>(x, rows + d % Traits::kRows * (kHeadDim * 2));
      const float* mean = shared.mean_values + d + lane % 4 * 8;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (added[h] > 0.f) {
          const float kept = 1.f - added[h];
          const uint32 pairs[4] = {before[h].x, before[h].y, before[h].z, before[h].w};
          uint32 sums[4];
#pragma unroll
          for (int j = 0; j < kTiles; ++j)
            // What is finite stays so, though a value to first order may be larger than any that it stands for.
            sums[j] = pack_finite<Element>(
                Element::low(pairs[j]) * kept + added[h] * (mean[2 * j] + slope[h] * x[j][2 * h]),
                Element::high(pairs[j]) * kept + added[h] * (mean[2 * j + 1] + slope[h] * x[j][2 * h + 1]));
          store_output(out[h], dims, sums);
        }
        out[h] += kTailSlice;
      }
    }
  }
  // Covariances are bfloat16, and queries that they are multiplied with.
  __device__ __forceinline__ void to_bfloat16() {
    if constexpr (!Element::kWide) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          uint4& x = q[h][g];
          x.x = Bfloat16::pack(Element::low(x.x), Element::high(x.x));
          x.y = Bfloat16::pack(Element::low(x.y), Element::high(x.y));
          x.z = Bfloat16::pack(Element::low(x.z), Element::high(x.z));
          x.w = Bfloat16::pack(Element::low(x.w), Element::high(x.w));
        }
    }
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

// Block: a q tile.
template <class Traits>
__device__ __forceinline__ void add_tail(const AddTailParams& p, typename Traits::Shared& shared) {
  TailTile<Traits>(p, shared).add();
}

}  // namespace s2o
