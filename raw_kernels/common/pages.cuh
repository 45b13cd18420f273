// Where keys and values lie in memory: in one array by position, or in the pages of a cache.
#pragma once
#include "common/geometry.cuh"

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
  // The same in two steps, of which the second waits for the first one's load; -1 of -1.
  __device__ __forceinline__ int page(const int* entries, int position) const {
    return position < 0 ? 0 : entries[position >> shift];
  }
  __device__ __forceinline__ int slot_in(int page, int position) const {
    return position < 0 ? -1 : page << shift | in_page(position);
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

// From a head's first row to a slot's, in units of 16 bytes. Only of what the Hopper path takes: the plan sees to it
// that 32 bits hold it.
constexpr uint32 kNoRow = ~0u;

template <bool kPaged>
struct RowUnits {
  const Pages& pages;
  uint32 row, page;

  template <class T>
  __device__ __forceinline__ RowUnits(const Pages& pages_, const Tensor<T>& x)
      : pages(pages_), row(static_cast<uint32>(x.row / 8)), page(static_cast<uint32>(x.batch / 8)) {}
  __device__ __forceinline__ uint32 operator()(int slot) const {  // kNoRow of -1
    if (slot < 0) return kNoRow;
    if constexpr (kPaged) return (slot >> pages.shift) * page + pages.in_page(slot) * row;
    return static_cast<uint32>(slot) * row;
  }
};

// The rows of a KV head: all sequences share the pages.
template <bool kPaged>
__device__ __forceinline__ const uint16* head_rows(const Tensor<const uint16>& x, int batch, int kv_head) {
  return x.at(kPaged ? 0 : batch, kv_head);
}

// Where they lie in a paged cache, by position from `first` on.
struct PagedRows {
  const Tensor<const uint16>& x;
  const Pages& pages;
  int batch, first;
  __device__ __forceinline__ int64 offset(int i) const {
    return pages.offset(x, pages.slot(pages.of(batch), first + i));
  }
};

}  // namespace s2o
