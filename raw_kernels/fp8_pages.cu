// Keys and values of a cache of 8-bit floats (e4m3) as arrays of q's dtype, which all kernels behind this one read:
// round(scale * byte), of which the product is float32.
//
//   k_pages and v_pages [pages, kv_heads, page_size, head_dim] -> keys and values [batch, kv_heads, seqlen_k, head_dim],
//   or of packed sequences [kv_heads, keys of all, head_dim]
#include "common/attention_params.cuh"
#include "common/ptx.cuh"

namespace s2o {

using uint8 = unsigned char;

struct CacheScale {
  const float* of_heads;  // [kv_heads], `stride` apart: 0 if all have the first one's. Null: `value` is theirs
  int stride;
  float value;

  __device__ __forceinline__ float of(int kv_head) const { return of_heads ? of_heads[kv_head * stride] : value; }
};

struct Fp8PagesParams {
  Tensor<const uint8> k_pages, v_pages;
  uint16 *keys, *values;
  CacheScale k_scale, v_scale;
  int kv_heads;
  int seqlen_k;    // of packed sequences, of all together
  int row_chunks;  // of 8 elements, in a row
  int chunks;      // in keys, and in values
  Pages pages;

  // What row `row` of keys and values is read from.
  __device__ __forceinline__ void find(uint32 row, int& kv_head, int& slot) const {
    const uint32 position = row % seqlen_k, head = row / seqlen_k;  // head: of all sequences
    kv_head = head % kv_heads;
    slot = pages.slot(pages.of(head / kv_heads), position);
  }
};

struct PackedFp8PagesParams : Fp8PagesParams {
  int sequences;
  int first_key[kPackedSequences];  // of each sequence, among the keys of all
  int table_row[kPackedSequences];  // of each sequence

  __device__ __forceinline__ void find(uint32 row, int& kv_head, int& slot) const {
    const int key = row % seqlen_k, n = sequence_with(first_key, sequences, key);
    kv_head = row / seqlen_k;
    slot = pages.slot(pages.of(table_row[n]), key - first_key[n]);
  }
};

template <class Element_>
struct Fp8Traits {
  using Element = Element_;
};

// An e4m3 number is a float16 without its last bits, times 2^8; the largest magnitude is NaN.
__device__ __forceinline__ float from_e4m3(uint32 byte) {
  const uint32 magnitude = byte & 0x7fu;
  const float x = 256.f * Float16::to_float(static_cast<uint16>((byte & 0x80u) << 8 | magnitude << 7));
  return magnitude == 0x7fu ? __int_as_float(0x7fffffff) : x;
}

template <class Element>
__device__ __forceinline__ uint4 scaled(uint2 bytes, float scale) {
  const auto pair = [&](uint32 four, int i) {
    return Element::pack(scale * from_e4m3(four >> 8 * i), scale * from_e4m3(four >> 8 * (i + 1)));
  };
  return make_uint4(pair(bytes.x, 0), pair(bytes.x, 2), pair(bytes.y, 0), pair(bytes.y, 2));
}

__device__ __forceinline__ uint2 eight_bytes(const Tensor<const uint8>& x, const Pages& pages, int kv_head, int slot,
                                             int column) {
  const int64 row = (slot >> pages.shift) * x.batch + pages.in_page(slot) * x.row;
  return *reinterpret_cast<const uint2*>(x.at(0, kv_head) + row + column);
}

// A block reads kReads x blockDim.x consecutive chunks of keys and the same of values.
template <class Element, class Params>
__device__ __forceinline__ void read_chunks(const Params& p) {
  constexpr int kReads = 4;
  const uint32 first = blockIdx.x * (kReads * blockDim.x) + threadIdx.x;
  uint2 key[kReads], value[kReads];
  int kv_head[kReads];
  const auto here = [&](int i) { return first + i * blockDim.x < p.chunks; };
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    if (!here(i)) break;
    const uint32 chunk = first + i * blockDim.x;
    const int column = chunk % p.row_chunks * 8;
    int slot;
    p.find(chunk / p.row_chunks, kv_head[i], slot);
    key[i] = eight_bytes(p.k_pages, p.pages, kv_head[i], slot, column);
    value[i] = eight_bytes(p.v_pages, p.pages, kv_head[i], slot, column);
  }
#pragma unroll
  for (int i = 0; i < kReads; ++i) {
    if (!here(i)) break;
    const uint32 chunk = first + i * blockDim.x;
    reinterpret_cast<uint4*>(p.keys)[chunk] = scaled<Element>(key[i], p.k_scale.of(kv_head[i]));
    reinterpret_cast<uint4*>(p.values)[chunk] = scaled<Element>(value[i], p.v_scale.of(kv_head[i]));
  }
}

template <class Traits>
__device__ __forceinline__ void fp8_pages(const Fp8PagesParams& params) {
  read_chunks<typename Traits::Element>(params);
}

template <class Traits>
__device__ __forceinline__ void packed_fp8_pages(const PackedFp8PagesParams& params) {
  read_chunks<typename Traits::Element>(params);
}

}  // namespace s2o
