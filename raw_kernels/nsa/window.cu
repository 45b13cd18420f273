// Attention of each query to its latest keys and to the first ones, and on the way to its own block of keys and those
// just before it.
//
//   q [batch, heads, seqlen_q, head_dim], k and v [batch, kv_heads, seqlen_k, head_dim]
//   -> out and lse over the keys j with p - window < j <= p or j < sinks
//      near_out, near_lse, where they are not null: over the keys of blocks own - local + 1 .. own, which the window
//      holds
//
// Keys come from the latest to the first, so that what a row has seen after its near blocks is just those.
#include "common/keep_finite.cuh"
#include "nsa/position_rows.cuh"
#include "nsa/tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct WindowTraits : NsaTile<Element_, kHeadDim_> {
  struct Shared {
    uint16 q[128 * kHeadDim_];        // the tile's queries; at the end, its outputs
    uint16 k[2][64 * kHeadDim_];
    uint16 v[2][64 * kHeadDim_];
    // What only the copies need is read back for each step: the registers belong to acc and the scores.
    const uint16 *k_rows, *v_rows;
    int steps[4];      // WindowSteps
    int first, careful;
    uint32 nonfinite[2][2];  // bits of the step's keys with values that are not finite
  };
};

// Leaves what the rows of a warp have seen so far.
template <class Traits>
__device__ __forceinline__ void keep_near(AttentionTile<Traits>& attention, const NsaParams& p,
                                          const PositionRows<128>& rows) {
  attention.stop_check(0);  // l is then the whole sum
#pragma unroll
  for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = rows(attention.row(i, h));
      if (token < 0) continue;
      const int64 row = static_cast<int64>(rows.head) * p.geometry.seqlen_q + token;
      const float l = attention.l[i][h], inverse = l == 0.f ? 0.f : 1.f / l;
      if (attention.lane % 4 == 0) p.near_lse[row] = lse_of(attention.m[i][h], l);
      uint32* target = reinterpret_cast<uint32*>(p.near_out + row * Traits::kHeadDim) + attention.lane % 4;
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d)
        target[d * 4] = pack_finite<typename Traits::Element>(attention.acc[i][d][2 * h] * inverse,
                                                              attention.acc[i][d][2 * h + 1] * inverse);
    }
}

// Block: 128 positions of a head; p.tiles of each of p.q_tiles heads.
template <class Traits>
__device__ __forceinline__ void nsa_window(const NsaParams& p, typename Traits::Shared& shared) {
  constexpr int kStep = Traits::kStep;
  if (threadIdx.x == 0) {
    const PositionRows<128> rows(p, block_index());
    const int batch = rows.batch(p.heads), kv_head = rows.kv_head(p.heads, p.kv_heads);
    shared.k_rows = p.k.at(batch, kv_head);
    shared.v_rows = p.v.at(batch, kv_head);
    reinterpret_cast<WindowSteps&>(shared.steps) = WindowSteps(p, rows);
    shared.first = rows.first;
    shared.careful = 0;
    shared.nonfinite[0][0] = shared.nonfinite[0][1] = 0;
  }
  __syncthreads();
  const WindowSteps& steps = reinterpret_cast<const WindowSteps&>(shared.steps);
  const auto load = [&](int step) {
    if (step < steps.count) {
      const int first = steps.first_key(step), end = p.geometry.seqlen_k, head_dim = p.geometry.head_dim;
      copy_rows<Traits, kStep>(shared_address(shared.k[step % 2]), shared.k_rows, p.k.row, head_dim, first, end);
      copy_rows<Traits, kStep>(shared_address(shared.v[step % 2]), shared.v_rows, p.v.row, head_dim, first, end);
    }
    cp_async_commit();
  };

  // A second time, with values that are not finite taken out of products, only where one has come in, seen or not.
#pragma unroll 1
  for (;;) {
    load(0);
    AttentionTile<Traits> attention(shared, p);
    attention.load_queries(PositionRows<128>(p, block_index()));
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      load(step + 1);
      cp_async_wait<1>();
      if (shared.careful) {
#pragma unroll 1
        for (int r = threadIdx.x / Traits::kChunks; r < kStep; r += Traits::kThreads / Traits::kChunks)  // its copies
          take_nonfinite<typename Traits::Element>(
              chunk_address<Traits>(shared_address(shared.v[step % 2]), r, threadIdx.x % Traits::kChunks), r,
              shared.nonfinite[step % 2]);
      }
      __syncthreads();
      if (threadIdx.x < kStep / 32) shared.nonfinite[(step + 1) % 2][threadIdx.x] = 0;
      const int first_key = steps.first_key(step);
      const uint32 k_tile = shared_address(shared.k[step % 2]), v_tile = shared_address(shared.v[step % 2]);
      // Positions of the warp's rows; all are of one block of keys.
      const int tile_first = shared.first, warp_first = tile_first + attention.warp_row, warp_last = warp_first + 31;
      if (window_reaches(p, warp_first, warp_last, first_key)) {
        float s[Traits::kRowTiles][Traits::kKeyTiles][4];   // [rows, keys] of this thread
        uint32 w[Traits::kRowTiles][Traits::kKeyTiles][2];  // the weights, packed in pairs of keys
        attention.scores(s, k_tile);
        const auto sees = [&](int i, int h, int key) {
          return window_sees(p, tile_first + attention.row(i, h), first_key + key);
        };
        const bool edge = window_cuts(p, warp_first, warp_last, first_key);
        if (edge) {
#pragma unroll
          for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
            for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
              for (int e = 0; e < 4; ++e)
                if (!sees(i, e / 2, j * 8 + attention.lane % 4 * 2 + e % 2)) s[i][j][e] = -infinity();
        }
        attention.softmax(s, w);
        if (shared.careful)
          add_taken_values<Traits>(attention, w, shared.nonfinite[step % 2], shared.v_rows + first_key * p.v.row, sees);
        attention.accumulate(w, v_tile);
      }
      if (p.near_out && first_key == near_begin(p, warp_first))
        keep_near(attention, p, PositionRows<128>(p, block_index()));
      __syncthreads();
    }
    cp_async_wait<0>();
    if (!__syncthreads_or(!shared.careful && any_nonfinite<Traits>(attention))) {
      attention.stop_check(0);
      attention.template store<false>(PositionRows<128>(p, block_index()));
      return;
    }
    shared.careful = 1;  // by all; each sees its own
  }
}

}  // namespace s2o
