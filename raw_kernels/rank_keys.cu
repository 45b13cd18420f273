// Scores of a segment's candidates and their order (the paper's Algorithm 1, lines 16-20).
//
//   key_scores: scores[row, key] = the largest dot product of key with a representative of row's segment, a small
//               matrix product on tensor cores, as log2 of a softmax weight in float16
//   key_counts, key_bases, key_order: a stable counting sort of each row's candidates; reference/s2o.py: order_keys
//               defines it. key_counts: how many candidates of each part of a row fall into each of kKeyBuckets equal
//               parts of the row's own score range. key_bases: which of these buckets become one, and where in the row
//               each part's candidates of a merged bucket begin. key_order: the order. No atomic decides a place: the
//               order is the same on every run.
//
//   rows are (head, segment) pairs of the chunk; scores and k_order [chunk rows, stride]
#include "attention.cuh"
#include "rank_keys_params.cuh"
#include "sortable.cuh"

namespace s2o {

constexpr int kStep = 64;                // keys of a step
constexpr int kScoreThreads = 128;
constexpr int kScoreRows = 16 * kScoreThreads / 32;  // (head, segment) rows of a block
constexpr int kScoreSteps = 8;           // key steps of a block
constexpr int kSortThreads = 256;
constexpr int kSortWarps = kSortThreads / 32;

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

// A block of key_counts and key_order has one row and one part of its candidates, parts of a row next to each other:
// few rows are then in flight, and the scattered writes of each meet in L2 before they leave it.
struct RowPart {
  int head, segment;
  int first, count;  // candidates of the part
  int parts;         // of the row
  int part;
  int64 row;         // of the chunk
  int dense_begin, dense_keys;

  __device__ __forceinline__ explicit RowPart(const RankKeysParams& p) {
    uint32 block = blockIdx.x;
    part = block % p.parts;
    block /= p.parts;
    segment = p.chunk.first_segment + p.chunk.segments - 1 - static_cast<int>(block / p.chunk.heads);
    head = p.chunk.first_head + static_cast<int>(block % p.chunk.heads);
    row = p.chunk.row(head, segment);
    const int candidates = p.geometry.candidates(segment);
    parts = (candidates + spec::kSortPart - 1) / spec::kSortPart;
    first = part * spec::kSortPart;
    count = min(spec::kSortPart, candidates - first);
    dense_begin = p.geometry.dense_begin(segment);
    dense_keys = p.geometry.dense_end(segment) - dense_begin;
  }
  __device__ __forceinline__ int key(int candidate) const {
    return candidate < dense_begin ? candidate : candidate + dense_keys;
  }
  __device__ __forceinline__ uint16* counts(const RankKeysParams& p, int of_part) const {
    return p.counts + (row * p.parts + of_part) * spec::kKeyBuckets;
  }
};

// Which bucket a score of a row falls into; reference/s2o.py: order_keys.
struct Buckets {
  float high, factor;
  __device__ __forceinline__ explicit Buckets(uint2 range) {  // zeros if no score is finite
    high = range.x ? from_sortable(range.x) : 0.f;
    const float spread = __fsub_rn(high, range.y ? -from_sortable(range.y) : 0.f);
    factor = spread > 0.f && spread < infinity() ? __fdiv_rn(static_cast<float>(spec::kKeyBuckets), spread) : 0.f;
    if (factor == infinity()) factor = 0.f;
  }
  __device__ __forceinline__ uint32 operator()(float score) const {
    // The conversion turns NaN, which is 0 times infinity too, and what is negative, that is +inf, to 0.
    const uint32 part = min(__float2uint_rz(__fmul_rn(__fsub_rn(high, score), factor)), spec::kKeyBuckets - 1u);
    return score == -infinity() ? spec::kKeyBuckets - 1u : part;
  }
};

struct CountShared {
  uint32 count[spec::kKeyBuckets];
};

// counts[row, part, bucket]: how many candidates of the part a bucket holds.
__device__ __forceinline__ void key_counts(const RankKeysParams& p, CountShared& shared) {
  const RowPart where(p);
  if (where.count <= 0) return;
  for (int b = threadIdx.x; b < spec::kKeyBuckets; b += kSortThreads) shared.count[b] = 0;
  __syncthreads();
  const Buckets bucket(p.range[where.row]);
  const uint16* scores = p.scores + where.row * p.stride;
  // Eight neighbours stand side by side but for the gap that the dense keys leave.
  const bool whole = where.dense_keys == 0 || where.first + where.count <= where.dense_begin;
#pragma unroll 3
  for (int c = threadIdx.x * 8; c < where.count; c += kSortThreads * 8) {
    uint32 pairs[4];
    if (whole && c + 8 <= where.count) {
      const uint4 x = *reinterpret_cast<const uint4*>(scores + where.first + c);
      pairs[0] = x.x, pairs[1] = x.y, pairs[2] = x.z, pairs[3] = x.w;
    } else {
#pragma unroll
      for (int e = 0; e < 8; e += 2) {
        const auto score = [&](int i) -> uint32 { return scores[where.key(where.first + min(c + i, where.count - 1))]; };
        pairs[e / 2] = score(e) | score(e + 1) << 16;
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      const float score = e % 2 ? Float16::high(pairs[e / 2]) : Float16::low(pairs[e / 2]);
      if (c + e < where.count) atomicAdd(shared.count + bucket(score), 1u);
    }
  }
  __syncthreads();
  uint32* counts = reinterpret_cast<uint32*>(where.counts(p, where.part));
  for (int b = threadIdx.x; b < spec::kKeyBuckets / 2; b += kSortThreads)
    counts[b] = shared.count[2 * b] | shared.count[2 * b + 1] << 16;
}

// The sum over the block's threads before this one.
__device__ __forceinline__ uint32 exclusive_sum(uint32 mine, uint32 (&of_warp)[kSortWarps]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32 sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32 x = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += x;
  }
  __syncthreads();  // nobody still reads of_warp
  if (lane == 31) of_warp[warp] = sum;
  __syncthreads();
  uint32 before = 0;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w)
    if (w < warp) before += of_warp[w];
  return before + sum - mine;
}

// The bucket of a place in a list of `candidates`; reference/s2o.py: rank_bucket.
__device__ __forceinline__ uint32 rank_bucket(uint32 rank, int candidates) {
  const uint32 place = rank >> max(32 - __clz(candidates - 1) - spec::kOrderReachBits, 0);
  const int octave = max(31 - __clz(max(place, 1u)) - spec::kOrderStepBits, 0);
  // Past the end, where empty buckets begin, it would be one more.
  return min((octave << spec::kOrderStepBits) + (place >> octave), spec::kOrderBuckets - 1u);
}

struct BaseShared {
  uint32 count[spec::kOrderBuckets];
  uint32 of_warp[kSortWarps];
};

// Block: a row. merged[row, bucket] and bases[row, part, merged bucket].
__device__ __forceinline__ void key_bases(const RankKeysParams& p, BaseShared& shared) {
  constexpr int kBucketsOfThread = spec::kKeyBuckets / kSortThreads;
  static_assert(kBucketsOfThread == 8, "a thread reads the counts of its buckets in one load and writes 8 bytes");
  static_assert(spec::kOrderBuckets == 2 * kSortThreads, "a thread has two merged buckets");
  uint2* mine_of_row = reinterpret_cast<uint2*>(shared.count) + threadIdx.x;
  const int64 row = blockIdx.x;
  const int segment = p.chunk.first_segment + static_cast<int>(row % p.chunk.segments);
  const int candidates = p.geometry.candidates(segment);
  if (candidates <= 0) return;
  const int parts = (candidates + spec::kSortPart - 1) / spec::kSortPart;
  const uint16* counts = p.counts + row * p.parts * spec::kKeyBuckets + threadIdx.x * kBucketsOfThread;
  uint32 mine[kBucketsOfThread];
  const auto read = [&](int part) {
    const uint4 x = *reinterpret_cast<const uint4*>(counts + part * spec::kKeyBuckets);
    const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < kBucketsOfThread; ++i) mine[i] = pairs[i / 2] >> (i % 2 * 16) & 0xffffu;
  };

  uint32 in_row[kBucketsOfThread] = {}, sum = 0;
  for (int part = 0; part < parts; ++part) {
    read(part);
#pragma unroll
    for (int i = 0; i < kBucketsOfThread; ++i) in_row[i] += mine[i];
  }
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) sum += in_row[i];
  uint32 rank = exclusive_sum(sum, shared.of_warp);
  uint32 merged[kBucketsOfThread], packed[4] = {};
  *mine_of_row = make_uint2(0, 0);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kBucketsOfThread; ++i) {
    merged[i] = rank_bucket(rank, candidates);
    packed[i / 2] |= merged[i] << (i % 2 * 16);
    rank += in_row[i];
    if (in_row[i]) atomicAdd(shared.count + merged[i], in_row[i]);
  }
  *reinterpret_cast<uint4*>(p.merged + row * spec::kKeyBuckets + threadIdx.x * kBucketsOfThread) =
      make_uint4(packed[0], packed[1], packed[2], packed[3]);
  __syncthreads();
  uint2 place;  // of this thread's two merged buckets
  place.x = exclusive_sum(mine_of_row->x + mine_of_row->y, shared.of_warp);
  place.y = place.x + mine_of_row->x;
  for (int part = 0; part < parts; ++part) {
    *reinterpret_cast<uint2*>(p.bases + (row * p.parts + part) * spec::kOrderBuckets + threadIdx.x * 2) = place;
    read(part);
    __syncthreads();
    *mine_of_row = make_uint2(0, 0);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kBucketsOfThread; ++i)
      if (mine[i]) atomicAdd(shared.count + merged[i], mine[i]);
    __syncthreads();
    place.x += mine_of_row->x;
    place.y += mine_of_row->y;
  }
}

struct SortShared {
  uint16 bucket[spec::kSortPart];                // merged, of each candidate of the part
  uint16 rank[spec::kSortPart];                  // of its warp's candidates in the bucket, how many come before it
  uint16 sorted[spec::kSortPart];                // the part's candidates in their order
  uint16 merged[spec::kKeyBuckets];
  uint16 next[kSortWarps][spec::kOrderBuckets];  // the place of a warp's next candidate of a bucket
  uint32 base[spec::kOrderBuckets];              // from a candidate's place in the part to its place in the row
  uint32 of_warp[kSortWarps];
};

// Lanes of `active` whose low bits of x equal this lane's. In PTX, as a compiler tests each bit twice.
template <int kBits>
__device__ __forceinline__ uint32 match(uint32 active, uint32 x) {
  uint32 peers = active;
#pragma unroll
  for (int bit = 0; bit < kBits; ++bit) {
    asm volatile(
        "{\n.reg .pred set;\n.reg .b32 bits, with, invert;\n"
        "and.b32 bits, %1, %2;\nsetp.ne.b32 set, bits, 0;\n"
        "vote.sync.ballot.b32 with, set, 0xffffffff;\n"
        "selp.b32 invert, 0, 0xffffffff, set;\n"
        "lop3.b32 %0, %0, with, invert, 0x60;\n}"  // peers & (with ^ invert)
        : "+r"(peers)
        : "r"(x), "r"(1 << bit));
  }
  return peers;
}

// k_order[row, place] of the part's candidates. Each warp has its own run of them and keeps their order in a bucket.
// They are sorted in shared memory first: neighbours of a bucket are then written together, not one by one.
__device__ __forceinline__ void key_order(const RankKeysParams& p, SortShared& shared) {
  constexpr int kPartOfWarp = spec::kSortPart / kSortWarps, kOfLane = kPartOfWarp / 32, kLoads = 8, kBucketBits = 9;
  static_assert(spec::kOrderBuckets == 1 << kBucketBits, "lanes compare so many bits");
  static_assert(spec::kOrderBuckets == 2 * kSortThreads && spec::kKeyBuckets == 8 * kSortThreads, "a thread's share");
  static_assert(kOfLane % kLoads == 0, "loads come in whole batches");
  const RowPart where(p);
  if (where.count <= 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  uint32* words = reinterpret_cast<uint32*>(&shared.next[0][0]);
  for (int i = threadIdx.x; i < kSortWarps * spec::kOrderBuckets / 2; i += kSortThreads) words[i] = 0;
  const uint4* merged = reinterpret_cast<const uint4*>(p.merged + where.row * spec::kKeyBuckets);
  reinterpret_cast<uint4*>(shared.merged)[threadIdx.x] = merged[threadIdx.x];
  const uint2* bases = reinterpret_cast<const uint2*>(
      p.bases + (where.row * p.parts + where.part) * spec::kOrderBuckets);
  const uint2 base = bases[threadIdx.x];
  __syncthreads();

  // The warp's candidates 32 at a time: their buckets, and how many of the warp's stand before each in its bucket.
  const Buckets bucket(p.range[where.row]);
  const uint16* scores = p.scores + where.row * p.stride;
  const int first = warp * kPartOfWarp + lane, count = where.count - first;  // candidates of this lane: i < count
  const uint32 lower_lanes = (1u << lane) - 1;
  uint16* next = shared.next[warp];
  uint16 ahead[kLoads];
  const auto load = [&](int i) {
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const int c = (i + j) * 32;
      ahead[j] = c < count ? scores[where.key(where.first + first + c)] : uint16{0};
    }
  };
  load(0);
  for (int i = 0; i < kOfLane && i * 32 < count + lane; i += kLoads) {
    uint16 batch[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) batch[j] = ahead[j];
    if (i + kLoads < kOfLane) load(i + kLoads);
    uint16* of_bucket = shared.bucket + first + i * 32;
    uint16* of_rank = shared.rank + first + i * 32;
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const bool active = (i + j) * 32 < count;
      const uint32 b = shared.merged[bucket(Float16::to_float(batch[j]))];
      const uint32 peers = match<kBucketBits>(__ballot_sync(kFullWarp, active), b);
      const uint32 lower = peers & lower_lanes, earlier = next[b];
      __syncwarp();
      if (active) {
        of_bucket[j * 32] = static_cast<uint16>(b);
        of_rank[j * 32] = static_cast<uint16>(earlier + __popc(lower));
        if (lower == 0) next[b] = static_cast<uint16>(earlier + __popc(peers));
      }
      __syncwarp();
    }
  }
  __syncthreads();

  // Where each warp's candidates of a bucket begin in the part.
  // Two 16-bit counters a word, of this thread's two buckets: no sum over the part exceeds 16 bits.
  uint32 of_warp[kSortWarps], in_part = 0;
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    of_warp[w] = words[w * (spec::kOrderBuckets / 2) + threadIdx.x];
    in_part += of_warp[w];
  }
  const uint32 before = exclusive_sum((in_part & 0xffffu) + (in_part >> 16), shared.of_warp);
  uint32 place = before | before + (in_part & 0xffffu) << 16;
  shared.base[threadIdx.x * 2] = base.x - (place & 0xffffu);
  shared.base[threadIdx.x * 2 + 1] = base.y - (place >> 16);
#pragma unroll
  for (int w = 0; w < kSortWarps; ++w) {
    words[w * (spec::kOrderBuckets / 2) + threadIdx.x] = place;
    place += of_warp[w];
  }
  __syncthreads();
#pragma unroll 8
  for (int i = 0; i < kOfLane; ++i) {
    const int c = first + i * 32;
    if (i * 32 < count) shared.sorted[next[shared.bucket[c]] + shared.rank[c]] = static_cast<uint16>(c);
  }
  __syncthreads();

  int* order = p.k_order + where.row * p.stride;
#pragma unroll 4
  for (int i = threadIdx.x; i < where.count; i += kSortThreads) {
    const int c = shared.sorted[i];
    order[shared.base[shared.bucket[c]] + i] = where.key(where.first + c);
  }
}

}  // namespace s2o
