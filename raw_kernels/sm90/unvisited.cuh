// What the candidates that a q tile has not visited count for (tail/sample_sums.cuh): a consumer adds it to its output
// before it stores that. For it the producer brings a tile of keys more, a sample of theirs, and in the place of a tile of
// values the covariance of values and keys.
#pragma once
#include "sm90/products.cuh"
#include "tail/with_tail.cuh"

namespace s2o {
namespace sm90 {

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

// Of the sample's scores in s: the mass of `left` candidates as a multiple of what each row has found, and the tilt.
template <class Traits>
__device__ __forceinline__ void find_mass(const Consumer<Traits>& my, const TailAttentionParams& all, int left,
                                          float (&mass)[2], float (&tilt)[2]) {
  static_assert(Traits::kBlockN == kTailSamples, "one tile of keys is the sample");
  const TailScores scores{all.scale_log2, all.cap_scale};
  const auto product = [&](int j, int h, int e) { return my.s[j * 4 + 2 * h + e]; };
  const float found[2] = {my.m[0] + __log2f(my.l[0]), my.m[1] + __log2f(my.l[1])};
  SampleSums sums;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float most = -infinity();
#pragma unroll
    for (int j = 0; j < Traits::kKeyTiles; ++j) most = fmaxf(most, fmaxf(product(j, h, 0), product(j, h, 1)));
    sums.set_base(h, found[h], scores.size(most, found[h]));
  }
  sums.template find_middle<Traits::kKeyTiles>(product);
  sums.clear();
  sums.template add<Traits::kKeyTiles>(0, scores, product);
  sums.finish(left, all.scale, found, mass, tilt);
}

// From acc and (m, l) of what has been visited to those of all candidates, of which `left` have not: acc a mean, l 1.
template <class Traits>
__device__ __forceinline__ void add_unvisited(Consumer<Traits>& my, const TailAttentionParams& all, uint32 nth, uint32 q,
                                              int left) {
  constexpr int kHeadDim = Traits::kHeadDim;
  issue_scores(my, q);
  pass_turn(my);
  wgmma_wait<0>();
  finished(my.s);
  release_k(my);
  float mass[2], tilt[2];
  find_mass(my, all, left, mass, tilt);

  uint32 queries[kHeadDim / 16][4];
  load_queries(my, nth, queries);
  barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
  const uint32 covariance = tile_descriptor(shared_address(my.shared.v[my.v_ring.slot]), 0);  // in place of values
  float (&x)[Traits::kKeyTiles * 4] = my.s;
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < kHeadDim / 16; ++c)
    Wgmma<Bfloat16>::template rs_rows<Traits::kRowsStride>(
        x, queries[c], descriptor_at(covariance, c / 4 * Traits::kColumnsStride + c % 4 * 32), c > 0);
  wgmma_commit();
  release(my, my.shared.q_empty[nth % Traits::kQueryPlaces]);
  const bool finite = moments_are_finite<kHeadDim>(my.shared.mean_values);
  const float2* means = reinterpret_cast<const float2*>(my.shared.mean_values) + my.lane % 4;
  wgmma_wait<0>();
  finished(x);
  release_v(my);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (!finite || !(mass[h] > 0.f)) continue;  // a row without a tail keeps its bits
    const float added = __fdividef(mass[h], 1.f + mass[h]), kept = (1.f - added) / my.l[h];
    const float slope = tilt[h] * all.scale * added;
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; ++d) {
      const int i = d * 4 + 2 * h;
      const float2 mean = means[d * 4];
      my.acc[i] = fmaf(my.acc[i], kept, fmaf(slope, x[i], added * mean.x));
      my.acc[i + 1] = fmaf(my.acc[i + 1], kept, fmaf(slope, x[i + 1], added * mean.y));
    }
    my.m[h] += __log2f(my.l[h]) + log1pf(mass[h]) * kLog2E;
    my.l[h] = 1.f;
  }
}

}  // namespace sm90
}  // namespace s2o
