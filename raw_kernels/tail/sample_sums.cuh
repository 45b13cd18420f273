// What a sample of unvisited candidates says of a query: how much they all weigh, how far weighting moves their score, and
// how far the sample's own values count.
// reference/tail.py (tail_weights) is the definition.
#pragma once
#include "common/ptx.cuh"

namespace s2o {

constexpr int kTailSamples = spec::kTailSamples;
constexpr int kTailHalf = kTailSamples / 2;  // samples of even number, and those of odd
constexpr float kLog2E = 1.44269504088896341f;
constexpr float kLargestSum = 1e12f;  // of weights, in units of what a row has found: their squares are finite
constexpr float kLargestSize = 30.f;  // of one of them, in units of log2

// Of products of queries and keys.
struct TailScores {
  float scale_log2;  // with spec::kSoftcap softcap * log2(e), the factor of the tanh
  float cap_scale;   // then the factor of the product inside of it

  // log2 of exp(score), over 2^base
  __device__ __forceinline__ float size(float product, float base) const {
    return fmaf(spec::kSoftcap ? tanh_approx(product * cap_scale) : product, scale_log2, -base);
  }
};

// What all samples say of two rows.
struct SampleFindings {
  float mass[2];      // of all unvisited candidates, as a multiple of what the row has found
  float tilt[2];
  float believed[2];  // how far the samples' own values count, as if both halves of them agreed until these are asked
  float alone[2];     // of them at least: one that carries the weight alone counts for itself
  float weights[2], even[2];  // sums of them, and of those of even number

  // How far the samples' values may move a row's, if both halves agree; a row that is not there has no mass.
  __device__ __forceinline__ float may_bring(int h) const {
    float added = mass[h];
    asm volatile("" : "+f"(added));  // or parts of it are kept for where they come again
    return __fdividef(added, 1.f + added) * believed[h] * (1.f - alone[h]);
  }
};

__device__ __forceinline__ float within_one(float x) { return fminf(fmaxf(x, 0.f), 1.f); }

// How far both halves of the samples agree on what their values are beside the regression's: of a warp's 16 rows together,
// as one row's samples are too few to tell. A row counts by the square of what its samples may bring.
struct HalvesAgreement {
  float agreed = 0.f, both = 0.f;         // sums over elements of a thread's rows: of a b, and of (a + b)^2
  float of_row = 0.f, both_of_row = 0.f;  // those of the row that it is at

  // An element of what the even samples say, and of what the odd ones do.
  __device__ __forceinline__ void add(float a, float b) {
    of_row = fmaf(a, b, of_row);
    both_of_row = fmaf(a + b, a + b, both_of_row);
  }
  // `may`: what the row's samples may bring.
  __device__ __forceinline__ void end_row(float may) {
    if (may > 0.f) {
      agreed = fmaf(may * may, of_row, agreed);
      both = fmaf(may * may, both_of_row, both);
    }
    of_row = both_of_row = 0.f;
  }
  // The whole warp asks; 0 where sums are no numbers.
  __device__ __forceinline__ float found() {
#pragma unroll
    for (int lane = 1; lane < 32; lane *= 2) {
      agreed += __shfl_xor_sync(kFullWarp, agreed, lane);
      both += __shfl_xor_sync(kFullWarp, both, lane);
    }
    return agreed > 0.f ? within_one(4.f * agreed / both) : 0.f;
  }
};

// Of two rows of which a thread has a quarter each, and the rest its neighbours, lanes 4 i .. 4 i + 3. Of a half's samples
// 8 j + lane % 4 * 2 + e from any multiple of 8 on it has product(j, h, e) with row h.
struct SampleSums {
  float base[2];      // log2 of what weights are multiples of
  float middle[2];    // some product in their midst, so that squares of distances from it are exact enough
  float weights[2], squares[2], weighted[2], mean[2], variance[2];
  float even[2];      // weights of the first half
  float top[2];       // the largest size
  bool too_large[2];  // weights, the first time
  float one;          // 1 / samples^2

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      weights[h] = squares[h] = weighted[h] = mean[h] = variance[h] = 0.f;
      top[h] = -infinity();
    }
  }
  static __device__ __forceinline__ float of_quad(float x) {
    x += __shfl_xor_sync(kFullWarp, x, 1);
    return x + __shfl_xor_sync(kFullWarp, x, 2);
  }
  static __device__ __forceinline__ float of_largest(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
  }
  // Counts all from now on in units of 2^other, and says what sums so far are multiplied with.
  __device__ __forceinline__ float rebase(int h, float other) {
    const float factor = exp2_approx(base[h] - other);
    top[h] += base[h] - other;
    base[h] = other;
    weights[h] *= factor;
    even[h] *= factor;
    squares[h] *= factor * factor;
    weighted[h] *= factor;
    return factor;
  }
  // Of products with kTiles * 8 samples.
  template <int kTiles, class Product>
  __device__ __forceinline__ void find_middle(const Product& product) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < kTiles; ++j) sum += product(j, h, 0) + product(j, h, 1);
      middle[h] = of_quad(sum) * (1.f / (kTiles * 8));
    }
  }
  // Adds kTiles * 8 samples of a half, from its number `first` on. Number i of half `half` is sample 2 i + half; sample n
  // stands for a share of (2 n + 1) / samples^2. keep(j, h, e, weight) takes its weight.
  template <int kTiles, class Product, class Keep>
  __device__ __forceinline__ void add(int half, int first, const TailScores& scores, const Product& product,
                                      const Keep& keep) {
    float first_share = static_cast<float>(4 * first + 2 * half + static_cast<int>(threadIdx.x) % 4 * 8 + 1) * one;
    asm volatile("" : "+f"(first_share));  // or all shares, worked out once, are kept for where they come again
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float share = fmaf(32 * j + 4 * e, one, first_share);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float x = product(j, h, e), off = x - middle[h], part = share * off;
          const float size = scores.size(x, base[h]), weight = share * exp2_approx(size);
          top[h] = fmaxf(top[h], size);
          keep(j, h, e, weight);
          weights[h] += weight;
          squares[h] = fmaf(weight, weight, squares[h]);
          weighted[h] = fmaf(weight, off, weighted[h]);
          mean[h] += part;
          variance[h] = fmaf(part, off, variance[h]);
        }
      }
  }
  // Whether weights of one of the thread's rows are too large, or not finite. Then that row's base is to be raised to its
  // own largest sample.
  __device__ __forceinline__ bool overflow() {
#pragma unroll
    for (int h = 0; h < 2; ++h) too_large[h] = !(of_quad(weights[h]) < kLargestSum);
    return too_large[0] || too_large[1];
  }
  __device__ __forceinline__ void raise_base() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float most = of_largest(top[h]);
      if (too_large[h]) base[h] += fmaxf(most, 0.f);  // others keep their bits
    }
  }
  __device__ __forceinline__ void keep_even() {
    even[0] = weights[0];
    even[1] = weights[1];
  }
  // Of all `samples`, which stand for `left` candidates, of a row whose log2 of what it has found is `found`. Mass 0 where
  // something is not finite, or some sample weighs more than 2^kTailReach times that.
  __device__ __forceinline__ SampleFindings finish(int left, int samples, float scale, const float (&found)[2]) const {
    SampleFindings y;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = of_quad(weights[h]), mean_off = of_quad(mean[h]), of_even = of_quad(even[h]);
      const float spread = of_quad(variance[h]) - mean_off * mean_off;
      const float moved = __fdividef(of_quad(weighted[h]), sum) - mean_off;
      const float carrying = __fdividef(sum * sum, of_quad(squares[h]));  // samples, by how evenly weights are spread
      const float above = base[h] - found[h];  // of the largest sample, where weights were too large; else 0
      float mass = __fdividef(sum * exp2_approx(above) * left * carrying, carrying + spec::kTailDoubt);
      // One that carries it alone and weighs much of what the row has found is no sample of others, but a key that comes
      // too late: it counts for itself.
      const float largest = exp2_approx(of_largest(top[h]) + above);
      y.alone[h] = within_one(largest * spec::kTailTrifleParts - 1.f) * within_one(2.f - carrying);
      if (y.alone[h] > 0.f) mass = fmaf(y.alone[h], largest, (1.f - y.alone[h]) * mass);
      const float tilt = spread > 0.f ? fminf(fmaxf(__fdividef(moved, scale * spread), 0.f), 1.f) : 0.f;
      const bool is_near = fabsf(found[h]) < infinity() && above <= spec::kTailReach;
      if (!is_near || !(mass < infinity()) || !(tilt <= 1.f)) mass = 0.f;
      y.mass[h] = mass;
      y.tilt[h] = tilt;
      const float learnt = fmaxf(1.f - __fdividef(carrying * 4.f, 3.f * samples), 0.f);
      const float lighter = __fdividef(fminf(of_even, sum - of_even), sum);
      y.believed[h] = learnt * within_one(mass * spec::kTailTrifleParts - 1.f) *
                      within_one(lighter * spec::kTailLightParts - 1.f);
      y.weights[h] = sum;
      y.even[h] = of_even;
    }
    return y;
  }
};

}  // namespace s2o
