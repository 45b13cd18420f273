// The softmax mass of blocks of keys, from the norms that antidiagonal_norms left.
//
//   block_mass: scores[head, row, column] = log2 of the mass that the softmax of the row's cells of queries gives the
//               column, summed over the cells; of visible columns
//
// Block: a row of a head. Sums are in a fixed order.
#include "blocks/antidiagonal.cuh"

namespace s2o {

struct BlockMassParams : AntidiagonalParams {
  float* scores;  // [heads of the round, rows, pitch]
  int pitch;
};

constexpr int kMassThreads = 256, kMassWarps = kMassThreads / 32;
constexpr int kHeldColumns = 512;  // of a row, at most, that registers hold

template <int kStride_>
struct MassTraits {
  static constexpr int kStride = kStride_;
  struct Shared {
    float norms[Cells<kStride>::kOfBlock];  // of the cells of queries, log2
    float sums[kMassWarps][kHeldColumns];   // of a warp's cells
  };
};

// A row of up to 32 * kHeld columns: a warp takes each kMassWarps-th cell, with its numbers in registers.
template <class Traits, int kHeld>
__device__ __forceinline__ void mass_in_registers(const Cells<Traits::kStride>& cells, const float* norms, int pitch,
                                                  int first, int count, int visible, float* scores,
                                                  typename Traits::Shared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  float sums[kHeld] = {};
  for (int i = warp; i < count; i += kMassWarps) {
    const int left = cells.blocks(first + i) - lane;
    float x[kHeld], top = -infinity(), sum = 0.f;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) x[j] = j * 32 < left ? norms[i * pitch + j * 32 + lane] : -infinity();
#pragma unroll
    for (int j = 0; j < kHeld; ++j) top = fmaxf(top, x[j]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, d));
#pragma unroll
    for (int j = 0; j < kHeld; ++j) {
      x[j] = j * 32 < left ? exp2_approx(x[j] - top) : 0.f;
      sum += x[j];
    }
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
    const float share = 1.f / sum;
#pragma unroll
    for (int j = 0; j < kHeld; ++j) sums[j] = fmaf(x[j], share, sums[j]);
  }
#pragma unroll
  for (int j = 0; j < kHeld; ++j) shared.sums[warp][j * 32 + lane] = sums[j];
  __syncthreads();
  for (int c = threadIdx.x; c < visible; c += kMassThreads) {
    float sum = 0.f;
#pragma unroll
    for (int w = 0; w < kMassWarps; ++w) sum += shared.sums[w][c];
    scores[c] = __log2f(sum);
  }
}

template <class Traits>
__device__ __forceinline__ void block_mass(const BlockMassParams& p, typename Traits::Shared& shared) {
  constexpr int kOfBlock = Cells<Traits::kStride>::kOfBlock;
  const Cells<Traits::kStride> cells{p};
  const int rows = p.grid.rows(), head = blockIdx.x / rows, row = rows - 1 - static_cast<int>(blockIdx.x % rows);
  const int first = row * kOfBlock, count = min(kOfBlock, cells.of_queries() - first), lane = threadIdx.x % 32;
  const float* norms = cells.norms(head) + cells.place(first);
  const int pitch = static_cast<int>(cells.place(first + 1) - cells.place(first));
  float* scores = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch;
  const int visible = p.grid.visible(row);
  if (visible <= kHeldColumns) {
    if (visible <= kHeldColumns / 2) {
      mass_in_registers<Traits, kHeldColumns / 64>(cells, norms, pitch, first, count, visible, scores, shared);
    } else {
      mass_in_registers<Traits, kHeldColumns / 32>(cells, norms, pitch, first, count, visible, scores, shared);
    }
    return;
  }
  constexpr int kAtOnce = 8;  // numbers of a thread that are on their way
  for (int i = threadIdx.x / 32; i < count; i += kMassThreads / 32) {
    const float* of = norms + i * pitch;
    const int blocks = cells.blocks(first + i);
    float top = -infinity(), sum = 0.f;  // of the lane: the largest, and the sum of exp2 of what is above it
    for (int c = lane; c < blocks; c += 32 * kAtOnce) {
      float x[kAtOnce], most = top;
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) x[j] = c + j * 32 < blocks ? of[c + j * 32] : -infinity();
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) most = fmaxf(most, x[j]);
      const float base = most == -infinity() ? 0.f : most;
      sum *= exp2_approx(top - base);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum += exp2_approx(x[j] - base);
      top = most;
    }
    float most = top;
#pragma unroll
    for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, d));
    sum *= exp2_approx(top - (most == -infinity() ? 0.f : most));
#pragma unroll
    for (int d = 16; d > 0; d /= 2) sum += __shfl_xor_sync(kFullWarp, sum, d);
    if (lane == 0) shared.norms[i] = most + __log2f(sum);
  }
  __syncthreads();
  for (int c = threadIdx.x; c < visible; c += kMassThreads) {
    float sum = 0.f;
#pragma unroll 1
    for (int begin = 0; begin < kOfBlock; begin += kAtOnce) {
      float x[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j;
        x[j] = i < count && c < cells.blocks(first + i) ? norms[i * pitch + c] - shared.norms[i] : -infinity();
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) sum += exp2_approx(x[j]);
    }
    scores[c] = __log2f(sum);
  }
}

}  // namespace s2o
