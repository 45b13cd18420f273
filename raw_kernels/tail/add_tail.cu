// Adds what candidates weigh that a q tile has not visited, and their values to first order. After pass 2, in place.
//
//   kTailSamples unvisited candidates, denser where they come earlier in the order, give for each query
//     mass  their sum of exp(score), by the share that each stands for, and less of it the fewer of them carry it
//     tilt  how far their mean score moves once they are weighted by it, over the variance of scores: 1 for scores that
//           are spread like a normal distribution, and kept within [0, 1]
//   value = mean_value + tilt * scale * covariance query, the regression of values on scores at the weighted mean score
//   out, lse <- with the mass at that value; as they are where something of it is not finite
#include "common/keep_finite.cuh"
#include "common/rows.cuh"
#include "tail/moment_groups.cuh"

namespace s2o {

constexpr int kTailSamples = spec::kTailSamples;
constexpr int kTailSlice = 32;  // dimensions of values at a time
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLargestScale = 100.f;  // log2 of a mass beside which nothing of the row's own is left

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
  int aligned;               // every row of q, k and out starts on 16 bytes
  float scale;               // of scores, with its sign
  float softcap;             // 0: scores are not capped
  Pages pages;               // of a paged cache
};

template <class Element_, int kHeadDim_, bool kPaged_>
struct TailTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256, kQueries = kThreads / 2;  // at most, of a q tile
  static constexpr bool kPaged = kPaged_;
  static constexpr int kPitch = kHeadDim + 8;
  static_assert(kQueries <= kTailSamples, "queries lie where samples do");
  struct Shared {
    uint16 rows[kTailSamples * kPitch];  // queries, then samples, then covariances
    int64 offsets[kTailSamples];  // of the rows of queries, -1 where there is none, then of samples
  };
};

template <class Traits>
struct TailTile {
  using Element = typename Traits::Element;
  static constexpr int kSteps = Traits::kHeadDim / 16, kSampleTiles = kTailSamples / 8;

  const AddTailParams& p;
  typename Traits::Shared& shared;
  const QueryTile tile;
  const int lane, warp;
  int count;           // queries of the tile
  int left;            // candidates that it has not visited
  uint32 a[kSteps][4]; // fragments of 16 queries

  __device__ __forceinline__ TailTile(const AddTailParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), tile(query_tile<true>(p.chunk, p.tiles, blockIdx.x)), lane(threadIdx.x % 32),
        warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {
    count = min(p.block_m, p.geometry.query_count(tile.segment) - tile.tile * p.block_m);
    left = count <= 0 ? 0
                      : p.geometry.candidates(tile.segment) -
                            p.visited[order_row() * p.tiles + tile.tile] * p.block_n;
  }
  __device__ __forceinline__ int64 order_row() const {
    return static_cast<int64>(tile.head) * p.geometry.segments() + tile.segment;
  }
  // The query of a row, or -1.
  __device__ __forceinline__ int query(int row) const {
    if (row >= count) return -1;
    return p.geometry.query_begin(tile.segment) +
           p.q_order[order_row() * p.geometry.segment + tile.tile * p.block_m + row];
  }
  // Copies the rows at shared.offsets behind `x`, zeros where one is -1.
  __device__ __forceinline__ void copy_rows(int rows, const uint16* x) const {
    constexpr int kChunks = Traits::kHeadDim / 8;
    for (int i = threadIdx.x; i < rows * kChunks; i += Traits::kThreads) {
      const int r = i / kChunks, first = i % kChunks * 8, head_dim = p.geometry.head_dim;
      const int64 offset = shared.offsets[r];
      const uint16* row = x + (offset < 0 ? 0 : offset);
      uint16* to = shared.rows + r * Traits::kPitch + first;
      if (p.aligned && first + 8 <= head_dim) {
        cp_async_16_or_zeros(shared_address(to), row + first, offset >= 0);
      } else {
        *reinterpret_cast<uint4*>(to) = offset >= 0 ? load_unaligned(row, first, head_dim) : make_uint4(0, 0, 0, 0);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void load_queries() {
    if (threadIdx.x < Traits::kQueries) {
      const int i = query(threadIdx.x);
      shared.offsets[threadIdx.x] = i < 0 ? -1 : i * p.q.row;
    }
    __syncthreads();
    copy_rows(Traits::kQueries, p.q.at(tile.batch(p.heads), tile.head_in_batch(p.heads)));
    const uint32 rows = shared_address(shared.rows);
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
      ldmatrix_x4(a[c], rows + ((warp * 16 + lane % 16) * Traits::kPitch + c * 16 + lane / 16 * 8) * 2);
  }
  // Sample i stands at the square of (i + 1/2) / kTailSamples of the way through the unvisited candidates.
  __device__ __forceinline__ void find_samples() {
    const Geometry& g = p.geometry;
    const int* order = p.k_order + p.chunk.place(tile.head, tile.segment);
    const int batch = tile.batch(p.heads);
    for (int i = threadIdx.x; i < kTailSamples; i += Traits::kThreads) {
      const int64 square = (2 * i + 1) * (2 * i + 1);
      const int at =
          g.candidates(tile.segment) - left + static_cast<int>(square * left / (4 * kTailSamples * kTailSamples));
      const int key = (order[at >> g.unit_shift] << g.unit_shift) + (at & g.unit_mask());
      if constexpr (Traits::kPaged) {
        shared.offsets[i] = PagedRows{p.k, p.pages, batch, 0}.offset(key);
      } else {
        shared.offsets[i] = key * p.k.row;
      }
    }
  }
  __device__ __forceinline__ void load_samples() {
    copy_rows(kTailSamples,
              head_rows<Traits::kPaged>(p.k, tile.batch(p.heads), tile.kv_head(p.heads, p.kv_heads)));
  }
  // acc[16, kTiles * 8] = queries times as many rows of shared memory from `first` on
  template <class Type, int kTiles>
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], int first) const {
    const uint32 rows = shared_address(shared.rows + first * Traits::kPitch);
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32 b[4];
        ldmatrix_x4(b, rows + ((j * 8 + lane % 8 + lane / 16 * 8) * Traits::kPitch + c * 16 + lane / 8 % 2 * 8) * 2);
        Type::mma(acc[j], a[c], b[0], b[1]);
        Type::mma(acc[j + 1], a[c], b[2], b[3]);
      }
  }
  __device__ __forceinline__ void load_covariances(const uint16* from, int rows) const {
    constexpr int kChunks = Traits::kHeadDim / 8;
    for (int i = threadIdx.x; i < rows * kChunks; i += Traits::kThreads)
      cp_async_16(shared_address(shared.rows + i / kChunks * Traits::kPitch + i % kChunks * 8), from + i * 8);
    cp_async_commit();
  }
  static __device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
  }
  // Calls done(share, score) of this thread's samples of row h: number 8 * j + lane % 4 * 2 + e stands for `share` of
  // the unvisited candidates.
  template <class Done>
  __device__ __forceinline__ void each(float (&s)[kSampleTiles][4], int h, const Done& done) const {
    constexpr float kOne = 1.f / (kTailSamples * kTailSamples);
    float first = (lane % 4 * 4 + 1) * kOne;
    asm volatile("" : "+f"(first));  // or all shares are kept in registers from one use to the next
#pragma unroll
    for (int j = 0; j < kSampleTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) done(first + (16 * j + 2 * e) * kOne, s[j][2 * h + e]);
  }

  __device__ __forceinline__ float capped(float score) const {
    return p.softcap > 0.f ? p.softcap * tanh_approx(score / p.softcap) : score;
  }

  // Of rows lane / 4 and 8 more of the warp: mass as a multiple of what the row has found, and tilt; mass 0 where one
  // is not finite.
  __device__ __forceinline__ void find_mass(const int (&position)[2], const float (&lse)[2], float (&mass)[2],
                                            float (&tilt)[2]) const {
    float s[kSampleTiles][4];
    multiply<Element>(s, 0);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // Weights are counted from the largest score: what they are shared by does not depend on their size.
      float sum = 0.f, squares = 0.f, mean = 0.f, weighted = 0.f, variance = 0.f, top = -infinity();
      each(s, h, [&](float share, float& x) {
        mean += share * (x *= p.scale);
        top = fmaxf(top, x);
      });
      mean = quad_sum(mean);
      top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
      top = capped(fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)));
      each(s, h, [&](float share, float x) {
        const float weight = share * exp2_approx((capped(x) - top) * kLog2E);
        sum += weight;
        squares += weight * weight;
        weighted += weight * (x - mean);
        variance += share * (x - mean) * (x - mean);
      });
      sum = quad_sum(sum);
      squares = quad_sum(squares);
      weighted = quad_sum(weighted);
      variance = quad_sum(variance);
      const float carrying = sum * sum / squares;  // samples, by how evenly weights are spread
      const float scale = exp2_approx(fminf((top - lse[h]) * kLog2E, kLargestScale));
      mass[h] = sum * scale * left * carrying / (carrying + spec::kTailDoubt);
      tilt[h] = variance > 0.f ? fminf(fmaxf(weighted / (sum * variance), 0.f), 1.f) : 0.f;
      if (position[h] < 0 || !(fabsf(lse[h]) < infinity()) || !(mass[h] < infinity()) || !(tilt[h] <= 1.f))
        mass[h] = 0.f;
    }
  }
  __device__ __forceinline__ void add() {
    load_queries();
    find_samples();
    __syncthreads();  // fragments and offsets are read and written
    load_samples();
    int position[2];
    float lse[2], mass[2], tilt[2];
    float* of_rows = p.lse + static_cast<int64>(tile.head) * p.geometry.seqlen_q;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      position[h] = query(warp * 16 + lane / 4 + h * 8);
      lse[h] = position[h] < 0 ? 0.f : of_rows[position[h]];
    }
    find_mass(position, lse, mass, tilt);

    const int64 moments =
        static_cast<int64>(tile.head / p.heads * p.kv_heads + tile.kv_head(p.heads, p.kv_heads)) * p.groups +
        moment_group(p.geometry, tile.segment) - p.first_group;
    const float* mean_value = p.mean_values + moments * Traits::kHeadDim;
#pragma unroll
    for (int d = 0; d < Traits::kHeadDim; d += 64)  // kMomentSlice
      if (!(fabsf(mean_value[d]) < infinity())) mass[0] = mass[1] = 0.f;
    const bool adds = mass[0] > 0.f || mass[1] > 0.f;
    if (!__syncthreads_or(adds)) return;  // and everybody has read the samples

    if constexpr (!Element::kWide) {  // covariances are bfloat16
#pragma unroll
      for (int c = 0; c < kSteps; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[c][e] = Bfloat16::pack(Element::low(a[c][e]), Element::high(a[c][e]));
    }
    uint16* out = p.out.at(tile.batch(p.heads), tile.head_in_batch(p.heads));
    const int rows_at_once = min(Traits::kHeadDim, kTailSamples);
#pragma unroll 1
    for (int d = 0; d < p.geometry.head_dim; d += kTailSlice) {
      if (d % rows_at_once == 0) {
        if (d) __syncthreads();  // everybody has read those before
        load_covariances(p.covariances + (moments * Traits::kHeadDim + d) * Traits::kHeadDim, rows_at_once);
      }
      uint32 before[kTailSlice / 8][2];  // all of them on their way before the first is written
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < kTailSlice / 8; ++j)
          before[j][h] = load_pair(out + position[h] * p.out.row, d + j * 8 + lane % 4 * 2, mass[h] > 0.f);
      if (d % rows_at_once == 0) {
        cp_async_wait<0>();
        __syncthreads();
      }
      float x[kTailSlice / 8][4];
      multiply<Bfloat16>(x, d % rows_at_once);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (mass[h] <= 0.f) continue;
        const float kept = 1.f / (1.f + mass[h]), added = mass[h] * kept, slope = tilt[h] * p.scale;
#pragma unroll
        for (int j = 0; j < kTailSlice / 8; ++j) {
          const int first = d + j * 8 + lane % 4 * 2;
          const float2 mean = *reinterpret_cast<const float2*>(mean_value + first);
          store_pair(out + position[h] * p.out.row, first,
                     packed_sum(Element::low(before[j][h]) * kept + added * (mean.x + slope * x[j][2 * h]),
                                Element::high(before[j][h]) * kept + added * (mean.y + slope * x[j][2 * h + 1])));
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
      if (mass[h] > 0.f && lane % 4 == 0) of_rows[position[h]] = lse[h] + log1pf(mass[h]);
  }
  // Elements first and first + 1 of a row of the output, as far as there are any.
  __device__ __forceinline__ uint32 load_pair(const uint16* row, int first, bool wanted) const {
    const int head_dim = p.geometry.head_dim;
    if (!wanted || first >= head_dim) return 0;
    if (p.aligned) return *reinterpret_cast<const uint32*>(row + first);  // head_dim is then a multiple of 8
    return row[first] | (first + 1 < head_dim ? row[first + 1] : 0u) << 16;
  }
  __device__ __forceinline__ void store_pair(uint16* row, int first, uint32 pair) const {
    const int head_dim = p.geometry.head_dim;
    if (first >= head_dim) return;
    if (p.aligned) {
      *reinterpret_cast<uint32*>(row + first) = pair;
      return;
    }
    row[first] = static_cast<uint16>(pair);
    if (first + 1 < head_dim) row[first + 1] = static_cast<uint16>(pair >> 16);
  }
  // What is finite stays so, though a value to first order may be larger than any of those that it stands for.
  static __device__ __forceinline__ uint32 packed_sum(float low, float high) {
    return pack_finite<Element>(low, high);
  }
};

// Block: a q tile.
template <class Traits>
__device__ __forceinline__ void add_tail(const AddTailParams& p, typename Traits::Shared& shared) {
  TailTile<Traits> tile(p, shared);
  if (tile.left > 0) tile.add();
}

}  // namespace s2o
