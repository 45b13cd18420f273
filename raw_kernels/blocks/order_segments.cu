// Keys of each whole segment by descending importance; those past the last whole one as they lie.
//
//   importance [batch * heads * group, seqlen], of which `group` neighbours count by their mean
//   -> k_order [batch * heads, seqlen], first_column [batch * heads]
//
// Of an importance the leading bits count that a key's place in its segment leaves of 32. Equal ones go by position.
#include "selection/sortable.cuh"

namespace s2o {

struct OrderSegmentsParams {
  const float* importance;
  int* k_order;
  int* first_column;              // [batch * heads]: the block that holds key 0
  int block;
  int seqlen, segment, segments;  // segments: with a last one that is not whole
  int group;
  int sort_slots;                 // a power of two that holds a segment
};

struct OrderSegmentsShared {
  uint32 slots[32];  // as many as sort_slots
};

// Block: a segment of a head.
__device__ __forceinline__ void order_segments(const OrderSegmentsParams& p, OrderSegmentsShared& shared) {
  const long long head = blockIdx.x / p.segments;
  const int begin = blockIdx.x % p.segments * p.segment;
  if (p.segment > p.seqlen && threadIdx.x == 0) p.first_column[head] = 0;
  int* order = p.k_order + head * p.seqlen;
  if (begin + p.segment > p.seqlen) {
    for (int i = begin + threadIdx.x; i < p.seqlen; i += blockDim.x) order[i] = i;
    return;
  }
  const float* of_keys = p.importance + head * p.group * p.seqlen + begin;
  const uint32 places = p.sort_slots - 1;
  for (int i = threadIdx.x; i < p.sort_slots; i += blockDim.x) {
    float sum = 0.f;
    if (i < p.segment)
      for (int h = 0; h < p.group; ++h) sum += of_keys[static_cast<long long>(h) * p.seqlen + i];
    shared.slots[i] = i < p.segment ? ~sortable(sum / p.group) & ~places | i : ~0u;
  }
  __syncthreads();
  bitonic_sort(shared.slots, p.sort_slots);
  for (int i = threadIdx.x; i < p.segment; i += blockDim.x) {
    const int key = begin + (shared.slots[i] & places);
    order[begin + i] = key;
    if (key == 0) p.first_column[head] = i / p.block;
  }
}

}  // namespace s2o
