// How the threads of a producer gather rows into a tile in shared memory.
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

// Which rows of a tile of up to 128 a producer thread copies: kLanes threads a row, kRows rows of a warp at a time.
// Each lane also keeps where one of the rows its kLanes threads copy lies, and the others get it by a shuffle.
template <class Traits>
struct CopyLayout {
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kLanes = kHeadDim / 8;
  static constexpr int kRows = 32 / kLanes;
  static constexpr bool kFlips = kRows == 1;  // a pass is 4 rows further: every other one is swizzled otherwise

  uint32 target;  // of this thread's first chunk in a tile of keys
  int chunk;      // its offset in a row, in elements
  bool inside;    // of head_dim

  __device__ __forceinline__ explicit CopyLayout(int head_dim) {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    const int row = thread / 32 * kRows + lane / kLanes, c = lane % kLanes;
    target = c / 8 * Traits::kColumnsStride + row / 8 * Traits::kRowsStride + row % 8 * 128 + ((c % 8 ^ (row & 7)) << 4);
    inside = c * 8 < head_dim;
    chunk = inside ? c * 8 : 0;
  }
  // Bytes from a pass's rows to those of number `pass`, where kStride bytes lie between 8 rows and the next 8.
  template <int kStride>
  static __device__ __forceinline__ constexpr uint32 pass_bytes(int pass) {
    return pass * 4 * kRows / 8 * kStride + pass * 4 * kRows % 8 * 128;
  }
  // The same in a tile of queries, which are in atoms of 64 columns.
  __device__ __forceinline__ uint32 query_target() const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    const int row = thread / 32 * kRows + lane / kLanes;
    const int rows_apart = row / 8 * (kEightRows - Traits::kRowsStride);
    return target + threadIdx.x % kLanes / 8 * (Traits::kQueryAtom - Traits::kColumnsStride) + rows_apart;
  }
  // The row of which this lane keeps it.
  static __device__ __forceinline__ int kept_row() {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    return lane % kLanes * (4 * kRows) + thread / 32 * kRows + lane / kLanes;
  }
  // Starts the copy of kTileRows rows of queries (kOfQueries) or of keys; `kept`: where this lane's row lies (RowUnits), or
  // kNoRow for zeros, which kFull excludes.
  template <int kTileRows, bool kOfQueries, bool kFull>
  __device__ __forceinline__ void gather(uint32 tile, const uint16* data, uint32 kept) const {
    uint64 base = __cvta_generic_to_global(data + chunk);
    asm volatile("" : "+l"(base));  // one address, not the terms of a sum: a row's is then one multiply-add away
#pragma unroll
    for (int pass = 0; pass < kTileRows / (4 * kRows); ++pass) {
      const uint32 units = __shfl_sync(kFullWarp, kept, pass, kLanes);
      const uint32 first = tile + (kOfQueries ? query_target() : target);
      const uint32 further = pass_bytes<kOfQueries ? kEightRows : Traits::kRowsStride>(pass);
      const uint32 to = (kFlips && pass % 2 ? first ^ 4 * 16 : first) + further;
      if (kFull) {
        cp_async_16(to, reinterpret_cast<const void*>(base + units * 16ull));
      } else {
        const bool present = units != kNoRow && inside;
        cp_async_16_or_zeros(to, reinterpret_cast<const void*>(base + (present ? units : 0) * 16ull), present);
      }
    }
  }
  template <int kTileRows, bool kOfQueries>
  __device__ __forceinline__ void gather(uint32 tile, const uint16* data, uint32 kept, bool full) const {
    if (full) {
      gather<kTileRows, kOfQueries, true>(tile, data, kept);
    } else {
      gather<kTileRows, kOfQueries, false>(tile, data, kept);
    }
  }
  __device__ __forceinline__ void gather_keys(uint32 tile, const uint16* data, uint32 kept, bool full) const {
    gather<Traits::kBlockN, false>(tile, data, kept, full);
  }
  __device__ __forceinline__ void gather_queries(uint32 tile, const uint16* data, uint32 kept, bool full) const {
    gather<Traits::kBlockM, true>(tile, data, kept, full);
  }
};

}  // namespace sm90
}  // namespace s2o
