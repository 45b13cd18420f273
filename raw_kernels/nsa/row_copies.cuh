// Copies of the rows of a tile of keys or values to shared memory, for wgmma.
#pragma once
#include "nsa/params.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

// By kThreads threads, of which each has 16 bytes of the rows slot + i * kAtATime.
template <int kHeadDim, int kTile, int kThreads>
struct RowCopies {
  static constexpr int kChunks = kHeadDim / 8, kAtATime = kThreads / kChunks;
  static_assert(kAtATime % 8 == 0, "neighbours among a thread's rows would be swizzled differently");
  static_assert(kTile % kAtATime == 0, "the last rows would be left out");
  int chunk, slot, head_dim;
  uint32 place;  // of the thread's first row, from the tile's begin

  __device__ __forceinline__ RowCopies(int thread, int head_dim_)
      : chunk(thread % kChunks), slot(thread / kChunks), head_dim(head_dim_), place(atom_chunk<kTile>(0, slot, chunk)) {}
  __device__ __forceinline__ bool inside() const { return chunk * 8 < head_dim; }

  // `rows`: those of x, of the tile's head; `key`: of the thread's first row, and `apart` more of each next one. Those from
  // `end` on, and columns from head_dim on, become zeros. `whole`: there are none in the tile.
  __device__ __forceinline__ void load(uint32 tile, const Tensor<const uint16>& x, const uint16* rows, int key, int apart,
                                       int end, bool whole) const {
    const uint32 to = tile + place;
    const uint16* from = rows + key * x.row + chunk * 8;
    const int64 step = apart * x.row;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kTile / kAtATime; ++i, from += step) cp_async_16(to + i * kAtATime * 128, from);
    } else {
#pragma unroll 1
      for (int i = 0; i < kTile / kAtATime; ++i, from += step) {
        const bool present = inside() && key + i * apart < end;
        cp_async_16_or_zeros(to + i * kAtATime * 128, present ? from : rows, present);
      }
    }
  }
};

}  // namespace s2o
