// How the copy engine brings a tile in shared memory by boxes of whole rows, each from a place of its own: in an array
// (`box_map` in s2o_cupy/cuda/tensor_maps.py), or in a page of a cache (`page_map`).
//
// Rows that threads gather, 16 bytes each, arrive at 32 bytes a cycle and hold up products' reads of shared memory; boxes
// do neither (docs/notebook/passes.md).
#pragma once
#include "sm90/shared.cuh"

namespace s2o {
namespace sm90 {

constexpr int kPastRows = 0x40000000;  // past the rows of any array

// Where a box begins in its map. In an array these are its first row, its head and its sequence. In a cache they are 0, which
// eight rows of a page, and which head of a page (HeadsOfPages).
struct BoxAt {
  int row, outer, outermost;
};

// Where a head of a page stands along the last axis of a map of whole rows: heads of pages are counted in the largest
// power of two that divides the strides of both (`Operand.page_step`; the plan sees to it that 31 bits hold them).
struct HeadsOfPages {
  int page, head;
  __device__ __forceinline__ explicit HeadsOfPages(const Tensor<const uint16>& x) {
    const int shift = __ffsll(x.batch | x.head | 1ll << 30) - 1;
    page = static_cast<int>(x.batch >> shift);
    head = static_cast<int>(x.head >> shift);
  }
  // Where the box begins whose first row is this slot. Slot -1 gives one past the end of a page, which brings zeros.
  __device__ __forceinline__ BoxAt box(const Pages& pages, int slot, int kv_head) const {
    const int of = slot < 0 ? 0 : slot >> pages.shift;
    const int row = slot < 0 ? 1 << pages.shift : pages.in_page(slot);
    return {0, row / 8, of * page + kv_head * head};
  }
};

// A lane asks for a box, neighbouring keys of a unit. Each warp asks for its share: several ask faster than one.
template <class Traits>
struct BoxCopies {
  static constexpr int kBoxes = Traits::kBlockN / Traits::kBoxKeys / (Traits::kProducerThreads / 32);  // of a warp
  static constexpr uint32 kBoxBytes = Traits::kBoxKeys * Traits::kHeadDim * 2;
  static __device__ __forceinline__ int box() {
    return (threadIdx.x / 32 - Traits::kFirstProducer / 32) * kBoxes + threadIdx.x % 32 % kBoxes;
  }
  // The first key of this lane's box.
  static __device__ __forceinline__ int kept_row() { return box() * Traits::kBoxKeys; }
  static __device__ __forceinline__ void ask(const uint16* tile, const TensorMap& map, uint64& full, BoxAt at) {
    copy_box(shared_address(tile) + box() * kBoxBytes, map, full, 0, at.row, 0, at.outer, at.outermost);
  }
  // Has the copy engine bring the tile. Past the array's end come zeros.
  static __device__ __forceinline__ void bring(const uint16* tile, const TensorMap& map, uint64& full, BoxAt at) {
    const int lane = threadIdx.x % 32;
    __syncwarp();  // one lane arrives for all: none of them may still have votes to read
    if (lane == 0) barrier_expect(full, kBoxes * kBoxBytes);
    if (lane < kBoxes) ask(tile, map, full, at);
  }
  // Brings a tile of values likewise where the list may end within a box: `there` keys are left of it from this lane's box on,
  // 0 or less if it has ended before. The box in which it ends must have zeros for its other values, as their weights are 0,
  // and 0 times a NaN is one. So its warp gathers that box, whose rows lie `stride` elements apart from rows() on, and waits.
  template <class FirstRow>
  static __device__ __forceinline__ void bring_cut(const uint16* tile, const TensorMap& map, uint64& full, BoxAt at,
                                                   int there, const FirstRow& rows, int64 stride) {
    const int lane = threadIdx.x % 32;
    const bool is_cut = there > 0 && there < Traits::kBoxKeys;
    const uint32 cut = __ballot_sync(kFullWarp, lane < kBoxes && is_cut);
    if (cut != 0) {
      const int of = __ffs(cut) - 1, first = __shfl_sync(kFullWarp, kept_row(), of);
      const int count = __shfl_sync(kFullWarp, there, of);
      const uint64 from = __shfl_sync(kFullWarp, reinterpret_cast<uint64>(rows()), of);
      constexpr int kChunks = Traits::kHeadDim / 8;  // of a row
#pragma unroll 1
      for (int i = lane; i < Traits::kBoxKeys * kChunks; i += 32) {
        const int row = i / kChunks, chunk = i % kChunks;
        const uint16* source = reinterpret_cast<const uint16*>(from) + min(row, count - 1) * stride + chunk * 8;
        cp_async_16_or_zeros(key_chunk<Traits>(shared_address(tile), first + row, chunk), source, row < count);
      }
      cp_async_wait_all();
      fence_for_wgmma();
      __syncwarp();
    }
    if (lane == 0) barrier_expect(full, (kBoxes - (cut != 0)) * kBoxBytes);
    if (lane < kBoxes && !is_cut) ask(tile, map, full, at);
  }
};

}  // namespace sm90
}  // namespace s2o
