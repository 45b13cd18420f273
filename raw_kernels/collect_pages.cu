// Keys and values of a paged cache as one array each, for a dense call: its queries are many to a key, and pages are
// too small for the copy engine. Pass 1 is then that of arrays, which repays the copy (docs/kernels.md).
//
//   k and v [pages, kv_heads, page_size, head_dim] -> keys and values [batch, kv_heads, seqlen_k, head_dim]
#include "common/ptx.cuh"
#include "common/pages.cuh"

namespace s2o {

struct CollectPagesParams {
  Tensor<const uint16> k, v;
  uint16 *keys, *values;
  int kv_heads, seqlen_k;
  int row_chunks;  // of 16 bytes, in a row
  int chunks;      // in keys, and in values
  Pages pages;
};

// A block copies kCopies x blockDim.x consecutive chunks of keys and the same of values.
__device__ __forceinline__ void collect_pages(const CollectPagesParams& p) {
  constexpr int kCopies = 4;
  const uint32 first = blockIdx.x * (kCopies * blockDim.x) + threadIdx.x;
  uint4 key[kCopies], value[kCopies];
  const auto here = [&](int i) { return first + i * blockDim.x < p.chunks; };
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    if (!here(i)) break;
    const uint32 chunk = first + i * blockDim.x, row = chunk / p.row_chunks;
    const uint32 position = row % p.seqlen_k, head = row / p.seqlen_k;  // head: of all sequences
    const int slot = p.pages.slot(p.pages.of(head / p.kv_heads), position), kv_head = head % p.kv_heads;
    const int column = chunk % p.row_chunks * 8;
    key[i] = *reinterpret_cast<const uint4*>(p.k.at(0, kv_head) + p.pages.offset(p.k, slot) + column);
    value[i] = *reinterpret_cast<const uint4*>(p.v.at(0, kv_head) + p.pages.offset(p.v, slot) + column);
  }
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    if (!here(i)) break;
    const uint32 chunk = first + i * blockDim.x;
    reinterpret_cast<uint4*>(p.keys)[chunk] = key[i];
    reinterpret_cast<uint4*>(p.values)[chunk] = value[i];
  }
}

}  // namespace s2o
