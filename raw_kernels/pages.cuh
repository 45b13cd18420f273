// Where keys and values lie in memory: in one array by position, or in the pages of a cache.
#pragma once
#include "geometry.cuh"

namespace s2o {

// A paged cache: page p of k or v holds page_size rows of each KV head, a stride of Tensor::batch after page p - 1, and
// row r of it is *slot* p << shift | r. A kernel that is not kPaged never looks here: a slot is then the position.
struct Pages {
  const int* table;  // [batch, stride] page numbers: entry i of a sequence has its positions from i << shift on
  int64 stride;
  int shift;         // page_size is 1 << shift

  __device__ __forceinline__ const int* of(int batch) const { return table + batch * stride; }

  // The slot of a position; `entries`: of its sequence.
  __device__ __forceinline__ int slot(const int* entries, int position) const {
    return entries[position >> shift] << shift | in_page(position);
  }
  // The slots of four positions, -1 of -1.
  __device__ __forceinline__ int4 slots(const int* entries, int4 p) const {
    const auto slot_or_none = [&](int position) { return position < 0 ? -1 : slot(entries, position); };
    return make_int4(slot_or_none(p.x), slot_or_none(p.y), slot_or_none(p.z), slot_or_none(p.w));
  }
  // From a head's first row to a slot's, in elements.
  __device__ __forceinline__ int64 offset(const Tensor<const uint16>& x, int slot) const {
    return (slot >> shift) * x.batch + in_page(slot) * x.row;
  }
  __device__ __forceinline__ int in_page(int index) const { return index & ((1 << shift) - 1); }
};

// The rows of a KV head: all sequences share the pages.
template <bool kPaged>
__device__ __forceinline__ const uint16* head_rows(const Tensor<const uint16>& x, int batch, int kv_head) {
  return x.at(kPaged ? 0 : batch, kv_head);
}

// Those rows by position from `first` on, in one array or through the page table.
template <bool kPaged>
struct KeyRows {
  const uint16* data;
  const Tensor<const uint16>& x;
  const Pages& pages;
  const int* entries;
  int first;

  __device__ __forceinline__ KeyRows(const Tensor<const uint16>& x_, const Pages& pages_, int batch, int kv_head,
                                     int first_ = 0)
      : data(head_rows<kPaged>(x_, batch, kv_head) + (kPaged ? 0 : first_ * x_.row)),
        x(x_),
        pages(pages_),
        entries(kPaged ? pages_.of(batch) : nullptr),
        first(first_) {}
  __device__ __forceinline__ const uint16* operator()(int i) const {
    if constexpr (kPaged) return data + pages.offset(x, pages.slot(entries, first + i));
    return data + i * x.row;
  }
};

}  // namespace s2o
