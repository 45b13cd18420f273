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
};

}  // namespace sm90
}  // namespace s2o
