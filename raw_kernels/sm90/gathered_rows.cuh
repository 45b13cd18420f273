// How the threads of a producer gather rows into a tile in shared memory.
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

// Which rows of a tile of up to 128 a producer thread copies: kLanes threads a row, kRows rows of a warp at a time.
// Threads are numbered by threadIdx.x % kWarpgroup, wherever in the block the producer stands. Each lane also keeps
// where rows kept_row(), kept_row() + kKeptRows and so on lie, and the others get it by a shuffle.
template <class Traits>
struct CopyLayout {
  static constexpr int kHeadDim = Traits::kHeadDim;
  static constexpr int kLanes = kHeadDim / 8;
  static constexpr int kRows = 32 / kLanes;
  static constexpr int kPassRows = Traits::kProducerThreads / 32 * kRows;  // that all threads copy at a time
  static constexpr int kKeptRows = kPassRows * kLanes;
  static constexpr bool kFlips = kPassRows % 8 != 0;  // every other pass is swizzled otherwise
  static constexpr int kKeptOfKeys = (Traits::kBlockN + kKeptRows - 1) / kKeptRows;  // rows of a tile that a lane keeps
  static constexpr int kKeptOfQueries = (Traits::kBlockM + kKeptRows - 1) / kKeptRows;

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
    return pass * kPassRows / 8 * kStride + pass * kPassRows % 8 * 128;
  }
  // The same in a tile of queries, which are in atoms of 64 columns.
  __device__ __forceinline__ uint32 query_target() const {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    const int row = thread / 32 * kRows + lane / kLanes;
    const int rows_apart = row / 8 * (kEightRows - Traits::kRowsStride);
    return target + threadIdx.x % kLanes / 8 * (Traits::kQueryAtom - Traits::kColumnsStride) + rows_apart;
  }
  // The first row that this lane keeps.
  static __device__ __forceinline__ int kept_row() {
    const int thread = threadIdx.x % kWarpgroup, lane = thread % 32;
    return lane % kLanes * kPassRows + thread / 32 * kRows + lane / kLanes;
  }
  // Starts the copy of kTileRows rows of queries (kQueries) or of keys; `kept`: where this lane's rows lie (RowUnits),
  // or kNoRow for zeros, which kFull excludes.
  template <int kTileRows, bool kQueries, bool kFull, int kKept>
  __device__ __forceinline__ void gather(uint32 tile, const uint16* data, const uint32 (&kept)[kKept]) const {
    uint64 base = __cvta_generic_to_global(data + chunk);
    asm volatile("" : "+l"(base));  // one address, not the terms of a sum: a row's is then one multiply-add away
#pragma unroll
    for (int pass = 0; pass < kTileRows / kPassRows; ++pass) {
      const uint32 units = __shfl_sync(kFullWarp, kept[pass / kLanes], pass % kLanes, kLanes);
      const uint32 first = tile + (kQueries ? query_target() : target);
      const uint32 further = pass_bytes<kQueries ? kEightRows : Traits::kRowsStride>(pass);
      const uint32 to = (kFlips && pass % 2 ? first ^ 4 * 16 : first) + further;
      if (kFull) {
        cp_async_16(to, reinterpret_cast<const void*>(base + units * 16ull));
      } else {
        const bool present = units != kNoRow && inside;
        cp_async_16_or_zeros(to, reinterpret_cast<const void*>(base + (present ? units : 0) * 16ull), present);
      }
    }
  }
  template <int kTileRows, bool kQueries, int kKept>
  __device__ __forceinline__ void gather(uint32 tile, const uint16* data, const uint32 (&kept)[kKept],
                                         bool full) const {
    if (full) {
      gather<kTileRows, kQueries, true>(tile, data, kept);
    } else {
      gather<kTileRows, kQueries, false>(tile, data, kept);
    }
  }
  __device__ __forceinline__ void gather_keys(uint32 tile, const uint16* data, const uint32 (&kept)[kKeptOfKeys],
                                              bool full) const {
    gather<Traits::kBlockN, false>(tile, data, kept, full);
  }
  __device__ __forceinline__ void gather_queries(uint32 tile, const uint16* data, const uint32 (&kept)[kKeptOfQueries],
                                                 bool full) const {
    gather<Traits::kBlockM, true>(tile, data, kept, full);
  }
  // Where a lane keeps one row.
  __device__ __forceinline__ void gather_keys(uint32 tile, const uint16* data, uint32 kept, bool full) const {
    const uint32 one[1] = {kept};
    gather_keys(tile, data, one, full);
  }
};

}  // namespace sm90
}  // namespace s2o
