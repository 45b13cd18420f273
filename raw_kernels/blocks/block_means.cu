// Mean rows of blocks of q or k, and how alike the rows of a block are.
//
//   x [batch, heads / shared_heads, seqlen, head_dim] -> means [batch * heads, blocks, 2, kHeadDim], 0 past head_dim
//                                                        similarity [batch * heads, blocks]
//
// A mean is kept as two numbers of x's dtype: the nearest to it, and the nearest to what that leaves. One that is not
// finite is NaN. The similarity is the mean cosine of all pairs of rows: the square of the mean of unit vectors.
#include "common/row_sums.cuh"

namespace s2o {

struct BlockMeansParams {
  Tensor<const uint16> x;
  const int* order;    // [batch * heads, seqlen]: block c has the rows order[c * block ..]; null: as they lie
  int64 order_row;     // from one head's order to the next one's
  uint16* means;       // [batch * heads, blocks, 2, kHeadDim]
  float* similarity;   // [batch * heads, blocks], or null
  int heads;           // of a sequence
  int shared_heads;    // of these that read one head of x
  int seqlen, block, blocks;
  int head_dim;
  int aligned;         // every row of x starts on 16 bytes
};

template <class Element, int kHeadDim>
struct BlockMeansTraits : RowTraits<Element, kHeadDim> {
  struct Shared {
    float sums[kRankThreads * 8];
    float of_warp[kRankThreads / 32];
  };
};

template <int kLanes>
__device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int stride = kLanes / 2; stride > 0; stride /= 2) x += __shfl_xor_sync(kFullWarp, x, stride);
  return x;
}
template <int kLanes>
__device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int stride = kLanes / 2; stride > 0; stride /= 2) x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, stride));
  return x;
}

// Block: a block of rows of a head; heads that share rows stand side by side.
template <class Traits>
__device__ __forceinline__ void block_means(const BlockMeansParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kLanes = Traits::kLanes, kRows = Traits::kRows;
  uint32 index = blockIdx.x;
  const int member = index % p.shared_heads;
  index /= p.shared_heads;
  const int c = index % p.blocks, source = index / p.blocks, head = source * p.shared_heads + member;
  const int of_sequence = p.heads / p.shared_heads;
  const uint16* x = p.x.at(source / of_sequence, source % of_sequence);
  const int begin = c * p.block, count = min(p.block, p.seqlen - begin);
  const int* order = p.order ? p.order + head * p.order_row + begin : nullptr;
  const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
  const auto row = [&](int r) { return x + static_cast<int64>(order ? order[r] : begin + r) * p.x.row; };
  const float factor = 1.f / count;  // of each row, as a sum of large ones may be too large

  float total[8] = {}, units[8] = {};
  if (!p.similarity) {
#pragma unroll 8
    for (int r = slot; r < count; r += kRows) {
      float y[8];
      read_row<Traits>(y, row(r), lane, p.head_dim, p.aligned);
#pragma unroll
      for (int e = 0; e < 8; ++e) total[e] += y[e] * factor;
    }
  } else {
#pragma unroll 4
    for (int r = slot; r < p.block; r += kRows) {  // all lanes of a warp take part in its sums
      float y[8] = {};
      if (r < count) read_row<Traits>(y, row(r), lane, p.head_dim, p.aligned);
      float most = 0.f, squares = 0.f;
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(y[e]));
      most = lanes_max<kLanes>(most);
      const float inverse = most > 0.f ? 1.f / most : 0.f;  // or squares of large elements would be infinite
#pragma unroll
      for (int e = 0; e < 8; ++e) squares += y[e] * inverse * (y[e] * inverse);
      squares = lanes_sum<kLanes>(squares);
      const float norm = squares > 0.f ? inverse * rsqrtf(squares) : squares;  // NaN stays NaN
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        total[e] += y[e] * factor;
        units[e] += y[e] * norm;
      }
    }
  }
  const float mean = block_sum<Traits>(total, shared.sums);
  const int64 at = static_cast<int64>(head) * p.blocks + c;
  if (threadIdx.x < Traits::kHeadDim) {
    const bool finite = fabsf(mean) < infinity();
    const uint32 high = finite ? Element::pack(mean, 0.f) : 0x7fffu;
    const float rest = mean - Element::low(high);
    uint16* to = p.means + at * 2 * Traits::kHeadDim + threadIdx.x;
    to[0] = static_cast<uint16>(high);
    to[Traits::kHeadDim] = static_cast<uint16>(Element::pack(fabsf(rest) < infinity() ? rest : 0.f, 0.f));
  }
  if (!p.similarity) return;
  const float unit = block_sum<Traits>(units, shared.sums) * factor;
  const float squares = lanes_sum<32>(threadIdx.x < Traits::kHeadDim ? unit * unit : 0.f);
  if (threadIdx.x % 32 == 0) shared.of_warp[threadIdx.x / 32] = squares;
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.f;
    for (int w = 0; w < kRankThreads / 32; ++w) sum += shared.of_warp[w];
    p.similarity[at] = sum;
  }
}

}  // namespace s2o
