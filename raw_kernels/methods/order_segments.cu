// Keys of each whole segment by descending importance; those past the last whole one as they lie.
//
//   importance [batch * heads * group, seqlen], of which `group` neighbours count by their mean
//   -> k_order [batch * heads, seqlen], first_column [batch * heads]
//
//   order_short_segments: of up to kShort keys, a warp each, which sorts in registers
//   order_segments: longer ones, a block each
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
  int all_segments;               // of all heads
  int group;
  int sort_slots;                 // a power of two that holds a segment
};

// A segment of a head.
struct KeySegment {
  const OrderSegmentsParams& p;
  int64 head;
  int begin;
  __device__ __forceinline__ KeySegment(const OrderSegmentsParams& params, uint32 index)
      : p(params), head(index / params.segments), begin(index % params.segments * params.segment) {}
  __device__ __forceinline__ bool whole() const { return begin + p.segment <= p.seqlen; }
  // A number that sorts key i of the segment and tells its place.
  __device__ __forceinline__ uint32 slot(int i) const {
    if (i >= p.segment) return ~0u;
    const float* of_key = p.importance + head * p.group * p.seqlen + begin + i;
    float sum = 0.f;
    for (int h = 0; h < p.group; ++h) sum += of_key[static_cast<int64>(h) * p.seqlen];
    const uint32 places = p.sort_slots - 1;
    return ~sortable(sum / p.group) & ~places | i;
  }
  __device__ __forceinline__ void write(int i, uint32 slot) const {
    const int key = begin + (slot & p.sort_slots - 1);
    p.k_order[head * p.seqlen + begin + i] = key;
    if (key == 0) p.first_column[head] = i / p.block;
  }
  // Of a segment that is not whole.
  __device__ __forceinline__ void write_as_they_lie(int thread, int threads) const {
    for (int i = begin + thread; i < p.seqlen; i += threads) p.k_order[head * p.seqlen + i] = i;
    if (begin == 0 && thread == 0) p.first_column[head] = 0;
  }
};

constexpr int kShort = 256, kOfLane = kShort / 32, kShortWarps = 8;

// Slots lane * kOfLane + i of a warp, ascending: a bitonic sort.
__device__ __forceinline__ void sort_slots(uint32 (&x)[kOfLane]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int size = 2; size <= kShort; size *= 2)
#pragma unroll
    for (int stride = size / 2; stride > 0; stride /= 2) {
      if (stride >= kOfLane) {
        const bool larger = !(lane & stride / kOfLane) == !!(lane & size / kOfLane);
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          const uint32 other = __shfl_xor_sync(kFullWarp, x[i], stride / kOfLane);
          x[i] = larger ? max(x[i], other) : min(x[i], other);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kOfLane; ++i) {
          if (i & stride) continue;
          const bool descends = size < kOfLane ? i & size : lane & size / kOfLane;
          const uint32 a = x[i], b = x[i | stride];
          x[i] = descends ? max(a, b) : min(a, b);
          x[i | stride] = descends ? min(a, b) : max(a, b);
        }
      }
    }
}

struct ShortSegmentsShared {
  uint32 slots[kShortWarps][kShort];
};

__device__ __forceinline__ void order_short_segments(const OrderSegmentsParams& p, ShortSegmentsShared& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32 index = blockIdx.x * kShortWarps + warp;
  if (index >= static_cast<uint32>(p.all_segments)) return;
  const KeySegment segment(p, index);
  if (!segment.whole()) return segment.write_as_they_lie(lane, 32);
  uint32 x[kOfLane];
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) x[i] = segment.slot(i * 32 + lane);
  sort_slots(x);
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) shared.slots[warp][lane * kOfLane + i] = x[i];
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kOfLane; ++i)
    if (i * 32 + lane < p.segment) segment.write(i * 32 + lane, shared.slots[warp][i * 32 + lane]);
}

struct OrderSegmentsShared {
  uint32 slots[32];  // as many as sort_slots
};

__device__ __forceinline__ void order_segments(const OrderSegmentsParams& p, OrderSegmentsShared& shared) {
  const KeySegment segment(p, blockIdx.x);
  if (!segment.whole()) return segment.write_as_they_lie(threadIdx.x, blockDim.x);
  for (int i = threadIdx.x; i < p.sort_slots; i += blockDim.x) shared.slots[i] = segment.slot(i);
  __syncthreads();
  bitonic_sort(shared.slots, p.sort_slots);
  for (int i = threadIdx.x; i < p.segment; i += blockDim.x) segment.write(i, shared.slots[i]);
}

}  // namespace s2o
