// What the candidates that a q tile has not visited count for (reference/tail.py): a consumer adds it to its output
// before it stores that. For it the producer brings keys and values of a sample of theirs, in two halves, and then the
// covariance of values and keys in the place of a tile of keys.
#pragma once
#include "common/keep_finite.cuh"
#include "sm90/products.cuh"
#include "tail/with_tail.cuh"

namespace s2o {
namespace sm90 {

constexpr int kPart = 64;  // samples whose scores are found at a time: registers have no room for more
// Float16: log2 of the largest factor by which weights are lifted to be packed, and how many times the largest of the
// first part one of a later part may weigh before all are lowered.
constexpr float kMostLift = 100.f, kMostOver = 1024.f;

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
      for (int i = 0; i < 4; ++i) q[c][i] = Bfloat16::pack(Element::low(q[c][i]), Element::high(q[c][i]));
  }
}

// What a consumer knows of the sample.
template <class Traits>
struct Sample {
  SampleSums sums;
  float s[kPart / 2];                   // [rows, samples] of a part: scores, then weights
  uint32 p[kPart / 8][2];               // weights, packed in pairs of samples
  float lift[2];                        // float16: what packed weights are multiples of weights by
  float lower[2];                       // what the last part makes of sums before it
  float values[Traits::kDimTiles * 4];  // [rows, dims] sums of values by packed weights, see `sampled`
  int samples, parts;
  uint32 output[Traits::kDimTiles][2];  // [rows, dims] of what has been visited, packed: acc would be twice as many
};

// Where sums of values are: where there are as many, in the place of a tile's scores. With an array more that products end
// in ptxas finds too few registers.
template <class Traits>
__device__ __forceinline__ float (&sampled(Consumer<Traits>& my, Sample<Traits>& sample))[Traits::kDimTiles * 4] {
  if constexpr (Traits::kDimTiles == Traits::kKeyTiles) {
    return my.s;
  } else {
    return sample.values;
  }
}

// The first of them, of samples of even number.
template <class Traits>
__device__ __forceinline__ float& even_sum(const Consumer<Traits>& my, int i) {
  return my.shared.even[i][threadIdx.x - kWarpgroup];
}

// Packs the output as it would be stored.
template <class Traits>
__device__ __forceinline__ void park_output(Consumer<Traits>& my, Sample<Traits>& sample) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    keep_finite<typename Traits::Element, Traits::kDimTiles * 2>(
        [&](int i) -> float& { return my.acc[i / 2 * 4 + 2 * h + i % 2]; }, my.l[h]);
    const float inverse = my.l[h] == 0.f ? 0.f : 1.f / my.l[h];
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; ++d) {
      const float* x = &my.acc[d * 4 + 2 * h];
      sample.output[d][h] = Traits::Element::pack(x[0] * inverse, x[1] * inverse);
    }
  }
}

template <class Traits>
__device__ __forceinline__ void take_output(Consumer<Traits>& my, const Sample<Traits>& sample) {
  using Element = typename Traits::Element;
#pragma unroll
  for (int i = 0; i < Traits::kDimTiles * 4; ++i) {
    const uint32 pair = sample.output[i / 4][i / 2 % 2];
    my.acc[i] = (i % 2 == 0 ? Element::low(pair) : Element::high(pair)) * my.l[i / 2 % 2];
  }
}

// Scores of a part, in flight.
template <class Traits>
__device__ __forceinline__ void issue_part(const Consumer<Traits>& my, Sample<Traits>& sample, uint32 q, int part) {
  if (part % 2 == 0) barrier_wait(my.shared.k_full[my.k_ring.slot], my.k_ring.parity);
  const uint32 k = descriptor_at(tile_descriptor(shared_address(my.shared.k[my.k_ring.slot]), 0),
                                 part % 2 * (kPart / 8 * Traits::kRowsStride));
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
    const uint32 column = c % 4 * 32;
    Wgmma<typename Traits::Element>::template ss<Traits::kRowsStride>(
        sample.s, descriptor_at(q, c / 4 * Traits::kQueryAtom + column),
        descriptor_at(k, c / 4 * Traits::kColumnsStride + column), c > 0);
  }
  wgmma_commit();
}

// values (+)= packed weights of a part times its values, in flight.
template <class Traits>
__device__ __forceinline__ void issue_values(Consumer<Traits>& my, Sample<Traits>& sample, int part) {
  if (part % 2 == 0) barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
  const uint32 v = descriptor_at(tile_descriptor(shared_address(my.shared.v[my.v_ring.slot]), Traits::kColumnsStride),
                                 part % 2 * (kPart / 8 * Traits::kRowsStride));
  wgmma_fence();
#pragma unroll
  for (int j = 0; j < kPart / 8; j += 2) {
    const uint32 a[4] = {sample.p[j][0], sample.p[j][1], sample.p[j + 1][0], sample.p[j + 1][1]};
    Wgmma<typename Traits::Element>::template rs<Traits::kRowsStride>(
        sampled(my, sample), a, descriptor_at(v, j * Traits::kRowsStride), j > 0 || part > 0);
  }
  wgmma_commit();
}

// Scores of a part become weights. Where they are larger than before, sums are lowered. In float16 the largest of the
// first part is packed as kTailSamples / 4 times its share, so that others are there as well.
template <bool kFirst, class Traits>
__device__ __forceinline__ void weigh_part(const TailScores& scores, const float (&found)[2], Sample<Traits>& sample,
                                           int part) {
  constexpr bool kLifts = !Traits::Element::kWide;
  SampleSums& sums = sample.sums;
  const auto product = [&](int j, int h, int e) { return sample.s[j * 4 + 2 * h + e]; };
  if (2 * part == sample.parts) sums.keep_even();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = -infinity();
#pragma unroll
    for (int j = 0; j < kPart / 8; ++j) most = fmaxf(most, fmaxf(product(j, h, 0), product(j, h, 1)));
    const float size = sums.of_largest(scores.size(most, found[h]));  // log2, as a multiple of what the row has found
    const float base = found[h] + (size > kLargestSize ? size : 0.f);
    sample.lower[h] = 1.f;
    if (kFirst) {
      sums.base[h] = base;
      if (!kLifts) continue;
      sample.lift[h] = exp2_approx(fminf(base - found[h] - size, kMostLift)) * (kTailSamples / 4);
    } else {
      const float lowered = base > sums.base[h] ? sums.rebase(h, base) : 1.f;
      if (!kLifts) {
        sample.lower[h] = lowered;
        continue;
      }
      // As if the part were the first. Quotients are formed of what is known to be finite.
      const float own = exp2_approx(fminf(sums.base[h] - found[h] - size, kMostLift)) * (kTailSamples / 4);
      if (sample.lift[h] > kMostOver * own * lowered) {
        sample.lower[h] = __fdividef(own * lowered, sample.lift[h]);
        sample.lift[h] = own;
      } else {
        sample.lift[h] = __fdividef(sample.lift[h], lowered);  // packed weights keep their unit
      }
    }
  }
  if (kFirst) {
    sums.template find_middle<kPart / 8>(product);
    sums.clear();
  }
  const int half = sample.parts == 2 ? part : part / 2, first = sample.parts == 2 ? 0 : part % 2 * kPart;
  sums.template add<kPart / 8>(half, first, scores, product, [&](int j, int h, int e, float weight) {
    sample.s[j * 4 + 2 * h + e] = kLifts ? weight * sample.lift[h] : weight;
  });
}
template <class Traits>
__device__ __forceinline__ void pack_part(Sample<Traits>& sample) {
#pragma unroll
  for (int j = 0; j < kPart / 8; ++j)
#pragma unroll
    for (int h = 0; h < 2; ++h)
      sample.p[j][h] = Traits::Element::pack(sample.s[j * 4 + 2 * h], sample.s[j * 4 + 2 * h + 1]);
}

template <class Traits>
__device__ __forceinline__ void keep_even(Consumer<Traits>& my, Sample<Traits>& sample) {
#pragma unroll
  for (int i = 0; i < spec::kTailEvidence / 2; ++i) even_sum(my, i) = sampled(my, sample)[i];
}
template <class Traits>
__device__ __forceinline__ void lower_values(Consumer<Traits>& my, Sample<Traits>& sample, int part) {
  if (!__any_sync(kFullWarp, sample.lower[0] != 1.f || sample.lower[1] != 1.f)) return;
#pragma unroll
  for (int i = 0; i < Traits::kDimTiles * 4; ++i) sampled(my, sample)[i] *= sample.lower[i / 2 % 2];
  if (2 * part < sample.parts) return;
#pragma unroll
  for (int i = 0; i < spec::kTailEvidence / 2; ++i) even_sum(my, i) *= sample.lower[i / 2 % 2];
}

// How far each row's samples are believed, by how far both halves agree on some elements. `all_say` of packed weights.
template <class Traits>
__device__ __forceinline__ void believe(Consumer<Traits>& my, Sample<Traits>& sample, SampleFindings& all_say,
                                        float scale, uint32 covariance, uint32 nth) {
  constexpr int kEvidence = spec::kTailEvidence;
  float x[kEvidence / 2];
  uint32 q[Traits::kHeadDim / 16][4];
  load_queries(my, nth, q);
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c)
    Wgmma<Bfloat16>::template rs_rows<Traits::kRowsStride>(
        x, q[c], descriptor_at(covariance, c / 4 * Traits::kColumnsStride + c % 4 * 32), c > 0);
  wgmma_commit();
  wgmma_wait<0>();
  finished(x);
  const float2* means = reinterpret_cast<const float2*>(my.shared.mean_values) + my.lane % 4;
  HalvesAgreement agreement;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float per_even = __fdividef(1.f, all_say.even[h]);
    const float per_odd = __fdividef(1.f, all_say.weights[h] - all_say.even[h]);
    float zero = 0.f;
#pragma unroll
    for (int d = 0; d < kEvidence / 8; ++d) {
      const float2 mean = means[d * 4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int i = d * 4 + 2 * h + e;
        const float regressed = fmaf(all_say.tilt[h] * scale, x[i], e == 0 ? mean.x : mean.y);
        const float sum = even_sum(my, i);
        agreement.add(fmaf(sum, per_even, -regressed), fmaf(sampled(my, sample)[i] - sum, per_odd, -regressed));
      }
    }
    // A value that is not finite makes sums of every row so. Then no row believes its samples.
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; ++d)
      zero = fmaf(sampled(my, sample)[d * 4 + 2 * h], 0.f, fmaf(sampled(my, sample)[d * 4 + 2 * h + 1], 0.f, zero));
    if (SampleSums::of_quad(zero) != 0.f) all_say.believed[h] = all_say.alone[h] = 0.f;
    agreement.end_row(all_say.may_bring(h));
  }
  const float believed = agreement.found();
#pragma unroll
  for (int h = 0; h < 2; ++h) all_say.believed[h] = fmaxf(all_say.believed[h] * believed, all_say.alone[h]);
}

// Adds to acc what the rows' samples say: their values as far as they are believed, else the regression's.
template <class Traits>
__device__ __forceinline__ void add_findings(Consumer<Traits>& my, Sample<Traits>& sample,
                                             const SampleFindings& all_say, float scale, uint32 covariance,
                                             uint32 nth) {
  using Element = typename Traits::Element;
  const float2* means = reinterpret_cast<const float2*>(my.shared.mean_values) + my.lane % 4;
  float slope[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float mass = all_say.mass[h];
    const bool adds = mass > 0.f;
    const float added = adds ? __fdividef(mass, 1.f + mass) : 0.f, kept = adds ? 1.f - added : my.l[h];
    const float of_samples = added * all_say.believed[h], of_mean = added - of_samples;
    const bool believes = of_samples > 0.f;  // where not, sums may be no numbers
    const float per_sample = believes ? __fdividef(of_samples, all_say.weights[h]) : 0.f;
    slope[h] = of_mean * all_say.tilt[h] * scale;
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; ++d) {
      const int i = d * 4 + 2 * h;
      const float2 mean = means[d * 4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float value = believes ? sampled(my, sample)[i + e] : 0.f;
        const float output = e == 0 ? Element::low(sample.output[d][h]) : Element::high(sample.output[d][h]);
        my.acc[i + e] = fmaf(output, kept, fmaf(per_sample, value, of_mean * (e == 0 ? mean.x : mean.y)));
      }
    }
    if (adds) {
      my.m[h] += __log2f(my.l[h]) + log1pf(mass) * kLog2E;
      my.l[h] = 1.f;
    }
  }
  uint32 q[Traits::kHeadDim / 16][4];
  load_queries(my, nth, q);
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      const float factor = slope[i % 2];
      const uint32 scaled = Bfloat16::pack(Bfloat16::low(q[c][i]) * factor, Bfloat16::high(q[c][i]) * factor);
      q[c][i] = factor != 0.f ? scaled : 0;
    }
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < Traits::kHeadDim / 16; ++c)
    Wgmma<Bfloat16>::template rs_rows<Traits::kRowsStride>(
        my.acc, q[c], descriptor_at(covariance, c / 4 * Traits::kColumnsStride + c % 4 * 32), true);
  wgmma_commit();
  wgmma_wait<0>();
  finished(my.acc);
}

// From acc and (m, l) of what has been visited to those of all candidates, of which `left` have not: acc a mean, l 1.
template <class Traits>
__device__ __forceinline__ void add_unvisited(Consumer<Traits>& my, const TailAttentionParams& all, uint32 nth,
                                              uint32 q, int left) {
  static_assert(Traits::kBlockN == 2 * kPart && Traits::kBlockN == kTailHalf, "one tile of keys is half of the sample");
  const TailScores scores{all.scale_log2, all.cap_scale};
  const int* rows = my.shared.rows[nth % 2] + my.first_row;
  float found[2];  // a row that is not there has found so much that nothing is added to it
#pragma unroll
  for (int h = 0; h < 2; ++h) found[h] = rows[8 * h] < 0 ? infinity() : my.m[h] + __log2f(my.l[h]);
  Sample<Traits> sample;
  sample.samples = tail_samples(left);
  sample.parts = sample.samples / kPart;
  sample.sums.one = 1.f / static_cast<float>(sample.samples * sample.samples);
  await_turn(my);
  issue_part(my, sample, q, 0);
  pass_turn(my);
  park_output(my, sample);
  wgmma_wait<0>();
  finished(sample.s);
  weigh_part<true>(scores, found, sample, 0);
  pack_part(sample);
#pragma unroll 1
  for (int part = 1; part < sample.parts; ++part) {
    issue_part(my, sample, q, part);
    issue_values(my, sample, part - 1);
    wgmma_wait<1>();
    finished(sample.s);
    if (part % 2 == 1) release_k(my);
    weigh_part<false>(scores, found, sample, part);
    wgmma_wait_behind(sample.sums.weights[0] + sample.sums.weights[1]);  // weights are found under the product
    finished(sampled(my, sample));
    if (part == 2) release_v(my);
    if (2 * part == sample.parts) keep_even(my, sample);
    lower_values(my, sample, part);
    pack_part(sample);
  }
  issue_values(my, sample, sample.parts - 1);
  SampleFindings all_say = sample.sums.finish(left, sample.samples, all.scale, found);
  if constexpr (!Traits::Element::kWide)  // of packed ones
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      all_say.weights[h] *= sample.lift[h];
      all_say.even[h] *= sample.lift[h];
    }
  barrier_wait(my.shared.k_full[my.k_ring.slot], my.k_ring.parity);
  const uint32 covariance = tile_descriptor(shared_address(my.shared.k[my.k_ring.slot]), 0);  // in place of keys
  const bool finite = moments_are_finite<Traits::kHeadDim>(my.shared.mean_values);
  wgmma_wait<0>();
  finished(sampled(my, sample));
  release_v(my);
  if (finite) {
    believe(my, sample, all_say, all.scale, covariance, nth);
    add_findings(my, sample, all_say, all.scale, covariance, nth);
  } else {
    take_output(my, sample);
  }
  release_k(my);
}

}  // namespace sm90
}  // namespace s2o
