// Keys and values of a paged cache as one array each, for a dense call: its queries are many to a key, and pages are
// too small for the copy engine. Pass 1 is then that of arrays, which repays the copy (docs/kernels.md).
//
//   k and v [pages, kv_heads, page_size, head_dim] -> keys and values [batch, kv_heads, seqlen_k, head_dim], or of
//   packed sequences [kv_heads, keys of all, head_dim]
#include "common/attention_params.cuh"

namespace s2o {

struct CollectPagesParams {
  Tensor<const uint16> k, v;
  uint16 *keys, *values;
  int kv_heads;
  int seqlen_k;    // of packed sequences, of all together
  int row_chunks;  // of 16 bytes, in a row
  int chunks;      // in keys, and in values
  Pages pages;

  // What row `row` of keys and values is a copy of.
  __device__ __forceinline__ void find(uint32 row, int& kv_head, int& slot) const {
    const uint32 position = row % seqlen_k, head = row / seqlen_k;  // head: of all sequences
    kv_head = head % kv_heads;
    slot = pages.slot(pages.of(head / kv_heads), position);
  }
};

struct CollectPackedPagesParams : CollectPagesParams {
  int sequences;
  int first_key[kPackedSequences];  // of each sequence, among the keys of all
  int table_row[kPackedSequences];  // of each sequence

  __device__ __forceinline__ void find(uint32 row, int& kv_head, int& slot) const {
    const int key = row % seqlen_k, n = sequence_with(first_key, sequences, key);
    kv_head = row / seqlen_k;
    slot = pages.slot(pages.of(table_row[n]), key - first_key[n]);
  }
};

// A block copies kCopies x blockDim.x consecutive chunks of keys and the same of values.
template <class Params>
__device__ __forceinline__ void copy_chunks(const Params& p) {
  constexpr int kCopies = 4;
  const uint32 first = blockIdx.x * (kCopies * blockDim.x) + threadIdx.x;
  uint4 key[kCopies], value[kCopies];
  const auto here = [&](int i) { return first + i * blockDim.x < p.chunks; };
#pragma unroll
  for (int i = 0; i < kCopies; ++i) {
    if (!here(i)) break;
    const uint32 chunk = first + i * blockDim.x;
    const int column = chunk % p.row_chunks * 8;
    int kv_head, slot;
    p.find(chunk / p.row_chunks, kv_head, slot);
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

__device__ __forceinline__ void collect_pages(const CollectPagesParams& params) { copy_chunks(params); }
__device__ __forceinline__ void collect_packed_pages(const CollectPackedPagesParams& params) { copy_chunks(params); }

}  // namespace s2o
