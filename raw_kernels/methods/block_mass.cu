// The softmax mass of blocks of keys, from the norms that antidiagonal_norms left.
//
//   block_mass: scores[head, row, column] = log2 of the mass that the softmax of the row's cells of queries gives the
//               column, summed over the cells; of visible columns
//
// Block: a row of a head. Sums are in a fixed order.
#include "methods/antidiagonal.cuh"

namespace s2o {

struct BlockMassParams : AntidiagonalParams {
  float* scores;  // [heads of the round, rows, pitch]
  int pitch;
};

constexpr int kMassThreads = 256;

template <int kStride_>
struct MassTraits {
  static constexpr int kStride = kStride_;
  struct Shared {
    float norms[Cells<kStride>::kOfBlock];  // of the cells of queries, log2
  };
};

template <class Traits>
__device__ __forceinline__ void block_mass(const BlockMassParams& p, typename Traits::Shared& shared) {
  constexpr int kOfBlock = Cells<Traits::kStride>::kOfBlock;
  const Cells<Traits::kStride> cells{p};
  const int rows = p.grid.rows(), head = blockIdx.x / rows, row = rows - 1 - static_cast<int>(blockIdx.x % rows);
  const int first = row * kOfBlock, count = min(kOfBlock, cells.of_queries() - first), lane = threadIdx.x % 32;
  const float* norms = cells.norms(head) + cells.place(first);
  const int pitch = static_cast<int>(cells.place(first + 1) - cells.place(first));
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
  float* scores = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch;
  const int visible = p.grid.visible(row);
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
