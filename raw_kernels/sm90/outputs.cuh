// From acc to rows of the output and back: what pass 1 leaves, pass 2 takes up.
#pragma once
#include "common/keep_finite.cuh"
#include "sm90/q_tiles.cuh"
#include "sm90/softmax.cuh"

namespace s2o {
namespace sm90 {

// The query of a row of pass 1, -1 past the segment.
__device__ __forceinline__ int position_of(const QTile& tile, int row) {
  return row < tile.rows ? tile.first + row : -1;
}

// Takes up the state that pass 1 left: acc = out * l. Nobody stores a row that is not there (-1): it reads the first, or
// outputs of whichever row. With kBringsOutputs the caller releases their place, once they have been read for sure.
template <class Traits>
__device__ __forceinline__ void resume(Consumer<Traits>& my, const QTile& tile, const int (&position)[2]) {
  const float2* state = my.params.state + static_cast<int64>(tile.head) * my.params.geometry.seqlen_q;
  if constexpr (Traits::kBringsOutputs) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 ml = state[max(position[h], 0)];
      my.m[h] = ml.x;
      my.l[h] = ml.y;
      my.mass[h] = 0.f;
    }
    barrier_wait(my.shared.v_full[my.v_ring.slot], my.v_ring.parity);
    const uint32 outputs = shared_address(my.shared.v[my.v_ring.slot]);
    const int row = my.first_row - my.lane / 4 + my.lane % 16;
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; d += 2) {
      uint32 x[4];  // [dim tile, row]
      ldmatrix_x4(x, key_chunk<Traits>(outputs, row, d + my.lane / 16));
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float* to = &my.acc[(d + i / 2) * 4 + i % 2 * 2];
        to[0] = Traits::Element::low(x[i]) * my.l[i % 2];
        to[1] = Traits::Element::high(x[i]) * my.l[i % 2];
      }
    }
    return;
  }
  const int head_dim = my.params.geometry.head_dim;
  const uint16* out = my.params.out.at(tile.batch, tile.head_in_batch) + my.lane % 4 * 2;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = max(position[h], 0);
    const float2 ml = state[row];
    my.m[h] = ml.x;
    my.l[h] = ml.y;
    my.mass[h] = 0.f;
    const uint16* source = out + row * my.params.out.row;
    const auto take_pairs = [&](auto present) {
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d) {
        const uint32 x = present(d) ? *reinterpret_cast<const uint32*>(source + d * 8) : 0;
        my.acc[d * 4 + 2 * h] = Traits::Element::low(x) * ml.y;
        my.acc[d * 4 + 2 * h + 1] = Traits::Element::high(x) * ml.y;
      }
    };
    if (head_dim == Traits::kHeadDim) {
      take_pairs([](int) { return true; });
    } else {  // a multiple of 8
      take_pairs([&](int d) { return d * 8 < head_dim; });
    }
  }
}

// One row of out. Neighbouring lanes exchange halves of two dim tiles, so that a lane has 4 consecutive elements of
// one of them.
template <bool kWholeRows, class Traits>
__device__ __forceinline__ void store_row(Consumer<Traits>& my, uint16* out, int position, int h, float inverse) {
  const bool odd = my.lane % 2;
  const int first = odd * 8 + my.lane % 4 / 2 * 4;
  uint16* target = out + position * my.params.out.row + first;
#pragma unroll
  for (int d = 0; d < Traits::kDimTiles; d += 2) {
    const float* even = &my.acc[d * 4 + 2 * h];
    const uint32 even_tile = Traits::Element::pack(even[0] * inverse, even[1] * inverse);
    const uint32 odd_tile = Traits::Element::pack(even[4] * inverse, even[5] * inverse);
    const uint32 other = __shfl_xor_sync(kFullWarp, odd ? even_tile : odd_tile, 1);
    const uint2 x = make_uint2(odd ? other : even_tile, odd ? odd_tile : other);
    if (position < 0) continue;
    if (kWholeRows || d * 8 + first + 4 <= my.params.geometry.head_dim) *reinterpret_cast<uint2*>(target + d * 8) = x;
  }
}

// out = acc / l and lse of a q tile with the state (final_m, final_l), at the rows' own positions. Pass 1 keeps the
// state for pass 2.
template <bool kFirst, class Traits>
__device__ __forceinline__ void store(Consumer<Traits>& my, const QTile& tile, const int (&position)[2],
                                      const float (&final_m)[2], const float (&final_l)[2]) {
  const int64 state_row = static_cast<int64>(tile.head) * my.params.geometry.seqlen_q;
  uint16* out = my.params.out.at(tile.batch, tile.head_in_batch);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    keep_finite<typename Traits::Element, Traits::kDimTiles * 2>(
        [&](int i) -> float& { return my.acc[i / 2 * 4 + 2 * h + i % 2]; }, final_l[h]);
    const float inverse = final_l[h] == 0.f ? 0.f : 1.f / final_l[h];
    if (position[h] >= 0 && my.lane % 4 == 0) {
      if (kFirst && my.params.state) my.params.state[state_row + position[h]] = make_float2(final_m[h], final_l[h]);
      if (my.params.lse)
        my.params.lse[state_row + position[h]] =
            final_l[h] == 0.f ? -infinity() : (final_m[h] + __log2f(final_l[h])) * 0.69314718055994531f;
    }
    if (my.params.geometry.head_dim == Traits::kHeadDim) {
      store_row<true>(my, out, position[h], h, inverse);
    } else {
      store_row<false>(my, out, position[h], h, inverse);
    }
  }
}

// The rows of a q tile that has no keys and no state: out = 0.
template <class Traits>
__device__ __forceinline__ void store_nothing(Consumer<Traits>& my, const QTile& tile, const int (&position)[2]) {
  const int head_dim = my.params.geometry.head_dim;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (position[h] < 0) continue;
    uint16* row = my.params.out.at(tile.batch, tile.head_in_batch) + position[h] * my.params.out.row;
    for (int c = my.lane % 4 * 8; c < head_dim; c += 4 * 8) *reinterpret_cast<uint4*>(row + c) = make_uint4(0, 0, 0, 0);
    if (my.params.lse && my.lane % 4 == 0)
      my.params.lse[static_cast<int64>(tile.head) * my.params.geometry.seqlen_q + position[h]] = -infinity();
  }
}

// Leaves the state of rows that have visited a list for a launch that resumes it.
template <class Params, class Traits>
__device__ __forceinline__ void keep_listed_state(Consumer<Traits>& my, const Params& all, const QTile& tile,
                                                  const int (&position)[2]) {
  if (!all.lists.kept || my.lane % 4 != 0) return;
  float2* kept = all.lists.kept + static_cast<int64>(tile.head) * my.params.geometry.seqlen_q;
#pragma unroll
  for (int h = 0; h < 2; ++h)
    if (position[h] >= 0) kept[position[h]] = make_float2(my.m[h], my.l[h]);
}

template <class Traits>
__device__ __forceinline__ void keep_state(Consumer<Traits>& my) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    my.done_m[h] = my.m[h];
    my.done_l[h] = my.l[h];
  }
}

// The output of q tile number `nth`, whose place is then free for another.
template <class Traits>
__device__ __forceinline__ void store_last(Consumer<Traits>& my, uint32 nth) {
  const QTile& tile = q_tile_at(my, nth);
  const int position[2] = {position_of(tile, my.first_row), position_of(tile, my.first_row + 8)};
  store<true>(my, tile, position, my.done_m, my.done_l);
  barrier_arrive(my.shared.q_tile_empty[nth % kPlaces]);
  my.unstored = false;
}

}  // namespace sm90
}  // namespace s2o
