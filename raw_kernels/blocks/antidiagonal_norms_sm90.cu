// antidiagonal_norms on Hopper (antidiagonal_norms.cu has the portable one): by wgmma.
//
//   norms[head, cell of queries, block of keys] = log2 of the sum of the weights of the block's cells that the cell sees
//
// A block takes kRows cells of queries of a head, 128 a warpgroup, and walks all cells of keys that these see, kTile at a
// time. A tile's product is over kStride * head_dim columns, 64 of which are in shared memory at a time, in kStages
// stages that run through all tiles: the copies of a step are started while the product of the one before runs.
#include "blocks/antidiagonal.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kStride_>
struct AntidiagonalTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kStride = kStride_;
  static constexpr int kThreads = 256, kRows = 256, kTile = 128, kStages = 4;
  static constexpr int kColumns = 64;  // of a step
  static constexpr int kSteps = kStride * kHeadDim / kColumns;  // of a tile

  struct Shared {
    uint16 q[kStages][kRows * kColumns];
    uint16 k[kStages][kTile * kColumns];
    int64 place[kRows];  // of a cell's norms
    int seen[kRows];     // cells of keys
  };
};

template <class Traits>
__device__ __forceinline__ void antidiagonal_norms_sm90(const AntidiagonalParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kStride = Traits::kStride, kRows = Traits::kRows, kTile = Traits::kTile, kStages = Traits::kStages;
  constexpr int kSteps = Traits::kSteps, kParts = Traits::kHeadDim / 64;  // steps of a row of queries
  constexpr int kOfBlock = Cells<kStride>::kOfBlock;
  constexpr int kCopied = Traits::kThreads / 8;  // rows that the block copies at a time
  const Cells<kStride> cells{p};
  const int q_cells = cells.of_queries();
  const CellTile tile = cell_tile<kRows>(p, q_cells, blockIdx.x);
  const int head = p.first_head + tile.head, batch = head / p.heads, kv_head = head % p.heads / (p.heads / p.kv_heads);
  const int last = min(tile.first + kRows, q_cells) - 1;
  const int tiles = (cells.seen(last) + kTile - 1) / kTile;
  if (tiles == 0) return;
  if (const int i = threadIdx.x; i < kRows) {
    shared.seen[i] = tile.first + i < q_cells ? cells.seen(tile.first + i) : 0;
    shared.place[i] = cells.place(tile.first + i);
  }

  const int chunk = threadIdx.x % 8, slot = threadIdx.x / 8;
  const uint16* q = p.q.at(batch, head % p.heads);
  const uint16* k = p.k.at(batch, kv_head) + chunk * 8;
  const int first_query = (tile.first + slot) * kStride;  // of the first row that this thread copies
  q += first_query * p.q.row + chunk * 8;
  const int* order = p.order;
  if (order != nullptr)
    order += (batch * p.order_heads + head % p.heads / (p.heads / p.order_heads)) * static_cast<int64>(p.grid.seqlen_k);
  float* norms = cells.norms(tile.head);
  const uint32 place = atom_chunk<kRows>(0, slot, chunk);  // further rows of this thread are kCopied * 128 bytes on
  const auto load = [&](int step) {
    if (step < tiles * kSteps) {
      const int r = step % kSteps / kParts, part = step % kParts * 64, back = kStride - 1 - r;
      const bool inside = part + chunk * 8 < p.head_dim;
      const uint32 to_q = shared_address(shared.q[step % kStages]) + place;
      const uint16* from_q = q + back * p.q.row + part;
#pragma unroll
      for (int i = 0; i < kRows / kCopied; ++i) {
        const bool present = inside && first_query + i * (kCopied * kStride) + back < p.grid.seqlen_q;
        cp_async_16_or_zeros(to_q + i * (kCopied * 128), present ? from_q + i * (kCopied * kStride) * p.q.row : q,
                             present);
      }
      const uint32 to_k = shared_address(shared.k[step % kStages]) + place;
      const int first_key = (step / kSteps * kTile + slot) * kStride + r;
#pragma unroll
      for (int i = 0; i < kTile / kCopied; ++i) {
        const int key = first_key + i * (kCopied * kStride);
        const bool present = inside && key < p.grid.seqlen_k;
        const int64 at = !present ? 0 : order == nullptr ? key : order[key];
        cp_async_16_or_zeros(to_k + i * (kCopied * 128), present ? k + at * p.k.row + part : k, present);
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < kStages - 2; ++step) load(step);

  const int group = threadIdx.x / 128, lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  float d[2][64];  // two products of 64 rows
  for (int t = 0; t < tiles; ++t) {
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s) {
      const int step = t * kSteps + s;
      cp_async_wait<kStages - 3>();
      fence_for_wgmma();
      __syncthreads();  // everybody's copies are there, and everybody has waited for the product two steps before
      const uint32 a = tile_descriptor(shared_address(shared.q[step % kStages]) + group * (128 * 128), 0);
      const uint32 b = tile_descriptor(shared_address(shared.k[step % kStages]), 0);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        Wgmma<Element>::ss(d[0], descriptor_at(a, c * 32), descriptor_at(b, c * 32), s + c > 0);
        Wgmma<Element>::ss(d[1], descriptor_at(a, 64 * 128 + c * 32), descriptor_at(b, c * 32), s + c > 0);
      }
      wgmma_commit();
      load(step + kStages - 2);
      wgmma_wait<1>();
    }
    wgmma_wait<0>();
    const int first = t * kTile;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = group * 128 + i * 64 + warp_row + h * 8, left = shared.seen[row] - first;
        float x[kTile / 8][2];
#pragma unroll
        for (int j = 0; j < kTile / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            x[j][e] = j * 8 + e < left - lane % 4 * 2 ? d[i][j * 4 + 2 * h + e] * p.scale_log2 : -infinity();
        row_norms<kOfBlock / 8>(x, norms + shared.place[row] + first / kOfBlock, (left + kOfBlock - 1) / kOfBlock);
      }
  }
  cp_async_wait<0>();
}

}  // namespace s2o
