// What pass 2 needs for the keys that it does not visit: the mean key and value of each segment's candidates.
//
//   block_sums:      sums of blocks of kSumBlock keys and values   -> sums [batch * kv_heads, blocks, (k, v), kHeadDim]
//   candidate_means: means over the candidates of each segment     -> candidate_means [batch * kv_heads, segments,
//                                                                      (k, v), kHeadDim], 0 where there are none
//
// Blocks stand at multiples of kSumBlock in the sequence and are added in order, so a sum over the first keys is the
// same in every call that has them: a prompt in chunks gets the means of the whole.
#include "common/pages.cuh"
#include "common/row_sums.cuh"

namespace s2o {

constexpr int kSumBlock = 256;

struct TailParams {
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  Tensor<const uint16> v;  // like k
  float* sums;             // [batch * kv_heads, blocks, (k, v), kHeadDim]
  float* candidate_means;  // [batch * kv_heads, segments, (k, v), kHeadDim]
  Geometry geometry;
  int kv_heads;
  int blocks;              // of kSumBlock keys, that sums has room for
  int first_block, made;   // blocks that this launch makes, of each KV head; those before are there
  int aligned;             // every row of k and v starts on 16 bytes
  Pages pages;             // of a paged cache
};

template <class Element, int kHeadDim, bool kPaged_>
struct TailTraits : RowTraits<Element, kHeadDim> {
  static constexpr bool kPaged = kPaged_;  // k and v are a paged cache
  union Shared {
    int64 offsets[kSumBlock];  // of a block's rows in a paged cache; then
    float sums[RowTraits<Element, kHeadDim>::kSums];
  };
};

// Block: a KV head, a block of keys, and k or v.
template <class Traits>
__device__ __forceinline__ void block_sums(const TailParams& p, typename Traits::Shared& shared) {
  const int which = blockIdx.x % 2, kv_head = blockIdx.x / 2 / p.made;
  const int block = p.first_block + blockIdx.x / 2 % p.made;
  const Tensor<const uint16>& tensor = which ? p.v : p.k;
  const uint16* rows = head_rows<Traits::kPaged>(tensor, kv_head / p.kv_heads, kv_head % p.kv_heads);
  const PagedRows pages{tensor, p.pages, kv_head / p.kv_heads, 0};
  const int lane = threadIdx.x % Traits::kLanes, begin = block * kSumBlock;
  const int count = min(kSumBlock, p.geometry.seqlen_k - begin);
  if constexpr (Traits::kPaged) {  // all rows at once, and each by one thread
    static_assert(kSumBlock == kRankThreads, "a row a thread");
    if (threadIdx.x < count) shared.offsets[threadIdx.x] = pages.offset(begin + threadIdx.x);
    __syncthreads();
  }
  float total[8] = {};
#pragma unroll 4
  for (int r = threadIdx.x / Traits::kLanes; r < count; r += Traits::kRows) {
    float x[8];
    const int64 offset = Traits::kPaged ? shared.offsets[r] : (begin + r) * tensor.row;
    read_row<Traits>(x, rows + offset, lane, p.geometry.head_dim, p.aligned);
#pragma unroll
    for (int e = 0; e < 8; ++e) total[e] += x[e];
  }
  if constexpr (Traits::kPaged) __syncthreads();  // everybody has read the offsets
  const float sum = block_sum<Traits>(total, shared.sums);
  const int64 row = (static_cast<int64>(kv_head) * p.blocks + block) * 2 + which;
  if (threadIdx.x < Traits::kHeadDim) p.sums[row * Traits::kHeadDim + threadIdx.x] = sum;
}

// This thread's part of the sum of element threadIdx.x % kHeadDim over the first `keys` rows.
template <class Traits>
__device__ __forceinline__ float sum_of_first(const TailParams& p, const float* sums, const uint16* rows,
                                              int64 row_stride, const PagedRows& pages, int keys) {
  constexpr int kParts = kRankThreads / Traits::kHeadDim;
  const int d = threadIdx.x % Traits::kHeadDim, part = threadIdx.x / Traits::kHeadDim, whole = keys / kSumBlock;
  float sum = 0.f;
#pragma unroll 8
  for (int b = part; b < whole; b += kParts) sum += sums[static_cast<int64>(b) * 2 * Traits::kHeadDim + d];
  if (d < p.geometry.head_dim) {
#pragma unroll 4
    for (int r = whole * kSumBlock + part; r < keys; r += kParts) {
      if constexpr (Traits::kPaged) {
        sum += Traits::Element::to_float(rows[pages.offset(r) + d]);
      } else {
        sum += Traits::Element::to_float(rows[r * row_stride + d]);
      }
    }
  }
  return sum;
}

// Block: a KV head, a segment, and k or v.
template <class Traits>
__device__ __forceinline__ void candidate_means(const TailParams& p, typename Traits::Shared& shared) {
  const Geometry& g = p.geometry;
  const int which = blockIdx.x % 2, n = blockIdx.x / 2 % g.segments(), kv_head = blockIdx.x / 2 / g.segments();
  const Tensor<const uint16>& tensor = which ? p.v : p.k;
  const uint16* rows = head_rows<Traits::kPaged>(tensor, kv_head / p.kv_heads, kv_head % p.kv_heads);
  const PagedRows pages{tensor, p.pages, kv_head / p.kv_heads, 0};
  const float* sums = p.sums + (static_cast<int64>(kv_head) * p.blocks * 2 + which) * Traits::kHeadDim;
  float sum = sum_of_first<Traits>(p, sums, rows, tensor.row, pages, g.dense_begin(n));
  if (!g.is_causal) {
    sum += sum_of_first<Traits>(p, sums, rows, tensor.row, pages, g.seqlen_k);
    sum -= sum_of_first<Traits>(p, sums, rows, tensor.row, pages, g.dense_end(n));
  }
  shared.sums[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x >= Traits::kHeadDim) return;
  for (int i = Traits::kHeadDim + threadIdx.x; i < kRankThreads; i += Traits::kHeadDim) sum += shared.sums[i];
  p.candidate_means[static_cast<int64>(blockIdx.x) * Traits::kHeadDim + threadIdx.x] =
      g.candidates(n) ? sum / g.candidates(n) : 0.f;
}

}  // namespace s2o
