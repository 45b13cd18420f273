// antidiagonal_norms on Hopper (antidiagonal_norms.cu has the portable one): by wgmma.
//
//   norms[head, cell of queries, block of keys] = log2 of the sum of the weights of the block's cells that the cell sees
//
// As many blocks as run at once walk the tiles of the product, kRows cells of queries, 128 a warpgroup, by kTile cells of
// keys. Those under way at a time are kGroup tiles of rows by some of columns, whose cells L2 holds. A tile's product is
// over kStride * head_dim columns, 64 of which are in shared memory at a time, in kStages stages that run through all
// tiles: the copies of a step are started while the product of the one before runs.
#include "methods/antidiagonal_sm90.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kStride_>
struct AntidiagonalTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kStride = kStride_;
  static constexpr int kThreads = 256, kRows = 256, kTile = 192, kStages = 4;
  static constexpr int kColumns = 64;  // of a step
  static constexpr int kSteps = kStride * kHeadDim / kColumns;  // of a tile
  static constexpr int kGroup = 4;     // tiles of rows that take turns

  struct Shared {
    uint16 q[kStages][kRows * kColumns];
    uint16 k[kStages][kTile * kColumns];
  };
};

template <class Traits>
__device__ __forceinline__ void antidiagonal_norms_sm90(const AntidiagonalParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kStride = Traits::kStride, kRows = Traits::kRows, kTile = Traits::kTile, kStages = Traits::kStages;
  constexpr int kSteps = Traits::kSteps, kParts = Traits::kHeadDim / 64;  // steps of a row of queries
  constexpr int kCopied = Traits::kThreads / 8;  // rows that the block copies at a time
  TileWalk<Traits> walk(p, blockIdx.x, gridDim.x, p.round_heads), ahead(walk);  // of the products, and of the copies
  if (walk.done()) return;

  const int chunk = threadIdx.x % 8, slot = threadIdx.x / 8;
  const uint32 place = atom_chunk<kRows>(0, slot, chunk);  // further rows of this thread are kCopied * 128 bytes on
  const uint16 *q, *k;  // of the tile that is copied: this thread's first row, and the first key
  const int* order;
  int loaded = 0, slice = 0;  // steps of all tiles, and of the tile
  const auto load = [&] {
    if (!ahead.done()) {
      if (slice == 0) {
        const int head = p.first_head + ahead.head, batch = head / p.heads, of_sequence = head % p.heads;
        q = p.q.at(batch, of_sequence) + (ahead.first_row + slot) * kStride * p.q.row + chunk * 8;
        k = p.k.at(batch, of_sequence / (p.heads / p.kv_heads)) + chunk * 8;
        order = p.order;
        if (order != nullptr)
          order += (batch * p.order_heads + of_sequence / (p.heads / p.order_heads)) * static_cast<int64>(p.grid.seqlen_k);
      }
      const int r = slice / kParts, part = slice % kParts * 64, back = kStride - 1 - r;
      const bool inside = part + chunk * 8 < p.head_dim;
      const uint32 to_q = shared_address(shared.q[loaded % kStages]) + place;
      const uint16* from_q = q + back * p.q.row + part;
      const int left = p.grid.seqlen_q - (ahead.first_row + slot) * kStride - back;
#pragma unroll
      for (int i = 0; i < kRows / kCopied; ++i) {
        const bool present = inside && i * (kCopied * kStride) < left;
        cp_async_16_or_zeros(to_q + i * (kCopied * 128), present ? from_q + i * (kCopied * kStride) * p.q.row : k,
                             present);
      }
      const uint32 to_k = shared_address(shared.k[loaded % kStages]) + place;
      const int first_key = (ahead.first_key + slot) * kStride + r;
#pragma unroll
      for (int i = 0; i < kTile / kCopied; ++i) {
        const int key = first_key + i * (kCopied * kStride);
        const bool present = inside && key < p.grid.seqlen_k;
        const int64 at = !present ? 0 : order == nullptr ? key : order[key];
        cp_async_16_or_zeros(to_k + i * (kCopied * 128), present ? k + at * p.k.row + part : k, present);
      }
      ++loaded;
      if (++slice == kSteps) {
        slice = 0;
        ahead.next();
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kStages - 2; ++i) load();

  const int group = threadIdx.x / 128;
  float d[2][kTile / 2];  // two products of 64 rows
  int step = 0;
  for (; !walk.done(); walk.next()) {
#pragma unroll 1
    for (int s = 0; s < kSteps; ++s, ++step) {
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
      load();
      wgmma_wait<1>();
    }
    wgmma_wait<0>();
    finished(d[0]);
    finished(d[1]);
    write_norms<Traits>(p, walk.head, walk.first_row + group * 128, walk.first_key, d);
  }
  cp_async_wait<0>();
}

}  // namespace s2o
