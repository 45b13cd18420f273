// Scores of a segment's candidates and their order (the paper's Algorithm 1, lines 16-20).
//
//   key_scores: scores[row, key] = the largest dot product of key with a representative of row's segment, a small
//               matrix product on tensor cores, as log2 of a softmax weight in float16
//   key_counts, key_order: a stable counting sort of each row's candidates; reference/s2o.py: order_keys defines it.
//               key_counts: how many candidates of each part of a row fall into each of kKeyBuckets parts of the
//               row's own score range, and where in the row each part's candidates of such a bucket begin. key_order:
//               the order. No atomic decides a place: the order is the same on every run.
//
//   rows are (head, segment) pairs of the chunk; scores and k_order [chunk rows, stride]
#include "attention.cuh"
#include "part_order.cuh"

namespace s2o {

constexpr int kStep = 64;                // keys of a step
constexpr int kScoreThreads = 128;
constexpr int kScoreRows = 16 * kScoreThreads / 32;  // (head, segment) rows of a block
constexpr int kScoreSteps = 8;           // key steps of a block

template <class Element_, int kHeadDim_, bool kAligned_, bool kPaged_>
struct ScoreTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kStep = s2o::kStep, kThreads = kScoreThreads;
  static constexpr bool kAligned = kAligned_, kPaged = kPaged_;
  struct Shared {
    uint16 k[2][kStep * kHeadDim];
    int first_key;
    const int* pages;  // as in attention.cuh
  };
};

// Block: kScoreRows rows of the heads that share a KV head (heads fastest, so that a block's prefixes are alike)
// and kScoreSteps steps of keys. A warp has 16 rows.
template <class Traits>
__device__ __forceinline__ void key_scores(const RankKeysParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kKeyTiles = kStep / 8;
  const Geometry& g = p.geometry;
  uint32 block = blockIdx.x;
  const int key_block = block % p.key_blocks;
  block /= p.key_blocks;
  const int first_row = block % p.row_blocks * kScoreRows;
  const int first_head = p.chunk.first_head + static_cast<int>(block / p.row_blocks) * p.chunk.shared_heads;

  const int rows = p.chunk.shared_heads * p.chunk.segments;
  const int last_segment = p.chunk.first_segment + min(first_row + kScoreRows - 1, rows - 1) / p.chunk.shared_heads;
  const int first_key = key_block * kScoreSteps * kStep;
  // Keys that some row of the block has as candidates.
  const int keys = min(kScoreSteps * kStep, (g.is_causal ? g.candidates(last_segment) : g.seqlen_k) - first_key);
  if (keys <= 0) return;

  const int lane = threadIdx.x % 32;
  int head[2], segment[2];  // of this thread's rows lane / 4 and lane / 4 + 8
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = min(first_row + static_cast<int>(threadIdx.x) / 32 * 16 + h * 8 + lane / 4, rows - 1);
    head[h] = first_head + row % p.chunk.shared_heads;
    segment[h] = p.chunk.first_segment + row / p.chunk.shared_heads;
  }

  bool valid[2];  // of these rows
#pragma unroll
  for (int h = 0; h < 2; ++h)
    valid[h] = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + h * 8 + lane / 4 < rows &&
               !(p.fine && p.fine[static_cast<int64>(head[h]) * g.segments() + segment[h]]);

  if (threadIdx.x == 0) shared.first_key = first_key;
  if (Traits::kPaged && threadIdx.x == 0) shared.pages = p.pages.of(first_head / p.heads);
  __syncthreads();
  const uint16* k =
      head_rows<Traits::kPaged>(p.k, first_head / p.heads, first_head % p.heads / (p.heads / p.kv_heads));
  const ContiguousKeys<Traits> source{shared, keys, p.pages};
  const int steps = (keys + kStep - 1) / kStep;
  const auto load = [&](int step) {
    if (step < steps) load_step<Traits>(shared_address(shared.k[step % 2]), k, p.k, g.head_dim, source, step);
    cp_async_commit();
  };
  // Fragments of a representative: a[16 rows, 16 dims] for each 16 dims.
  uint32 mean[Traits::kHeadDim / 16][4];
  const auto load_representative = [&](int r) {
    const uint32* from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64 row = (static_cast<int64>(head[h]) * g.segments() + segment[h]) * p.representatives +
                        (r * p.run < g.query_count(segment[h]) ? r : 0);
      from[h] = reinterpret_cast<const uint32*>(p.means + row * Traits::kHeadDim) + lane % 4;
    }
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) mean[c][i] = from[i % 2][c * 8 + i / 2 * 4];
  };

  load(0);
  load_representative(0);
  float largest[2] = {-infinity(), -infinity()}, smallest[2] = {infinity(), infinity()};
  for (int step = 0; step < steps; ++step) {
    load(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    float best[kKeyTiles][4];  // [rows, keys] of this thread
    for (int r = 0; r < p.representatives; ++r) {
      if (p.representatives > 1) load_representative(r);
      float s[kKeyTiles][4] = {};
#pragma unroll
      for (int c = 0; c < Traits::kHeadDim / 16; ++c)
#pragma unroll
        for (int j = 0; j < kKeyTiles; j += 2) {
          uint32 x[4];
          ldmatrix_x4(x, chunk_address<Traits>(shared_address(shared.k[step % 2]), j * 8 + lane % 8 + lane / 16 * 8,
                                               c * 2 + lane / 8 % 2));
          Element::mma(s[j], mean[c], x[0], x[1]);
          Element::mma(s[j + 1], mean[c], x[2], x[3]);
        }
      // A run that is empty is stood in for by the first, which changes no maximum.
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) best[j][e] = r == 0 ? s[j][e] : larger_or_nan(best[j][e], s[j][e]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!valid[h]) continue;
      const int end = g.is_causal ? g.candidates(segment[h]) : g.seqlen_k;
      const int dense_begin = g.dense_begin(segment[h]), dense_end = g.dense_end(segment[h]);
      uint16* target = p.scores + p.chunk.row(head[h], segment[h]) * p.stride;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const int key = first_key + step * kStep + j * 8 + lane % 4 * 2;
        const float x[2] = {best[j][2 * h] * p.scale_log2, best[j][2 * h + 1] * p.scale_log2};
        if (key < end) *reinterpret_cast<uint32*>(target + key) = Float16::pack(x[0], x[1]);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const bool candidate = key + e < end && (g.is_causal || key + e < dense_begin || key + e >= dense_end);
          if (candidate && finite_score(x[e])) {
            largest[h] = fmaxf(largest[h], x[e]);
            smallest[h] = fminf(smallest[h], x[e]);
          }
        }
      }
    }
    __syncthreads();  // every warp is done with this buffer
  }
  cp_async_wait<0>();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      largest[h] = fmaxf(largest[h], __shfl_xor_sync(kFullWarp, largest[h], step));
      smallest[h] = fminf(smallest[h], __shfl_xor_sync(kFullWarp, smallest[h], step));
    }
    if (valid[h] && lane % 4 == 0)
      grow_range(p.range + p.chunk.row(head[h], segment[h]), largest[h], smallest[h]);
  }
}

struct CountShared {
  uint32 count[spec::kKeyBuckets];
  uint32 of_warp[kSortWarps];
  uint32 counted;
};

// Four 16-bit counts.
__device__ __forceinline__ uint4 unpacked(uint2 x) {
  return make_uint4(x.x & 0xffffu, x.x >> 16, x.y & 0xffffu, x.y >> 16);
}

// Thread: four buckets. bases[row, part, bucket] of a row that is counted.
__device__ __forceinline__ void find_bases(const RankKeysParams& p, const RowPart& where, uint32 (&of_warp)[kSortWarps]) {
  static_assert(spec::kKeyBuckets == 4 * kSortThreads, "a thread's share");
  const int64 row = where.row * p.parts * kSortThreads + threadIdx.x;
  const uint2* counts = reinterpret_cast<const uint2*>(p.counts) + row;
  uint4* bases = reinterpret_cast<uint4*>(p.bases) + row;
  uint4 in_row = make_uint4(0, 0, 0, 0);
#pragma unroll 8
  for (int part = 0; part < where.parts; ++part) {
    const uint4 n = unpacked(load_from_l2(counts + part * kSortThreads));
    in_row.x += n.x, in_row.y += n.y, in_row.z += n.z, in_row.w += n.w;
  }
  uint4 place;
  place.x = thread_sum_before(in_row.x + in_row.y + in_row.z + in_row.w, of_warp);
  place.y = place.x + in_row.x;
  place.z = place.y + in_row.y;
  place.w = place.z + in_row.z;
#pragma unroll 8
  for (int part = 0; part < where.parts; ++part) {
    const uint4 n = unpacked(load_from_l2(counts + part * kSortThreads));
    bases[part * kSortThreads] = place;
    place.x += n.x, place.y += n.y, place.z += n.z, place.w += n.w;
  }
}

// counts[row, part, bucket]: how many candidates of the part a bucket holds. The block that counts a row's last part
// finds the row's bases.
__device__ __forceinline__ void key_counts(const RankKeysParams& p, CountShared& shared) {
  constexpr int kLoads = kOfThread / 8;
  const RowPart where(p);
  if (where.count <= 0) return;
  const uint16* scores = p.scores + where.row * p.stride;
  uint4 x[kLoads];
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    const int c = (i * kSortThreads + threadIdx.x) * 8;
    if (where.eight(c))
      x[i] = *reinterpret_cast<const uint4*>(scores + where.first + c);
    else if (c < where.count)
      x[i] = where.gathered(scores, c);
  }
  for (int b = threadIdx.x; b < spec::kKeyBuckets; b += kSortThreads) shared.count[b] = 0;
  __syncthreads();
  const ScoreBuckets bucket(p.range[where.row]);
#pragma unroll
  for (int i = 0; i < kLoads; ++i) {
    if ((i * kSortThreads + threadIdx.x) * 8 >= where.count) break;
    const uint32 pairs[4] = {bucket(x[i].x), bucket(x[i].y), bucket(x[i].z), bucket(x[i].w)};
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      atomicAdd(shared.count + (pairs[e] & kBucketMask), 1u);
      atomicAdd(shared.count + (pairs[e] >> 16 & kBucketMask), 1u);
    }
  }
  __syncthreads();
  // What filled up the last eight went to the last bucket.
  if (threadIdx.x == kSortThreads - 1) shared.count[spec::kKeyBuckets - 1] -= -where.count & 7;
  const uint4 n = reinterpret_cast<const uint4*>(shared.count)[threadIdx.x];
  reinterpret_cast<uint2*>(p.counts)[(where.row * p.parts + where.part) * kSortThreads + threadIdx.x] =
      make_uint2(n.x | n.y << 16, n.z | n.w << 16);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) shared.counted = atomicAdd(p.counted + where.row, 1u);
  __syncthreads();
  if (shared.counted != where.parts - 1) return;
  __threadfence();
  find_bases(p, where, shared.of_warp);
}

struct SortShared {
  PartShared part;
  uint32 base[spec::kKeyBuckets];  // from a candidate's place in the part to its place in the row
  uint32 of_warp[kSortWarps];
};

// k_order[row, place] of the part's candidates.
__device__ __forceinline__ void key_order(const RankKeysParams& p, SortShared& shared) {
  const RowPart where(p);
  if (where.count <= 0) return;
  PartOrder part(shared.part);
  part.load(p.scores + where.row * p.stride, where);
  const int64 of_part = (where.row * p.parts + where.part) * kSortThreads + threadIdx.x;
  const uint4 n = unpacked(reinterpret_cast<const uint2*>(p.counts)[of_part]);
  uint4 base = reinterpret_cast<const uint4*>(p.bases)[of_part];
  const uint32 before = thread_sum_before(n.x + n.y + n.z + n.w, shared.of_warp);
  base.x -= before, base.y -= before + n.x, base.z -= before + n.x + n.y, base.w -= before + n.x + n.y + n.z;
  reinterpret_cast<uint4*>(shared.base)[threadIdx.x] = base;
  part.sort(ScoreBuckets(p.range[where.row]));
  int* order = p.k_order + where.row * p.stride;
#pragma unroll 4
  for (int i = threadIdx.x; i < where.count; i += kSortThreads) {
    const uint32 item = shared.part.items[i];
    order[shared.base[bucket_of(item)] + i] = where.key(where.first + candidate_of(item));
  }
}

}  // namespace s2o
