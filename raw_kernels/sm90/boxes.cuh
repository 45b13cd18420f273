// How the copy engine brings a tile in shared memory by boxes of whole rows, each from a place of its own.
//
// Rows that threads gather, 16 bytes each, arrive at 32 bytes a cycle and hold up products' reads of shared memory; boxes
// do neither (docs/notebook/passes.md).
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

constexpr int kPastRows = 0x40000000;  // past the rows of any array

// A lane asks for a box, neighbouring keys of a unit. Each warp asks for a quarter of them: several ask faster than one.
template <class Traits>
struct BoxCopies {
  static constexpr int kBoxes = Traits::kBlockN / Traits::kBoxKeys / (kWarpgroup / 32);  // of a warp
  static constexpr uint32 kBoxBytes = Traits::kBoxKeys * Traits::kHeadDim * 2;
  static __device__ __forceinline__ int box() { return threadIdx.x / 32 * kBoxes + threadIdx.x % 32 % kBoxes; }
  // The first key of this lane's box.
  static __device__ __forceinline__ int kept_row() { return box() * Traits::kBoxKeys; }
  // The lane's box comes from position `key` on; past the array's end come zeros.
  static __device__ __forceinline__ void bring(const uint16* tile, const TensorMap& map, uint64& full, int key,
                                               int kv_head, int batch) {
    const int lane = threadIdx.x % 32;
    if (lane == 0) barrier_expect(full, kBoxes * kBoxBytes);
    if (lane < kBoxes) copy_box(shared_address(tile) + box() * kBoxBytes, map, full, 0, key, 0, kv_head, batch);
  }
  // The same of values where a list ends within a box, in which `there` rows count, of boxes behind it none or fewer: zeros
  // stand in place of its others, as 0 times a NaN would be one. The warp gathers that box, whose `rows` lie `stride`
  // elements apart, and waits for it.
  static __device__ __forceinline__ void bring_cut(const uint16* tile, const TensorMap& map, uint64& full, int key,
                                                   int kv_head, int batch, int there, const uint16* rows, int64 stride) {
    const int lane = threadIdx.x % 32;
    const bool is_cut = there > 0 && there < Traits::kBoxKeys;
    const uint32 cut = __ballot_sync(kFullWarp, lane < kBoxes && is_cut);
    if (cut != 0) {
      const int of = __ffs(cut) - 1, first = __shfl_sync(kFullWarp, box(), of) * Traits::kBoxKeys;
      const int from = __shfl_sync(kFullWarp, key, of), count = __shfl_sync(kFullWarp, there, of);
      constexpr int kChunks = Traits::kHeadDim / 8;  // of a row
#pragma unroll 1
      for (int i = lane; i < Traits::kBoxKeys * kChunks; i += 32) {
        const int row = i / kChunks, chunk = i % kChunks;
        cp_async_16_or_zeros(key_chunk<Traits>(shared_address(tile), first + row, chunk),
                             rows + (from + min(row, count - 1)) * stride + chunk * 8, row < count);
      }
      cp_async_wait_all();
      fence_for_wgmma();
      __syncwarp();
    }
    if (lane == 0) barrier_expect(full, (kBoxes - (cut != 0)) * kBoxBytes);
    if (lane < kBoxes && !is_cut)
      copy_box(shared_address(tile) + box() * kBoxBytes, map, full, 0, key, 0, kv_head, batch);
  }
};

}  // namespace sm90
}  // namespace s2o
