// How a row's candidates are dealt to strata, and how these make an order; reference/key_order.py: strata.
//
// Chunks of eight neighbours go to pairs of strata, layer by layer; their even ones to the pair's first stratum, the
// odd ones to the second, and in every second eight layers the other way round. Each whole layer begins at another
// pair. So keys at equal distances do not meet in few strata. The layer that may not be whole is dealt straight.
#pragma once
#include "common/geometry.cuh"

namespace s2o {

struct Strata {
  static constexpr int kLayers = spec::kStratum / 4;
  int pairs;   // of strata: an even number
  int layers;  // whole ones
  int left;    // candidates after these

  __device__ __forceinline__ explicit Strata(int count)
      : pairs((count + 4 * spec::kStratum - 1) / (4 * spec::kStratum) * 2),
        layers(count / (8 * pairs)),
        left(count - layers * 8 * pairs) {}

  // Layers whose even candidates go to the second stratum, if they are whole.
  static __device__ __forceinline__ bool swapped(int layer) { return layer / 8 % 2; }

  // The first candidate of a pair's chunk in a layer.
  __device__ __forceinline__ int chunk(int layer, int pair) const {
    const uint32 mixed = static_cast<uint32>(layer * layer) * static_cast<uint32>(spec::kLayerMix);
    const int shift = layer < layers ? static_cast<int>(__umulhi(mixed, pairs)) : 0;
    return (layer * pairs + (pair < shift ? pair - shift + pairs : pair - shift)) * 8;
  }
  // Candidates of a stratum.
  __device__ __forceinline__ int size(int stratum) const {
    return 4 * layers + (min(max(left - stratum / 2 * 8, 0), 8) + 1 - stratum % 2) / 2;
  }
  // The place in the row's order of a stratum's candidate of a rank: lower ranks come first, then strata in turn.
  __device__ __forceinline__ int place(int rank, int stratum) const {
    const int beyond = rank - 4 * layers;
    if (beyond < 0) return rank * 2 * pairs + stratum;
    return 8 * pairs * layers + left / 8 * 2 * beyond + min(left % 8, 2 * beyond) + stratum;
  }
};

}  // namespace s2o
