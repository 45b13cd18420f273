// The thread of pass 1 on Hopper that takes q tiles, works out where each lies and has the copy engine bring its
// queries. That is a dozen integer divisions and two waits a q tile: a warp of its own does it, so that the one that
// asks for keys and values goes from one q tile to the next at once. Rows past a tile's own come along; nothing of
// theirs is used.
#pragma once
#include "sm90/q_tiles.cuh"

namespace s2o {
namespace sm90 {

template <class Traits, class Rows, class Params>
__device__ __forceinline__ void schedule(const Mapped<Params>& params, typename Traits::Shared& shared) {
  if (threadIdx.x % 32 != 0) return;
  const Params& p = params.attention;
  DealtQTiles dealt;
  const auto take = [&] { return dealt.take(p); };
  int taken = take();
  for (uint32 nth = 0;; ++nth) {
    const int q_tile = q_tile_from<Rows>(p, taken, take);
    if (q_tile < 0) {
      publish<3>(shared, nth, q_tile, [](uint32) {});
      return;
    }
    taken = take();
    const Rows rows(p, q_tile);
    const QTile described = describe<Traits::kBlockN>(p, rows);
    publish<3>(shared, nth, q_tile, [&](uint32 place) { shared.described[place] = described; });
    const uint32 slot = nth % Traits::kQueryPlaces;
    barrier_wait(shared.q_empty[slot], (nth / Traits::kQueryPlaces & 1) ^ 1);
    barrier_expect(shared.q_full[slot], Traits::kBlockM * Traits::kHeadDim * 2);
#pragma unroll
    for (int column = 0; column < Traits::kHeadDim; column += 64)
      copy_box(shared_address(shared.q[slot]) + column / 64 * Traits::kQueryAtom, params.q, shared.q_full[slot], column,
               rows.first, described.head_in_batch, described.batch);
  }
}

}  // namespace sm90
}  // namespace s2o
