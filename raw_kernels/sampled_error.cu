// The error of sampled segments at several taus, and the taus that keep to an error. reference/error_taus.py is the
// definition.
//
//   repeat_queries: a segment's queries for each tau of a ladder -> [heads, kLadder, rows, head_dim]
//   error_sums: outputs [heads, kLadder, rows, head_dim] and dense ones [heads, rows, head_dim]
//     -> sums of squares of their differences [heads, kLadder], and of the dense ones [heads]
//   choose_taus: those of all segments -> the next ladder of each head, or its tau
#include "common/geometry.cuh"

namespace s2o {

constexpr int kLadder = spec::kLadder;
constexpr int kSampledThreads = 256;
constexpr int kErrorSegments = 32;  // of a search, at most
static_assert(kErrorSegments == spec::kErrorSegments);

struct RepeatQueriesParams {
  Tensor<const uint16> q;  // [1, heads, rows, head_dim]
  uint16* to;
  int rows, head_dim;
};

// Block: a head at a tau.
__device__ __forceinline__ void repeat_queries(const RepeatQueriesParams& p) {
  const int elements = p.rows * p.head_dim;
  const uint16* q = p.q.at(0, blockIdx.x / kLadder);
  uint16* to = p.to + static_cast<int64>(blockIdx.x) * elements;
  for (int i = threadIdx.x; i < elements; i += kSampledThreads) {
    const int row = i / p.head_dim;
    to[i] = q[row * p.q.row + (i - row * p.head_dim)];
  }
}

struct ErrorSumsParams {
  const uint16 *out, *dense;
  float *sums, *sizes;
  int elements;  // of a head: rows * head_dim
};

template <class Element_>
struct SampledTraits {
  using Element = Element_;
};

// Block: a head at a tau.
template <class Traits>
__device__ __forceinline__ void error_sums(const ErrorSumsParams& p) {
  using Element = typename Traits::Element;
  __shared__ float parts[2][kSampledThreads / 32];
  const int head = blockIdx.x / kLadder;
  const uint16* out = p.out + static_cast<int64>(blockIdx.x) * p.elements;
  const uint16* dense = p.dense + static_cast<int64>(head) * p.elements;
  float difference = 0.f, size = 0.f;
  for (int i = threadIdx.x; i < p.elements; i += kSampledThreads) {
    const float exact = Element::to_float(dense[i]), off = Element::to_float(out[i]) - exact;
    difference += off * off;
    size += exact * exact;
  }
#pragma unroll
  for (int stride = 16; stride > 0; stride /= 2) {
    difference += __shfl_xor_sync(kFullWarp, difference, stride);
    size += __shfl_xor_sync(kFullWarp, size, stride);
  }
  if (threadIdx.x % 32 == 0) {
    parts[0][threadIdx.x / 32] = difference;
    parts[1][threadIdx.x / 32] = size;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  difference = size = 0.f;
  for (int w = 0; w < kSampledThreads / 32; ++w) {
    difference += parts[0][w];
    size += parts[1][w];
  }
  p.sums[blockIdx.x] = difference;
  if (blockIdx.x % kLadder == 0) p.sizes[head] = size;
}

struct ChooseTausParams {
  const float* sums;    // [rounds, segments, heads, kLadder]
  const float* sizes;   // [segments, heads]
  const float* errors;  // [heads] what is asked for
  float* ladders;       // [rounds, heads, kLadder], each descending; the first is given
  float* taus;          // [heads], of the last round
  int heads, segments;
  int done;             // rounds: 1, the second ladder is chosen; 2, the taus
  float weights[kErrorSegments];  // how many segments a sampled one stands for
};

// Thread: a head.
__device__ __forceinline__ void choose_taus(const ChooseTausParams& p) {
  const int head = blockIdx.x * blockDim.x + threadIdx.x;
  if (head >= p.heads) return;
  const float asked = p.errors[head];
  float size = 0.f;
  for (int n = 0; n < p.segments; ++n) size += p.weights[n] * p.sizes[n * p.heads + head];
  // The largest tau that keeps to it, and the next larger one that was looked at.
  float below = -1.f, error_below = 0.f, above = infinity(), error_above = 0.f, least = infinity();
  const auto error_at = [&](int round, int i) {
    float difference = 0.f;
    for (int n = 0; n < p.segments; ++n)
      difference += p.weights[n] * p.sums[((round * p.segments + n) * p.heads + head) * kLadder + i];
    return difference == 0.f ? 0.f : sqrtf(difference / size);  // NaN keeps to nothing
  };
  const auto tau_at = [&](int round, int i) { return p.ladders[(round * p.heads + head) * kLadder + i]; };
  for (int round = 0; round < p.done; ++round)
    for (int i = 0; i < kLadder; ++i) {
      const float tau = tau_at(round, i), error = error_at(round, i);
      least = fminf(least, tau);
      if (error <= asked && tau > below) {
        below = tau;
        error_below = error;
      }
    }
  bool bounded = false;
  for (int round = 0; round < p.done; ++round)
    for (int i = 0; i < kLadder; ++i) {
      const float tau = tau_at(round, i);
      if (tau > below && (!bounded || tau < above)) {
        above = tau;
        error_above = error_at(round, i);
        bounded = true;
      }
    }
  if (p.done == 1) {
    float* next = p.ladders + (p.heads + head) * kLadder;
    for (int i = 0; i < kLadder; ++i) {
      if (below < 0.f) {
        next[i] = least * exp2f(-2.f * i - 1.f);
      } else if (!bounded) {
        next[i] = i == 0 ? infinity() : below * exp2f(static_cast<float>(kLadder - i));
      } else {
        next[i] = below * exp2f(log2f(above / below) * (kLadder - i) / (kLadder + 1));
      }
    }
    return;
  }
  float tau = fmaxf(below, 0.f);
  if (below > 0.f && bounded && above < infinity() && error_above < infinity()) {
    const float low = log2f(fmaxf(error_below, asked / 16)), part = (log2f(asked) - low) / (log2f(error_above) - low);
    tau = below * exp2f(log2f(above / below) * fminf(fmaxf(part, 0.f), 1.f));
  }
  p.taus[head] = tau;
}

}  // namespace s2o
