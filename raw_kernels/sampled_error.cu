// The error of sampled segments at the taus of a ladder, and the taus that keep to an error. reference/error_taus.py is
// the definition; pass 2 walks the ladder (common/tau_ladder.cuh).
//
//   segment_sizes: outputs of pass 1 of segments that pass 2 has nothing to add to -> sums of squares
//   choose_taus: sums of all sampled segments -> the next ladder of each head, or its tau
#include "common/tau_ladder.cuh"

namespace s2o {

constexpr int kSampledThreads = 256;
constexpr int kErrorSegments = 32;  // that are sampled, at most
static_assert(kErrorSegments == spec::kErrorSegments);

template <class Element_>
struct SampledTraits {
  using Element = Element_;
};

// Sums of x over the block's threads, in thread 0.
__device__ __forceinline__ float sum_of_block(float x, float (&parts)[kSampledThreads / 32]) {
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) x += __shfl_xor_sync(kFullWarp, x, stride);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = 0.f;
  for (int w = 0; w < kSampledThreads / 32; ++w) x += parts[w];
  return x;
}

struct SegmentSizesParams {
  Tensor<const uint16> out;  // [batch, heads, seqlen_q, head_dim]
  float* sizes;              // [batch * heads, segments, tiles, kLadderWarps]
  Geometry geometry;
  int heads, tiles;
  int segments;              // the first ones, which have no candidates
};

// Block: one of these segments of a head.
template <class Traits>
__device__ __forceinline__ void segment_sizes(const SegmentSizesParams& p) {
  using Element = typename Traits::Element;
  __shared__ float parts[kSampledThreads / 32];
  const Geometry& g = p.geometry;
  const int n = blockIdx.x % p.segments, head = blockIdx.x / p.segments;
  const uint16* out = p.out.at(head / p.heads, head % p.heads) + g.query_begin(n) * p.out.row;
  float size = 0.f;
  for (int i = threadIdx.x; i < g.query_count(n) * g.head_dim; i += kSampledThreads) {
    const float x = Element::to_float(out[i / g.head_dim * p.out.row + i % g.head_dim]);
    size += x * x;
  }
  size = sum_of_block(size, parts);
  const int64 place = (static_cast<int64>(head) * g.segments() + n) * p.tiles * kLadderWarps;
  if (threadIdx.x == 0) p.sizes[place] = size;
}

struct ChooseTausParams {
  const float* sums;    // [batch * heads, segments, tiles, kLadder, kLadderWarps]
  const float* sizes;   // [batch * heads, segments, tiles, kLadderWarps]
  const float* errors;  // [heads]: what is asked for
  float* ladders;       // [2, batch * heads, kLadder], each descending
  float* found;         // [2, batch * heads, kLadder]: their errors
  float* taus;          // [batch * heads]
  int all_heads, heads;
  int segments, tiles;
  int done;             // ladders: 0, the first is written; 1, the second is chosen; 2, the taus
  float first[kLadder];
  float weights[kErrorSegments];  // how many segments a sampled one stands for
};

// What was looked at of a head so far.
struct Points {
  float tau[2 * kLadder], error[2 * kLadder];
};

// A warp of the block: a tau of the head's last ladder.
__device__ __forceinline__ float error_at(const ChooseTausParams& p, int head, int i) {
  const int parts = p.tiles * kLadderWarps, count = p.segments * parts;
  const int64 first = static_cast<int64>(head) * count;
  float difference = 0.f, size = 0.f;
#pragma unroll 8
  for (int at = threadIdx.x % 32; at < count; at += 32) {
    const float weight = p.weights[at / parts];
    difference += weight * p.sums[((first + at) / kLadderWarps * kLadder + i) * kLadderWarps + at % kLadderWarps];
    size += weight * p.sizes[first + at];
  }
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) {
    difference += __shfl_xor_sync(kFullWarp, difference, stride);
    size += __shfl_xor_sync(kFullWarp, size, stride);
  }
  // Outputs whose size nobody can tell are off by more than whatever is asked for. NaN is a difference of infinities.
  if (!(size < infinity())) return infinity();
  return difference == 0.f ? 0.f : sqrtf(difference / size);
}

// The next ladder of a head, or its tau.
__device__ __forceinline__ void choose(const ChooseTausParams& p, int head, const Points& points) {
  const float asked = p.errors[head % p.heads];
  const int count = p.done * kLadder;
  // The largest tau that keeps to it, and the next larger one.
  float below = 0.f, error_below = 0.f, above = infinity(), error_above = 0.f;
  bool bounded = false;
  for (int i = 0; i < count; ++i)
    if (points.error[i] <= asked && points.tau[i] > below) {
      below = points.tau[i];
      error_below = points.error[i];
    }
  for (int i = 0; i < count; ++i)
    if (points.tau[i] > below && (!bounded || points.tau[i] < above)) {
      above = points.tau[i];
      error_above = points.error[i];
      bounded = true;
    }
  if (p.done == 1) {
    float* next = p.ladders + (p.all_heads + head) * kLadder;
    for (int i = 0; i < kLadder; ++i) {
      if (!bounded) {
        next[i] = i == 0 ? infinity() : below * exp2f(static_cast<float>(kLadder - i));
      } else if (below == 0.f) {
        next[i] = above * exp2f(-i - 1.f);
      } else {
        next[i] = below * exp2f(log2f(above / below) * (kLadder - i) / (kLadder + 1));
      }
    }
    return;
  }
  float tau = below;
  if (below > 0.f && bounded && above < infinity() && error_above < infinity()) {
    const float low = log2f(fmaxf(error_below, asked / 16)), part = (log2f(asked) - low) / (log2f(error_above) - low);
    tau = below * exp2f(log2f(above / below) * fminf(fmaxf(part, 0.f), 1.f));
  }
  p.taus[head] = tau;
}

// Block: a head, of kLadder warps.
__device__ __forceinline__ void choose_taus(const ChooseTausParams& p) {
  static_assert(kSampledThreads == kLadder * 32);
  __shared__ Points points;
  const int head = blockIdx.x, i = threadIdx.x;
  if (p.done == 0) {
    if (i < kLadder) p.ladders[head * kLadder + i] = p.first[i];
    return;
  }
  const float error = error_at(p, head, i / 32);
  const int last = p.done - 1;
  if (i % 32 == 0) p.found[(last * p.all_heads + head) * kLadder + i / 32] = error;
  __syncthreads();
  if (i < p.done * kLadder) {
    const int at = (i / kLadder * p.all_heads + head) * kLadder + i % kLadder;
    points.tau[i] = p.ladders[at];
    points.error[i] = p.found[at];
  }
  __syncthreads();
  if (i == 0) choose(p, head, points);
}

}  // namespace s2o
