// What pass 1 and pass 2 are given, on every architecture.
#pragma once
#include "common/pages.cuh"

namespace s2o {

struct AttentionParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  Tensor<const uint16> v;  // like k
  Tensor<uint16> out;      // [batch, heads, seqlen_q, head_dim]; between the passes, pass 1's own output
  float2* state;           // [batch * heads, seqlen_q] (m in log2 units, l)
  float* lse;              // [batch * heads, seqlen_q], or null
  const int* q_order;      // [batch * heads, segments, segment]; null where a segment is one q tile
  const int* k_order;      // rows of the chunk (Chunk::place): units of keys, most important first
  int* visited;            // [batch * heads, segments, tiles]
  int* next_q_tile;        // the launch's next q tile, 0 at its start; null: blocks are dealt theirs (Hopper)
  const float* taus;       // [batch * heads] of each head, or null: tau is of all
  const int* least_keys;   // [batch * heads, segments]: keys that q tiles wait for; or null: none
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int tiles;               // q tiles of a full segment
  int steps_per_tile;      // block_n / 64: steps from one stop check to the next (portable)
  int q_tiles;             // q tiles of the launch (Hopper)
  float scale_log2;        // |scale| * log2(e); with spec::kSoftcap softcap * log2(e), the factor of the tanh
  uint32 sign_mask;        // 0x80008000 turns q to -q where scale < 0
  float tau;
  float tau_falls;         // segments with more candidates than 1 / this have a tau less by the square root; 0: none
  float cap_scale;         // |scale| / softcap, the factor of the dot product inside the tanh
  Pages pages;             // of a paged cache

  // The share of the mass below which q tiles of a flattened head stop that have so many candidates.
  __device__ __forceinline__ float tau_of(int head, int candidates) const {
    return taus ? taus[head] : tau * fminf(1.f, rsqrtf(static_cast<float>(candidates) * tau_falls));
  }
};

// One of several sequences that lie one behind the other in q, and in k and v or in pages.
struct PackedSequence {
  int begin_q;           // its first query among all
  int begin_k;           // its first key among all; where keys lie in pages, its row of the page table
  int seqlen_q, seqlen_k;
  int near_heads;        // see Chunk
};

constexpr int kPackedSequences = 128;  // of a launch: parameters end at 4096 bytes

// Which of `count` sequences has element x; first[n] [kPackedSequences]: the first element of sequence n, ascending.
__device__ __forceinline__ int sequence_with(const int (&first)[kPackedSequences], int count, int x) {
  int found = 0;
#pragma unroll
  for (int step = kPackedSequences / 2; step > 0; step /= 2)
    if (found + step < count && first[found + step] <= x) found += step;
  return found;
}

// Pass 1 of packed sequences without candidates: batch is 1, and geometry has the rows of q of all together, and of k
// where it is an array.
struct PackedAttentionParams : AttentionParams {
  int sequences;
  int first_q_tile[kPackedSequences];  // q tiles of the launch before a sequence's own; apart, as all blocks search it
  PackedSequence of[kPackedSequences];

  // The sequence that has a q tile.
  __device__ __forceinline__ int sequence(int q_tile) const { return sequence_with(first_q_tile, sequences, q_tile); }
};

}  // namespace s2o
