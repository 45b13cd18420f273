// key_scores on Hopper, of one representative a segment (rank_keys.cu has the portable one): by wgmma.
//
//   scores[row, key] = dot product of key with the representative of row's segment, times scale_log2, as float16
//
// A block of one warpgroup takes kRows (head, segment) rows of one KV head, the rows of the product, and walks keys,
// kTile at a time. Keys stand in shared memory in an order that gives each thread eight neighbours to write at once.
#include "rank_keys_params.cuh"
#include "sortable.cuh"
#include "wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct KeyScoresTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8;
  static constexpr int kThreads = 128, kRows = 64, kTile = 128, kTiles = 8, kStages = 2;

  struct Shared {
    uint16 means[kRows * kHeadDim];
    uint16 keys[kStages][kTile * kHeadDim];
  };
};

// Where key i of a tile stands: wgmma gives a thread columns 2 t, 2 t + 1 of each 8, which are then keys 8 t .. 8 t + 7
// of each 32.
__device__ __forceinline__ int row_of_key(int i) { return (i & ~31) + (i & 6) * 4 + (i & 24) / 4 + (i & 1); }

template <class Traits>
__device__ __forceinline__ void key_scores_sm90(const RankKeysParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kRows = Traits::kRows, kTile = Traits::kTile, kAtATime = Traits::kThreads / Traits::kChunks;
  const Geometry& g = p.geometry;
  uint32 block = blockIdx.x;
  const int first_row = block % p.row_blocks * kRows;  // side by side, as these read the same keys
  block /= p.row_blocks;
  const int key_block = block % p.key_blocks;
  const int first_head = p.chunk.first_head + static_cast<int>(block / p.key_blocks) * p.chunk.shared_heads;
  const int rows = p.chunk.shared_heads * p.chunk.segments;  // heads fastest, so that a block's prefixes are alike
  const int last_segment = p.chunk.first_segment + min(first_row + kRows - 1, rows - 1) / p.chunk.shared_heads;
  const int first_key = key_block * Traits::kTiles * kTile;
  // Keys that some row of the block has as candidates.
  const int keys = min(Traits::kTiles * kTile, (g.is_causal ? g.candidates(last_segment) : g.seqlen_k) - first_key);
  if (keys <= 0) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = threadIdx.x % Traits::kChunks, slot = threadIdx.x / Traits::kChunks;
  const auto pair_of = [&](int row) {  // (head, segment), flattened
    row = min(row, rows - 1);
    return static_cast<int64>(first_head + row % p.chunk.shared_heads) * g.segments() + p.chunk.first_segment +
           row / p.chunk.shared_heads;
  };

#pragma unroll
  for (int r = slot; r < kRows; r += kAtATime)
    cp_async_16(atom_chunk<kRows>(shared_address(shared.means), r, chunk),
                p.means + pair_of(first_row + r) * Traits::kHeadDim + chunk * 8);
  const uint16* k = p.k.at(first_head / p.heads, first_head % p.heads / (p.heads / p.kv_heads)) + first_key * p.k.row;
  const int tiles = (keys + kTile - 1) / kTile;
  const auto load = [&](int tile) {
    if (tile < tiles) {
#pragma unroll
      for (int i = slot; i < kTile; i += kAtATime) {
        const int key = tile * kTile + i;
        const bool present = key < keys && chunk * 8 < g.head_dim;
        cp_async_16_or_zeros(atom_chunk<kTile>(shared_address(shared.keys[tile % 2]), row_of_key(i), chunk),
                             present ? k + key * p.k.row + chunk * 8 : k, present);
      }
    }
    cp_async_commit();
  };
  load(0);

  // This thread's rows: lane / 4 and lane / 4 + 8 of the warp's 16.
  bool valid[2];
  int end[2], dense_begin[2], dense_end[2];  // keys from first_key on
  uint16* target[2];
  float largest[2] = {-infinity(), -infinity()}, smallest[2] = {infinity(), infinity()};
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = first_row + warp * 16 + h * 8 + lane / 4;
    const int64 pair = pair_of(row);
    const int n = static_cast<int>(pair % g.segments()), head = static_cast<int>(pair / g.segments());
    valid[h] = row < rows && !(p.fine && p.fine[pair]);
    end[h] = (g.is_causal ? g.candidates(n) : g.seqlen_k) - first_key;
    dense_begin[h] = g.dense_begin(n) - first_key;
    dense_end[h] = g.dense_end(n) - first_key;
    target[h] = p.scores + p.chunk.row(head, n) * p.stride + first_key;
  }

#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<0>();
    fence_for_wgmma();
    __syncthreads();  // everybody's copies are there, and nobody multiplies with the other tile any more
    load(tile + 1);
    float d[64];  // [rows, keys] of this thread
    const uint32 a = tile_descriptor(shared_address(shared.means), 0);
    const uint32 b = tile_descriptor(shared_address(shared.keys[tile % 2]), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c)
      Wgmma<Element>::ss(d, descriptor_at(a, atom_columns<kRows>(c)), descriptor_at(b, atom_columns<kTile>(c)), c > 0);
    wgmma_commit();
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < 64; ++i) d[i] *= p.scale_log2;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (!valid[h]) continue;
      const bool whole = g.is_causal && (tile + 1) * kTile <= end[h];  // all keys are candidates
#pragma unroll
      for (int j = 0; j < kTile / 32; ++j) {
        const int key = tile * kTile + j * 32 + lane % 4 * 8;
        const auto x = [&](int i) { return d[16 * j + i / 2 * 4 + 2 * h + i % 2]; };
        // What is past the end of the row's candidates is never read.
        if (key < end[h])
          *reinterpret_cast<uint4*>(target[h] + key) = make_uint4(Float16::pack(x(0), x(1)), Float16::pack(x(2), x(3)),
                                                                  Float16::pack(x(4), x(5)), Float16::pack(x(6), x(7)));
        if (whole) {
#pragma unroll
          for (int i = 0; i < 8; ++i)
            if (finite_score(x(i))) {
              largest[h] = fmaxf(largest[h], x(i));
              smallest[h] = fminf(smallest[h], x(i));
            }
        } else {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            const int at = key + i;
            const bool candidate = at < end[h] && (g.is_causal || at < dense_begin[h] || at >= dense_end[h]);
            if (candidate && finite_score(x(i))) {
              largest[h] = fmaxf(largest[h], x(i));
              smallest[h] = fminf(smallest[h], x(i));
            }
          }
        }
      }
    }
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
      grow_range(p.range + (target[h] - first_key - p.scores) / p.stride, largest[h], smallest[h]);
  }
}

}  // namespace s2o
