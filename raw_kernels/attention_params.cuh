// What pass 1 and pass 2 are given, on every architecture.
#pragma once
#include "geometry.cuh"

namespace s2o {

struct AttentionParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim]
  Tensor<const uint16> v;  // [batch, kv_heads, seqlen_k, head_dim]
  Tensor<uint16> out;      // [batch, heads, seqlen_q, head_dim]; between the passes, pass 1's own output
  float2* state;           // [batch * heads, seqlen_q] (m in log2 units, l)
  float* lse;              // [batch * heads, seqlen_q], or null
  const int* q_order;      // [batch * heads, segments, segment]
  const int* k_order;      // [chunk.heads * chunk.segments, k_order_stride]
  int* visited;            // [batch * heads, segments, tiles]
  int* next_work;          // the launch's next q tile, 0 at its start (Hopper)
  int64 k_order_stride;    // a multiple of 64
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int tiles;               // q tiles of a full segment
  int steps_per_tile;      // block_n / 64: the stop rule looks once a key tile (portable)
  int works;               // q tiles of the launch (Hopper)
  float scale_log2;        // |scale| * log2(e); with spec::kSoftcap softcap * log2(e), the factor of the tanh
  uint32 sign_mask;        // 0x80008000 turns q to -q where scale < 0
  float tau;
  float cap_scale;         // |scale| / softcap, the factor of the dot product inside the tanh
};

}  // namespace s2o
