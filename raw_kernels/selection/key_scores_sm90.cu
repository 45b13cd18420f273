// key_scores on Hopper, of one pooled query a segment (key_scores.cu has the portable one): by wgmma.
//
//   scores[row, key] = dot product of key with the pooled query of row's segment, times scale_log2, as float16
//
// A block takes kRows (head, segment) rows of one KV head, the rows of the product, 64 a warpgroup, and walks keys,
// kTile at a time, of which kStages tiles are in shared memory. Keys stand there in an order that gives each thread
// eight neighbours to write at once. The product of a tile runs while the scores of the one before are written.
#include "selection/rank_keys_params.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, bool kPaged_>
struct KeyScoresTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8;
  static constexpr bool kPaged = kPaged_;  // k is a paged cache
  static constexpr int kThreads = 256, kRows = 128, kTile = 64, kStages = 4;

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
  constexpr int kRows = Traits::kRows, kTile = Traits::kTile, kStages = Traits::kStages;
  constexpr int kAtATime = Traits::kThreads / Traits::kChunks;  // rows of a tile that the block copies
  const Geometry& g = p.geometry;
  uint32 block = blockIdx.x;
  const int first_row = block % p.row_blocks * kRows;  // side by side, as these read the same keys
  block /= p.row_blocks;
  const int block_tiles = (static_cast<int>(p.chunk.longest_row()) / kTile + p.key_blocks - 1) / p.key_blocks;
  const int first_key = block % p.key_blocks * block_tiles * kTile;
  const int first_head = p.chunk.first_head + static_cast<int>(block / p.key_blocks) * p.chunk.shared_heads;
  const int rows = p.chunk.shared_heads * p.chunk.segments;  // heads fastest, so that a block's prefixes are alike
  const auto head_of = [&](int row) { return first_head + min(row, rows - 1) % p.chunk.shared_heads; };
  const auto segment_of = [&](int row) { return p.chunk.first_segment + min(row, rows - 1) / p.chunk.shared_heads; };
  const auto pair_of = [&](int row) { return static_cast<int64>(head_of(row)) * g.segments() + segment_of(row); };
  // A row's keys from first_key on: no fewer than those of the rows before.
  const auto keys_of = [&](int row) { return (g.is_causal ? g.candidates(segment_of(row)) : g.seqlen_k) - first_key; };
  const int keys = min(block_tiles * kTile, keys_of(first_row + kRows - 1));
  if (keys <= 0) return;
  const int tiles = (keys + kTile - 1) / kTile;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

  const int chunk = threadIdx.x % Traits::kChunks, slot = threadIdx.x / Traits::kChunks;
  const bool inside = chunk * 8 < g.head_dim;
  const int batch = first_head / p.heads;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, first_head % p.heads / (p.heads / p.kv_heads));
  if (!Traits::kPaged) k += first_key * p.k.row;
  if (inside) k += chunk * 8;
  const PagedRows pages{p.k, p.pages, batch, first_key};
  const auto key_row = [&](int key) {
    if constexpr (Traits::kPaged) return k + pages.offset(key);
    return k + key * p.k.row;
  };
  uint32 place[kTile / kAtATime];  // of this thread's chunks in a tile
#pragma unroll
  for (int i = 0; i < kTile / kAtATime; ++i) place[i] = atom_chunk<kTile>(0, row_of_key(slot + i * kAtATime), chunk);
  const auto load = [&](int tile) {
    if (tile >= tiles) return;
    const uint32 to = shared_address(shared.keys[tile % kStages]);
#pragma unroll
    for (int i = 0; i < kTile / kAtATime; ++i) {
      const int key = min(tile * kTile + slot + i * kAtATime, keys - 1);
      cp_async_16_or_zeros(to + place[i], key_row(key), inside);
    }
  };
  load(0);
#pragma unroll
  for (int i = 0; i < kRows / kAtATime; ++i) {
    const int r = slot + i * kAtATime;
    cp_async_16(atom_chunk<kRows>(shared_address(shared.means), r, chunk),
                p.means + pair_of(first_row + r) * Traits::kHeadDim + chunk * 8);
  }
  cp_async_commit();
#pragma unroll
  for (int tile = 1; tile < kStages - 2; ++tile) {
    load(tile);
    cp_async_commit();
  }
  // Everybody's copies of `tile` are there. The product of the tile before may be under way, but everybody has waited
  // for the one before that, whose place is filled anew.
  const auto arrive = [&](int tile) {
    cp_async_wait<kStages - 3>();
    fence_for_wgmma();
    __syncthreads();
    load(tile + kStages - 2);
    cp_async_commit();
  };

  const int group = threadIdx.x / 128, group_row = first_row + group * 64;  // of this warpgroup
  if (group_row >= rows || keys_of(group_row + 63) <= 0) {
    for (int tile = 0; tile < tiles; ++tile) arrive(tile);
    return;
  }
  const auto row_of = [&](int h) { return first_row + warp * 16 + h * 8 + lane / 4; };  // this thread's two
  int end[2];  // of the row's keys, from first_key on; 0 where there is nothing to write
  uint16* target[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    end[h] = row_of(h) < rows ? keys_of(row_of(h)) : 0;
    target[h] = p.scores + p.chunk.place(head_of(row_of(h)), segment_of(row_of(h))) + first_key;
  }

  float d[kTile / 2];  // [rows, keys] of this thread
  const uint32 a = tile_descriptor(shared_address(shared.means) + group * (64 * 128), 0);
  const auto multiply = [&](int tile) {
    const uint32 b = tile_descriptor(shared_address(shared.keys[tile % kStages]), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c)
      Wgmma<Element>::ss(d, descriptor_at(a, atom_columns<kRows>(c)), descriptor_at(b, atom_columns<kTile>(c)), c > 0);
    wgmma_commit();
  };
  arrive(0);
  multiply(0);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    if (tile + 1 < tiles) arrive(tile + 1);
    wgmma_wait<0>();
    finished(d);
    uint32 packed[2][kTile / 8];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int pair = 0; pair < kTile / 8; ++pair) {
        const auto x = [&](int i) { return d[i / 2 * 4 + 2 * h + i % 2]; };
        packed[h][pair] = Float16::pack(x(2 * pair) * p.scale_log2, x(2 * pair + 1) * p.scale_log2);
      }
    }
    __syncwarp();  // the last stores were not of all lanes
    multiply(tile + 1);  // past the last tile: of old keys, for nobody, as the compiler waits behind a branch
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int j = 0; j < kTile / 8; j += 4) {
        const int key = tile * kTile + j * 8 + lane % 4 * 8;
        // What is past the end of the row's candidates is never read.
        if (key < end[h])
          store_global_16(target[h] + key, packed[h][j], packed[h][j + 1], packed[h][j + 2], packed[h][j + 3]);
      }
  }
  wgmma_wait<0>();
}

}  // namespace s2o
