// Softmax norms of antidiagonal scores, for XAttention and PBS-Attn+: a matrix product on tensor cores.
//
//   antidiagonal_norms: norms[head, cell of queries, block of keys] = log2 of the sum of the weights of the block's
//                       cells that the cell sees
//
// A block takes kRows cells of queries of a head and walks all cells of keys that these see, kTile at a time. A tile's
// product is over kStride * head_dim columns, 64 of which are in shared memory at a time, in kStages stages that run
// through all tiles.
#include "methods/antidiagonal.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kStride_, bool kAligned_>
struct AntidiagonalTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kStride = kStride_;
  static constexpr bool kAligned = kAligned_;  // every row of q and k starts on 16 bytes
  static constexpr int kThreads = 256, kRows = 128, kTile = 128, kStages = 3;
  static constexpr int kColumns = 64;  // of a step
  static constexpr int kSteps = kStride * kHeadDim / kColumns;  // of a tile

  struct Shared {
    uint16 q[kStages][kRows * kColumns];
    uint16 k[kStages][kTile * kColumns];
    int64 place[kRows];  // of a cell's norms
    int seen[kRows];     // cells of keys
  };
};

// Rows of 64 columns, 128 bytes: the 16-byte chunk c of row r stands at c ^ (r & 7).
__device__ __forceinline__ uint32 cell_chunk(uint32 tile, int row, int chunk) {
  return tile + row * 128 + ((chunk ^ (row & 7)) << 4);
}

template <class Traits>
__device__ __forceinline__ void antidiagonal_norms(const AntidiagonalParams& p, typename Traits::Shared& shared) {
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

  const uint16* q = p.q.at(batch, head % p.heads);
  const uint16* k = p.k.at(batch, kv_head);
  const int* order = p.order;
  if (order != nullptr)
    order += (batch * p.order_heads + head % p.heads / (p.heads / p.order_heads)) * static_cast<int64>(p.grid.seqlen_k);
  const int chunk = threadIdx.x % 8, slot = threadIdx.x / 8;
  float* norms = cells.norms(tile.head);
  const auto copy = [&](uint32 to, const uint16* row, int column, bool present) {
    if constexpr (Traits::kAligned) {
      present = present && column < p.head_dim;
      cp_async_16_or_zeros(to, present ? row + column : row, present);
    } else {
      store_shared_16(to, present ? load_unaligned(row, column, p.head_dim) : make_uint4(0, 0, 0, 0));
    }
  };
  const auto load = [&](int step) {
    if (step < tiles * kSteps) {
      const int r = step % kSteps / kParts, column = step % kParts * 64 + chunk * 8, first = step / kSteps * kTile;
      const uint32 to_q = shared_address(shared.q[step % kStages]), to_k = shared_address(shared.k[step % kStages]);
#pragma unroll
      for (int i = 0; i < kRows / kCopied; ++i) {
        const int row = slot + i * kCopied, query = (tile.first + row) * kStride + kStride - 1 - r;
        const bool present = query < p.grid.seqlen_q;
        copy(cell_chunk(to_q, row, chunk), q + (present ? query * p.q.row : 0), column, present);
      }
#pragma unroll
      for (int i = 0; i < kTile / kCopied; ++i) {
        const int row = slot + i * kCopied, key = (first + row) * kStride + r;
        const bool present = key < p.grid.seqlen_k;
        const int64 at = !present ? 0 : order == nullptr ? key : order[key];
        copy(cell_chunk(to_k, row, chunk), k + at * p.k.row, column, present);
      }
    }
    cp_async_commit();
  };

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_row = warp % 4 * 32, warp_cell = warp / 4 * 64;  // of the warp's part of a tile's product
  float s[2][8][4];
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load(step);
  for (int step = 0; step < tiles * kSteps; ++step) {
    if (step % kSteps == 0) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
    }
    cp_async_wait<kStages - 2>();
    __syncthreads();  // everybody's copies are there, and everybody is done with the place that is filled next
    load(step + kStages - 1);
    const uint32 of_q = shared_address(shared.q[step % kStages]), of_k = shared_address(shared.k[step % kStages]);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      uint32 a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) ldmatrix_x4(a[i], cell_chunk(of_q, warp_row + i * 16 + lane % 16, c * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32 b[4];
        ldmatrix_x4(b, cell_chunk(of_k, warp_cell + j * 8 + lane % 8 + lane / 16 * 8, c * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Element::mma(s[i][j], a[i], b[0], b[1]);
          Element::mma(s[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
    if ((step + 1) % kSteps != 0) continue;
    const int first = step / kSteps * kTile + warp_cell, block = first / kOfBlock;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = warp_row + i * 16 + h * 8 + lane / 4, left = shared.seen[row] - first;
        float x[8][2];
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            x[j][e] = j * 8 + e < left - lane % 4 * 2 ? s[i][j][2 * h + e] * p.scale_log2 : -infinity();
        row_norms<kOfBlock / 8>(x, norms + shared.place[row] + block, (left + kOfBlock - 1) / kOfBlock);
      }
  }
  cp_async_wait<0>();
}

}  // namespace s2o
