// What the portable attention tile is compiled for, and its shared memory.
//
// Shared memory keeps rows of kHeadDim elements; the 16-byte chunk c of row r stands at c ^ (r & 7), which
// makes both the row-wise writes and ldmatrix's column-wise reads free of bank conflicts.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kBlockM_, int kStages_, bool kAligned_, int kStep_, bool kPaged_>
struct AttentionTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;  // head_dim rounded up; the columns past head_dim are zeros
  static constexpr int kBlockM = kBlockM_;
  static constexpr int kStages = kStages_;    // steps of K and of V in shared memory
  static constexpr bool kAligned = kAligned_; // every row starts on 16 bytes, and head_dim is a multiple of 8
  static constexpr bool kPaged = kPaged_;     // k and v are a paged cache
  static constexpr bool kAnyScale = false;    // scale_log2 may be 0 or negative
  static constexpr int kStep = kStep_;        // keys of one step of the main loop
  static constexpr int kRowTiles = kHeadDim <= 128 && kBlockM == 128 ? 2 : 1;  // 16-row mma tiles of a warp
  static constexpr int kThreads = kBlockM / (16 * kRowTiles) * 32;
  static constexpr int kKeyTiles = kStep / 8;
  static constexpr int kDimTiles = kHeadDim / 8;
  static constexpr int kIndexSlots = 2 * kStages + 2;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "head_dim is padded to 64, 128 or 256");
  static_assert(kBlockM == 64 || kBlockM == 128, "a warp holds 16 or 32 query rows");
  static_assert(kAligned || !kPaged, "rows of a paged cache start on 16 bytes");
  static_assert(kStep == 32 || kStep == 64, "64 bits hold a flag for each key of a step");

  struct Shared {
    uint16 q[kBlockM * kHeadDim];          // the tile's queries; at the end, its outputs
    uint16 k[kStages][kStep * kHeadDim];
    uint16 v[kStages][kStep * kHeadDim];
    int index[kIndexSlots][kStep];         // of each key of the steps in flight its unit (pass 2)
    float p_column[kBlockM];               // one key's weights (only where v is not finite). In pass 2 the taus of a ladder,
                                           // or of each warp in how many stop checks in a row its rows gained too little
    uint64 nonfinite;                      // keys of the step whose v is not finite
    // What only the copies need is read back for each step: the registers belong to acc and the scores.
    const uint16* k_rows;                  // [seqlen_k, head_dim] of the block's KV head, or its first row in a cache
    const uint16* v_rows;
    const int* order;                      // of the block's segment (pass 2)
    int first_key;                         // (pass 1; in a ladder the q tile)
    int limit;                             // walk's
    const int* pages;                      // of the block's sequence (kPaged)
    float tau;                             // of the block's head (pass 2)
    int least_keys;                        // until these are visited only stop checks in a row end the tile (pass 2),
    int patience;                          // so many of them
  };
};

template <class Traits>
__device__ __forceinline__ uint32 chunk_address(uint32 tile, int row, int chunk) {
  return tile + row * (Traits::kHeadDim * 2) + ((chunk ^ (row & 7)) << 4);
}

// The same, one operation away from the address of another chunk: `rows` is 0 or a multiple of 8, known to the compiler,
// and `chunks` has no bit of that chunk's number. Tiles begin at multiples of a row's size.
template <class Traits>
__device__ __forceinline__ uint32 chunk_beside(uint32 address, int rows, int chunks) {
  return (address ^ (chunks << 4)) + rows * (Traits::kHeadDim * 2);
}

}  // namespace s2o
