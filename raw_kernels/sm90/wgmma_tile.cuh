// Tiles of 16-bit elements in shared memory as wgmma reads them, and how rows get there.
#pragma once
#include "sm90/hopper.cuh"

namespace s2o {

// A tile of kRows rows stands in atoms of 64 columns, 128-byte rows: the 16-byte chunk c of row r is at c ^ (r & 7).
template <int kRows>
__device__ __forceinline__ uint32 atom_chunk(uint32 tile, int row, int chunk) {
  return tile + chunk / 8 * (kRows * 128) + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
}

// From a tile's first 16 columns to the `c`-th 16, in bytes.
template <int kRows>
__device__ __forceinline__ constexpr uint32 atom_columns(int c) {
  return c / 4 * (kRows * 128) + c % 4 * 32;
}

}  // namespace s2o
