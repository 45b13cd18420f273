// Scores of a segment's candidates (the paper's Algorithm 1, lines 15-18).
//
//   key_scores: scores[row, key] = the largest dot product of key with a pooled query of row's segment, a small
//               matrix product on tensor cores, as log2 of a softmax weight in float16
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
#include "sm80/attention.cuh"
#include "selection/rank_keys_params.cuh"
#include "selection/sortable.cuh"

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
    valid[h] = first_row + static_cast<int>(threadIdx.x) / 32 * 16 + h * 8 + lane / 4 < rows;

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
  // Fragments of a pooled query: a[16 rows, 16 dims] for each 16 dims.
  uint32 mean[Traits::kHeadDim / 16][4];
  const auto load_pooled_query = [&](int r) {
    const uint32* from[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64 row = (static_cast<int64>(head[h]) * g.segments() + segment[h]) * p.pooled_queries +
                        (r * p.run < g.query_count(segment[h]) ? r : 0);
      from[h] = reinterpret_cast<const uint32*>(p.means + row * Traits::kHeadDim) + lane % 4;
    }
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) mean[c][i] = from[i % 2][c * 8 + i / 2 * 4];
  };

  load(0);
  load_pooled_query(0);
  for (int step = 0; step < steps; ++step) {
    load(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    float best[kKeyTiles][4];  // [rows, keys] of this thread
    for (int r = 0; r < p.pooled_queries; ++r) {
      if (p.pooled_queries > 1) load_pooled_query(r);
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
      uint16* target = p.scores + p.chunk.place(head[h], segment[h]);
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const int key = first_key + step * kStep + j * 8 + lane % 4 * 2;
        if (key < end)
          *reinterpret_cast<uint32*>(target + key) =
              Float16::pack(best[j][2 * h] * p.scale_log2, best[j][2 * h + 1] * p.scale_log2);
      }
    }
    __syncthreads();  // every warp is done with this buffer
  }
  cp_async_wait<0>();
}

}  // namespace s2o
