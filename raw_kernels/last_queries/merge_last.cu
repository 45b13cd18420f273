// The last queries' output over all keys: what pass 1 left, of their own keys, and that of each part of the candidates.
//
//   out, state of pass 1; part_out, part_lse -> out, lse, visited
#include "common/geometry.cuh"
#include "common/part_weights.cuh"

namespace s2o {

struct MergeLastParams {
  Tensor<uint16> out;      // [batch, heads, seqlen_q, head_dim]
  const float2* state;     // [batch * heads, seqlen_q] (m in log2 units, l)
  float* lse;              // [batch * heads, seqlen_q], or null
  int* visited;            // [batch * heads, segments, tiles]
  const uint16* part_out;  // [parts, sequences, piece heads, piece rows, kHeadDim]: of a part, normalised
  const float* part_lse;   // [parts, sequences, piece heads, piece rows]
  Geometry geometry;
  int heads;               // of a sequence
  int sequence, sequences;      // the piece: so many sequences from that one on,
  int first_head, piece_heads;  // heads of each,
  int first_segment, rows;      // and queries from that segment on
  int parts;
  int tiles;               // q tiles of a full segment
  int block_m, block_n;    // queries of a q tile, and keys of a visited tile
};

template <class Element_, int kHeadDim_>
struct MergeLastTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kPairs = kHeadDim / 64;  // neighbouring columns of a lane
};

// A warp for each row of a head.
template <class Traits>
__device__ __forceinline__ void merge_last(const MergeLastParams& p) {
  using Element = typename Traits::Element;
  constexpr float kLog2E = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
  const Geometry& g = p.geometry;
  const int lane = threadIdx.x % 32;
  const int64 warp = static_cast<int64>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  const int64 part_rows = static_cast<int64>(p.sequences) * p.piece_heads * p.rows;
  if (warp >= part_rows) return;
  const int row = static_cast<int>(warp % p.rows), query = g.query_begin(p.first_segment) + row;
  const int of_piece = static_cast<int>(warp / p.rows);
  const int sequence = p.sequence + of_piece / p.piece_heads, head = p.first_head + of_piece % p.piece_heads;
  const int64 head_of_all = static_cast<int64>(sequence) * p.heads + head;

  // Lane s has the lse of part s; all in log2 units. Rows without a key have minus infinity, and their output counts
  // for nothing whatever it is.
  const float of_part = lane < p.parts ? p.part_lse[lane * part_rows + warp] * kLog2E : -infinity();
  const float2 state = p.state[head_of_all * g.seqlen_q + query];
  const float own = state.y == 0.f ? -infinity() : state.x + log2f(state.y);
  const PartWeights weights(of_part, own);

  float o[2 * Traits::kPairs] = {};
  uint16* out = p.out.at(sequence, head) + query * p.out.row;
  const auto column = [&](int i) { return 64 * i + 2 * lane; };
  if (own != -infinity()) {
#pragma unroll
    for (int i = 0; i < Traits::kPairs; ++i) {
      if (column(i) < g.head_dim) o[2 * i] = weights.own_weight * Element::to_float(out[column(i)]);
      if (column(i) + 1 < g.head_dim) o[2 * i + 1] = weights.own_weight * Element::to_float(out[column(i) + 1]);
    }
  }
#pragma unroll 4
  for (int s = 0; s < p.parts; ++s) {
    const bool there = __shfl_sync(kFullWarp, of_part, s) != -infinity();
    const float share = __shfl_sync(kFullWarp, weights.weight, s);
    const uint16* x = p.part_out + (s * part_rows + warp) * Traits::kHeadDim;
#pragma unroll
    for (int i = 0; i < Traits::kPairs; ++i) {
      if (!there || column(i) >= g.head_dim) continue;
      const uint32 pair = *reinterpret_cast<const uint32*>(x + column(i));
      o[2 * i] += share * Element::low(pair);
      o[2 * i + 1] += share * Element::high(pair);
    }
  }
#pragma unroll
  for (int i = 0; i < Traits::kPairs; ++i) {
    const uint32 pair = Element::pack(o[2 * i], o[2 * i + 1]);
    if (column(i) < g.head_dim) out[column(i)] = static_cast<uint16>(pair);
    if (column(i) + 1 < g.head_dim) out[column(i) + 1] = static_cast<uint16>(pair >> 16);
  }
  if (lane > 0) return;
  if (p.lse) p.lse[head_of_all * g.seqlen_q + query] = weights.lse * kLn2;
  const int n = p.first_segment + row / g.segment, of_segment = row % g.segment;
  if (of_segment % p.block_m == 0)
    p.visited[(head_of_all * g.segments() + n) * p.tiles + of_segment / p.block_m] =
        (g.candidates(n) + p.block_n - 1) / p.block_n;
}

}  // namespace s2o
