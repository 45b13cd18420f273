// What ordering needs of the queries (the paper's Algorithm 1, lines 6-14), in float32.
//
//   guides:       mean of the leading keys of each KV head           -> guide [batch * kv_heads, 2, kHeadDim]
//   rank_queries: means of runs of consecutive queries of a segment  -> means [batch * heads, segments,
//                 pooled queries, kHeadDim], rounded to the input's dtype;
//                 queries of a segment by their dot product with the guide, descending, ties ascending
//                                                                    -> q_order [batch * heads, segments, segment]
#include "common/pages.cuh"
#include "common/row_sums.cuh"
#include "selection/sortable.cuh"

namespace s2o {

struct RankQueriesParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim]
  float* guide;            // [batch * kv_heads, 2, kHeadDim]: of segment 0 and of the others
  uint16* means;           // [batch * heads, segments, pooled queries, kHeadDim]
  int* q_order;            // [batch * heads, segments, segment]
  Geometry geometry;
  int heads, kv_heads;
  int pooled_queries, run;
  int sort_slots;          // segment rounded up to a power of two from 32 on
  float sign;              // -1 where scale < 0: importance then falls with the dot product
  Pages pages;             // of a paged cache
};

constexpr int kQueryThreads = 128;  // of rank_queries
constexpr uint32 kOffsetMask = spec::kMaxSegment - 1;  // a score leaves these bits to the query's offset

// What a block of rank_queries reads and writes, of a head and a segment.
struct SegmentQueries {
  int count;
  const uint16* q;     // [count, head_dim]
  const float* guide;  // [kHeadDim]
};

template <class Element, int kHeadDim, bool kAligned_, bool kPaged_>
struct RankTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kAligned = kAligned_;  // rows of q and k are whole chunks of 16 bytes
  static constexpr bool kPaged = kPaged_;  // of guides: k is a paged cache
  struct Products {
    uint4 vectors[kHeadDim * 2];                // fragments [kHeadDim / 32, 2, 32 lanes], see write_parts
    float sums[kQueryThreads / 32 * kHeadDim];  // [warps, kHeadDim]
  };
  struct Shared {
    union {
      float sums[RowTraits<Element, kHeadDim>::kSums];  // of guides
      Products products;                                // of rank_queries, as the rest
    };
    SegmentQueries segment;  // not in registers, of which there are none to spare
    uint32 slots[32];        // [sort_slots]: (inverted score, offset), ascending is the order
  };
};

// Block: a KV head and a guide.
template <class Traits>
__device__ __forceinline__ void guides(const RankQueriesParams& p, typename Traits::Shared& shared) {
  const int kv_head = blockIdx.x / 2, which = blockIdx.x % 2;
  if (which >= p.geometry.segments()) return;
  const int count = p.geometry.guide_keys(which), lane = threadIdx.x % Traits::kLanes;
  const int batch = kv_head / p.kv_heads;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, kv_head % p.kv_heads);
  const PagedRows pages{p.k, p.pages, batch, 0};
  float total[8] = {};
#pragma unroll 16  // there are few blocks: what counts is how many reads are under way in each
  for (int r = threadIdx.x / Traits::kLanes; r < count; r += Traits::kRows) {
    float x[8];
    const uint16* row = k + r * p.k.row;
    if constexpr (Traits::kPaged) row = k + pages.offset(r);
    read_row<Traits>(x, row, lane, p.geometry.head_dim, Traits::kAligned);
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] += x[e];
  }
  const float sum = block_sum<Traits>(total, shared.sums);
  if (threadIdx.x < Traits::kHeadDim)
    p.guide[static_cast<int64>(blockIdx.x) * Traits::kHeadDim + threadIdx.x] = count == 0 ? 0.f : sum / count;
}

template <int kHeadDim>
__device__ __forceinline__ SegmentQueries segment_queries(const RankQueriesParams& p) {
  const Geometry& g = p.geometry;
  const int n = blockIdx.x % g.segments(), head = blockIdx.x / g.segments();
  const int64 kv_head = static_cast<int64>(head / p.heads) * p.kv_heads + head % p.heads / (p.heads / p.kv_heads);
  SegmentQueries s = {g.query_count(n)};
  s.q = p.q.at(head / p.heads, head % p.heads) + g.query_begin(n) * p.q.row;
  s.guide = p.guide + (kv_head * 2 + (n > 0)) * kHeadDim;
  return s;
}

// rank_queries multiplies 8 queries at a time with the guide on tensor cores: parts of it are the rows of the left factor
// and queries the columns of the right one. Elements may come in any order that is the same in both: lane 4 * g + t
// loads elements [32 * j + 8 * t, + 8) of query g, 16 bytes, straight as its fragments of two products.
//
// Row i < 8 of the left factor is part i of the guide: what the parts before leave of the float32, times 2^kPartBits for
// each of them, rounded to the element type. Three hold all 24 bits, the others are 0, as rows from 8 on are.
template <class Traits>
__device__ __forceinline__ void write_parts(uint4* vectors, const SegmentQueries& s, float sign) {
  using Element = typename Traits::Element;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  for (int i = threadIdx.x; i < Traits::kHeadDim * 2; i += kQueryThreads) {
    const int j = i / 64, h = i / 32 % 2, first = 32 * j + 8 * t + 4 * h;
    float x[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) x[e] = s.guide[first + e] * sign;
    for (int part = 0; part < g; ++part) {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = (x[e] - Element::low(Element::pack(x[e], 0.f))) * (1 << Element::kPartBits);
    }
    vectors[i] = make_uint4(Element::pack(x[0], x[1]), 0, Element::pack(x[2], x[3]), 0);
  }
}

// A query's product with a float32 vector, element by element: where numbers are not finite parts do not add up.
template <class Element>
__device__ __forceinline__ float plain_product(const uint16* row, const float* vector, float sign, int head_dim) {
  float sum = 0.f;
#pragma unroll 1
  for (int d = 0; d < head_dim; ++d) sum += Element::to_float(row[d]) * (vector[d] * sign);
  return sum;
}

// Adds up over the 8 lanes of equal lane % 4: lane 4 * g + t gets the sum of x[g].
__device__ __forceinline__ float add_lanes(float (&x)[8]) {
#pragma unroll
  for (int half = 4; half > 0; half /= 2) {
    const bool upper = threadIdx.x & 4 * half;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float mine = upper ? x[i + half] : x[i], theirs = upper ? x[i] : x[i + half];
      x[i] = mine + __shfl_xor_sync(kFullWarp, theirs, 4 * half);
    }
  }
  return x[0];
}

// Of one warp or all of a block.
__device__ __forceinline__ void wait_for_team(int warps) {
  if (warps == 1) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Scores of a segment's queries, and means of its runs.
template <class Traits>
__device__ __forceinline__ void read_queries(const RankQueriesParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kWarps = kQueryThreads / 32;
  constexpr int kSteps = Traits::kHeadDim / 32;    // of 16 queries
  constexpr int kAhead = kSteps < 4 ? kSteps : 4;  // of which are in flight
  const SegmentQueries& s = shared.segment;
  float* sums = shared.products.sums;
  const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);  // so that the compiler knows it as one for all lanes
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, head_dim = p.geometry.head_dim;
  // The warps of a run: all, or one where there is a run for each.
  const int team = p.pooled_queries < kWarps ? kWarps : 1, stride = 16 * team;
  const int64 eight = 8 * p.q.row;
  // `row` is this lane's first element of a query, `left` the queries from it to the run's end.
  const auto load = [&](uint4 (&x)[2], const uint16* row, int left, int j) {
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const uint16* from = u ? row + eight : row;
      const int elements = 8 * u < left ? head_dim - 8 * t : 0;
      if constexpr (Traits::kAligned) {
        x[u] = load_16_or_zeros(from + 32 * j, 32 * j < elements);
      } else {
        x[u] = load_unaligned(from, 32 * j, elements);
      }
    }
  };

  for (int run = warp / team; run < p.pooled_queries; run += kWarps / team) {
    const int begin = run * p.run, end = min(begin + p.run, s.count);
    if (begin >= end) break;  // a run that the short last segment leaves empty is no pooled query
    int tile = begin + warp % team * 16;
    const uint16* row = s.q + (tile + g) * p.q.row + 8 * t;
    float total[kSteps][8] = {};
    uint4 x[kAhead][2];  // of queries tile + g and tile + 8 + g
#pragma unroll
    for (int j = 0; j < kAhead; ++j) load(x[j], row, end - tile - g, j);
#pragma unroll 1
    for (; tile < end; tile += stride) {
      const uint16* next = row + stride * p.q.row;
      const int left = end - tile - g;
      float d[2][4] = {};  // [u][2 * w + e]: queries tile + 8 * u + 2 * t + e, guide or mean key
#pragma unroll
      for (int j = 0; j < kSteps; ++j) {
        uint4 (&now)[2] = x[j % kAhead];
        uint32 pairs[2][4];
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          pairs[u][0] = now[u].x, pairs[u][1] = now[u].y, pairs[u][2] = now[u].z, pairs[u][3] = now[u].w;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint4 part = shared.products.vectors[(j * 2 + h) * 32 + lane];
          const uint32 a[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
          for (int u = 0; u < 2; ++u) Element::mma(d[u], a, pairs[u][2 * h], pairs[u][2 * h + 1]);
        }
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[j][2 * i] += Element::low(pairs[u][i]);
            total[j][2 * i + 1] += Element::high(pairs[u][i]);
          }
        if (j + kAhead < kSteps) {
          load(now, row, left, j + kAhead);
        } else {
          load(now, next, left - stride, j + kAhead - kSteps);
        }
      }
      float products[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) products[i] = d[i / 4][i % 4] * __int_as_float((127 - g * Element::kPartBits) << 23);
      float score = add_lanes(products);
      const int r = tile + g / 4 * 8 + t * 2 + g % 2;
      if (r < end && !(g & 2)) {  // other lanes have sums of the rows that are 0
        if (!(fabsf(score) < infinity()))
          score = plain_product<Element>(s.q + r * p.q.row, s.guide, p.sign, head_dim);
        shared.slots[r] = ~sortable(score) & ~kOffsetMask | r;
      }
      __syncwarp();  // before the next products
      row = next;
    }
#pragma unroll
    for (int j = 0; j < kSteps; ++j) sums[warp * Traits::kHeadDim + 32 * j + 8 * t + g] = add_lanes(total[j]);
    // Adds up what the team has.
    const float factor = p.sign / (end - begin);
    uint16* mean = p.means + (static_cast<int64>(blockIdx.x) * p.pooled_queries + run) * Traits::kHeadDim;
    wait_for_team(team);
#pragma unroll 1
    for (int d = threadIdx.x % (32 * team); d < Traits::kHeadDim; d += 32 * team) {
      float sum = 0.f;
#pragma unroll 1
      for (int w = 0; w < team; ++w) sum += sums[(warp / team * team + w) * Traits::kHeadDim + d];
      mean[d] = static_cast<uint16>(Element::pack(sum * factor, 0.f));
    }
    wait_for_team(team);
  }
}

// Block: a head and a segment; its queries are read once.
template <class Traits>
__device__ __forceinline__ void rank_queries(const RankQueriesParams& p, typename Traits::Shared& shared) {
  if (threadIdx.x == 0) shared.segment = segment_queries<Traits::kHeadDim>(p);
  __syncthreads();
  write_parts<Traits>(shared.products.vectors, shared.segment, p.sign);
  __syncthreads();
  read_queries<Traits>(p, shared);
  const int count = shared.segment.count;
  for (int i = count + threadIdx.x; i < p.sort_slots; i += kQueryThreads) shared.slots[i] = ~0u;
  __syncthreads();
  bitonic_sort(shared.slots, p.sort_slots);
  int* order = p.q_order + static_cast<int64>(blockIdx.x) * p.geometry.segment;
  for (int i = threadIdx.x; i < count; i += kQueryThreads) order[i] = shared.slots[i] & kOffsetMask;
}

}  // namespace s2o
