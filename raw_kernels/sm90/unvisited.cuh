// What the candidates that a q tile has not visited count for (reference/tail.py): a consumer adds it to the output that it has
// stored, as registers do not hold that beside the weights of a sample. For it the producer brings keys of a sample of theirs, in two halves, the covariance of values and keys in the
// place of another tile of keys, and the sample's values.
#pragma once
#include "sm90/outputs.cuh"
#include "sm90/products.cuh"
#include "tail/with_tail.cuh"

namespace s2o {
namespace sm90 {

constexpr float kMostLift = 100.f;  // log2 of the largest factor by which weights are lifted to be packed
constexpr float kMostOver = 1024.f;

// This warpgroup's queries, as wgmma has a in registers, in bfloat16 as covariances are.
template <class Traits>
__device__ __forceinline__ void load_queries(const Consumer<Traits>& my, uint32 nth,
                                             uint32 (&q)[Traits::kHeadDim / 16][4]) {
  using Element = typename Traits::Element;
  const int row = my.first_row - my.lane / 4 + my.lane % 16;
  const uint32 tile = shared_address(my.shared.q[nth % Traits::kQueryPlaces]);
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
    ldmatrix_x4(q[c], atom_chunk<Traits::kBlockM>(tile, row, c * 2 + my.lane / 16));
    if constexpr (!Element::kWide)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        q[c][i] = Bfloat16::pack(Element::low(q[c][i]), Element::high(q[c][i]));
        asm volatile("" : "+r"(q[c][i]));
      }
  }
}

template <int kValue>
struct Number { static constexpr int value = kValue; };

// Weights of both halves of the sample, packed as products with values have them.
template <class Traits>
struct SampleWeights {
  uint32 packed[2][Traits::kKeyTiles][2];
  float lift[2];  // [rows] what packed ones are multiples of weights by
};

// Of the scores in s of a half of the sample. The largest of the first half is packed as kTailSamples / 4 times its share, so
// that float16 holds the others as well; of the second half they may be larger by 2^kMostOver.
template <int kHalf, class Traits>
__device__ __forceinline__ void weigh_half(Consumer<Traits>& my, const TailScores& scores, const float (&found)[2],
                                           SampleSums& sums, SampleWeights<Traits>& weights) {
  static_assert(Traits::kBlockN == kTailHalf, "one tile of keys is half of the sample");
  using Element = typename Traits::Element;
  const auto product = [&](int j, int h, int e) { return my.s[j * 4 + 2 * h + e]; };
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = -infinity();
#pragma unroll
    for (int j = 0; j < Traits::kKeyTiles; ++j) most = fmaxf(most, fmaxf(product(j, h, 0), product(j, h, 1)));
    const float size = sums.of_largest(scores.size(most, found[h]));  // log2, as a multiple of what the row has found
    const float base = found[h] + (size > kLargestSize ? size : 0.f);
    if constexpr (kHalf == 0) {
      sums.base[h] = base;
      weights.lift[h] = exp2_approx(fminf(base - found[h] - size, kMostLift)) * (kTailSamples / 4);
    } else {
      float lower = 1.f;  // the first half's packed weights
      if (base > sums.base[h]) weights.lift[h] = __fdividef(weights.lift[h], sums.rebase(h, base));
      const float over = exp2_approx(size + found[h] - sums.base[h]) * weights.lift[h] * (4.f / kTailSamples);
      if (over > kMostOver) lower = __fdividef(1.f, over);
      if (__any_sync(kFullWarp, lower != 1.f)) {
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j) {
          uint32& pair = weights.packed[0][j][h];
          pair = Element::pack(Element::low(pair) * lower, Element::high(pair) * lower);
        }
        weights.lift[h] *= lower;
      }
    }
  }
  if constexpr (kHalf == 0) {
    sums.template find_middle<Traits::kKeyTiles>(product);
    sums.clear();
  }
  sums.template add<Traits::kKeyTiles>(kHalf, 0, scores, product, [&](int j, int h, int e, float weight) {
    my.s[j * 4 + 2 * h + e] = weight * weights.lift[h];
  });
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      weights.packed[kHalf][j][h] = Element::pack(my.s[j * 4 + 2 * h], my.s[j * 4 + 2 * h + 1]);
  if constexpr (kHalf == 0) sums.keep_even();
}

// x = queries times kCount / 4 * 8 rows of the covariance, from row `first` on. Queries are read anew: registers are few.
template <int kCount, class Traits>
__device__ __forceinline__ void regress(const Consumer<Traits>& my, float (&x)[kCount], uint32 nth, uint32 covariance,
                                        int first) {
  uint32 q[Traits::kHeadDim / 16][4];
  load_queries(my, nth, q);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c)
    Wgmma<Bfloat16>::template rs_rows<Traits::kRowsStride>(
        x, q[c],
        descriptor_at(covariance, first / 8 * Traits::kRowsStride + c / 4 * Traits::kColumnsStride + c % 4 * 32), c > 0);
  wgmma_commit();
  wgmma_wait<0>();
  finished(x);
}
// x (+)= weights of a half times kCount / 4 * 8 columns of values, from column `first` on, a multiple of 64. In flight.
template <int kCount, class Traits>
__device__ __forceinline__ void issue_values(float (&x)[kCount], const uint32 (&weights)[Traits::kKeyTiles][2],
                                             uint32 values, int first, bool adds) {
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < Traits::kKeyTiles; j += 2) {
    const uint32 a[4] = {weights[j][0], weights[j][1], weights[j + 1][0], weights[j + 1][1]};
    Wgmma<typename Traits::Element>::template rs<Traits::kRowsStride>(
        x, a, descriptor_at(values, j * Traits::kRowsStride + first / 64 * Traits::kColumnsStride), j > 0 || adds);
  }
  wgmma_commit();
}

// What is added to a q tile's rows, and what to.
template <class Traits>
struct Unvisited {
  SampleWeights<Traits> weights;
  uint16* out[2];
  bool adds[2];
  float added[2], slope[2], believed[2];
  float per_sample[2];                   // what makes a sum of packed weights 1
  uint32 covariance, values[2];          // descriptors
};

// By how far both halves agree on some elements. per_half: what makes a half's sum of packed weights 1.
template <class Traits>
__device__ __forceinline__ void believe(const Consumer<Traits>& my, Unvisited<Traits>& rows, const float (&per_half)[2][2],
                                        uint32 nth) {
  constexpr int kEvidence = spec::kTailEvidence;
  const float2* means = reinterpret_cast<const float2*>(my.shared.mean_values) + my.lane % 4;
  float x[kEvidence / 2], even[kEvidence / 2], odd[kEvidence / 2];
  regress(my, x, nth, rows.covariance, 0);
  issue_values<kEvidence / 2, Traits>(even, rows.weights.packed[0], rows.values[0], 0, false);
  issue_values<kEvidence / 2, Traits>(odd, rows.weights.packed[1], rows.values[1], 0, false);
  wgmma_wait<0>();
  finished(even);
  finished(odd);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float agreed = 0.f, both = 0.f;
#pragma unroll
    for (int d = 0; d < kEvidence / 8; ++d) {
      const float2 mean = means[d * 4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = d * 4 + 2 * h + e;
        const float regressed = fmaf(rows.slope[h], x[i], e == 0 ? mean.x : mean.y);
        const float a = fmaf(even[i], per_half[0][h], -regressed), b = fmaf(odd[i], per_half[1][h], -regressed);
        agreed = fmaf(a, b, agreed);
        both = fmaf(a + b, a + b, both);
      }
    }
    rows.believed[h] *= agreement(SampleSums::of_quad(agreed), SampleSums::of_quad(both));
  }
}

// acc = what samples' values, as far as they are believed, add to each row of the output. Nothing, and nobody believes them, where
// one of them is not finite.
template <class Traits>
__device__ __forceinline__ void multiply_values(Consumer<Traits>& my, Unvisited<Traits>& rows) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float factor = rows.added[h] * rows.believed[h] * rows.per_sample[h];
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; ++j) {
        uint32& pair = rows.weights.packed[half][j][h];
        pair = Element::pack(Element::low(pair) * factor, Element::high(pair) * factor);
        asm volatile("" : "+r"(pair));  // one after the other: registers are few
      }
  }
  wgmma_fence();
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int j = 0; j < Traits::kKeyTiles; j += 2) {
      const uint32(&p)[Traits::kKeyTiles][2] = rows.weights.packed[half];
      const uint32 a[4] = {p[j][0], p[j][1], p[j + 1][0], p[j + 1][1]};
      Wgmma<Element>::template rs<Traits::kRowsStride>(
          my.acc, a, descriptor_at(rows.values[half], j * Traits::kRowsStride), half > 0 || j > 0);
    }
  wgmma_commit();
  wgmma_wait<0>();  // before queries take registers of the weights
  finished(my.acc);
  bool finite = true;  // all of them, as 0 times what is not is NaN
#pragma unroll
  for (int i = 0; i < Traits::kDimTiles * 4; ++i) finite &= fabsf(my.acc[i]) < infinity();
  if (named_count(kTail + my.group, kWarpgroup, !finite) > 0) {
    rows.believed[0] = rows.believed[1] = 0.f;
    clear_output(my);
  }
}

// acc += what the regression adds, but for the mean value's part.
template <class Traits>
__device__ __forceinline__ void multiply_covariance(Consumer<Traits>& my, const Unvisited<Traits>& rows, uint32 nth) {
  uint32 q[Traits::kHeadDim / 16][4];
  load_queries(my, nth, q);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float factor = rows.added[i % 2] * (1.f - rows.believed[i % 2]) * rows.slope[i % 2];
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      q[c][i] = Bfloat16::pack(Bfloat16::low(q[c][i]) * factor, Bfloat16::high(q[c][i]) * factor);
      asm volatile("" : "+r"(q[c][i]));
    }
  }
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c)
    Wgmma<Bfloat16>::template rs_rows<Traits::kRowsStride>(
        my.acc, q[c], descriptor_at(rows.covariance, c / 4 * Traits::kColumnsStride + c % 4 * 32), true);
  wgmma_commit();
  wgmma_wait<0>();
  finished(my.acc);
}

// Adds acc and the mean value to the output. Neighbouring lanes exchange halves of two dim tiles, as store_row has it.
template <class Traits>
__device__ __forceinline__ void add_to_output(const Consumer<Traits>& my, const Unvisited<Traits>& rows) {
  using Element = typename Traits::Element;
  const float2* means = reinterpret_cast<const float2*>(my.shared.mean_values) + my.lane % 4;
  const bool is_odd = my.lane % 2;
  const int of_lane = is_odd * 8 + my.lane % 4 / 2 * 4;  // of 16 elements the first of this lane's 4
#pragma unroll
  for (int d = 0; d < Traits::kDimTiles; d += 2)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float of_mean = rows.added[h] * (1.f - rows.believed[h]), kept = 1.f - rows.added[h];
      uint32 more[2];  // of both tiles
#pragma unroll
      for (int odd = 0; odd < 2; ++odd) {
        const float2 mean = means[(d + odd) * 4];
        const float* x = &my.acc[(d + odd) * 4 + 2 * h];
        more[odd] = Bfloat16::pack(fmaf(of_mean, mean.x, x[0]), fmaf(of_mean, mean.y, x[1]));
      }
      const uint32 other = __shfl_xor_sync(kFullWarp, is_odd ? more[0] : more[1], 1);
      const uint32 pairs[2] = {is_odd ? other : more[0], is_odd ? more[1] : other};
      if (!rows.adds[h] || d * 8 + of_lane + 4 > my.params.geometry.head_dim) continue;
      uint2* at = reinterpret_cast<uint2*>(rows.out[h] + d * 8 + of_lane);
      const uint2 was = *at;
      *at = make_uint2(pack_finite<Element>(fmaf(Element::low(was.x), kept, Bfloat16::low(pairs[0])),
                                            fmaf(Element::high(was.x), kept, Bfloat16::high(pairs[0]))),
                       pack_finite<Element>(fmaf(Element::low(was.y), kept, Bfloat16::low(pairs[1])),
                                            fmaf(Element::high(was.y), kept, Bfloat16::high(pairs[1]))));
    }
}

// Adds to the rows at `position` (-1: none) of the output, which are stored with the state (m, l), what `left` candidates weigh.
template <class Traits>
__device__ __forceinline__ void add_unvisited(Consumer<Traits>& my, const TailAttentionParams& all, const QTile& tile,
                                              const int (&position)[2], uint32 nth, uint32 q, int left) {
  const TailScores scores{all.scale_log2, all.cap_scale};
  const float found[2] = {my.m[0] + __log2f(my.l[0]), my.m[1] + __log2f(my.l[1])};
  Unvisited<Traits> rows;
  SampleSums sums;
  const auto half = [&](auto number) {
    issue_scores(my, q);
    pass_turn(my);
    wgmma_wait<0>();
    finished(my.s);
    release_k(my);
    weigh_half<decltype(number)::value>(my, scores, found, sums, rows.weights);
  };
  half(Number<0>());
  half(Number<1>());
  SampleFindings all_say = sums.finish(left, all.scale, found);
  const bool finite = moments_are_finite<Traits::kHeadDim>(my.shared.mean_values);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float mass = finite ? all_say.mass[h] : 0.f, unit = __fdividef(1.f, rows.weights.lift[h]);
    rows.adds[h] = mass > 0.f && position[h] >= 0;
    rows.believed[h] = finite ? all_say.believed[h] : 0.f;
    rows.slope[h] = all_say.tilt[h] * all.scale;
    rows.per_sample[h] = all_say.per_sample[h] * unit;
    all_say.per_half[0][h] *= unit;
    all_say.per_half[1][h] *= unit;
    rows.added[h] = __fdividef(mass, 1.f + mass);
    const int64 row = max(position[h], 0);
    rows.out[h] = my.params.out.at(tile.batch, tile.head_in_batch) + row * my.params.out.row;
    if (rows.adds[h] && my.params.lse && my.lane % 4 == 0)
      my.params.lse[static_cast<int64>(tile.head) * my.params.geometry.seqlen_q + row] =
          0.69314718055994531f * (found[h] + log1pf(mass) * kLog2E);
  }

  barrier_wait(my.shared.k_full[my.k_ring.slot], my.k_ring.parity);
  rows.covariance = tile_descriptor(shared_address(my.shared.k[my.k_ring.slot]), 0);  // in place of keys
  const auto next = my.v_ring.after();
  barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
  barrier_wait(my.shared.v_full[next.slot], next.parity);
  rows.values[0] = tile_descriptor(shared_address(my.shared.v[my.v_ring.slot]), Traits::kColumnsStride);
  rows.values[1] = tile_descriptor(shared_address(my.shared.v[next.slot]), Traits::kColumnsStride);
  // Of the warpgroup, whose products are common.
  if (named_count(kTail + my.group, kWarpgroup, rows.believed[0] > 0.f || rows.believed[1] > 0.f) > 0) {
    believe(my, rows, all_say.per_half, nth);
    multiply_values(my, rows);
  } else {
    clear_output(my);
  }
  multiply_covariance(my, rows, nth);
  add_to_output(my, rows);
  release(my, my.shared.q_empty[nth % Traits::kQueryPlaces]);
  release_k(my);
  release_v(my);
  release_v(my);
}

}  // namespace sm90
}  // namespace s2o
