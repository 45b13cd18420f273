// What the kernels of the selected branch's gradients are given.
#pragma once
#include "nsa/params.cuh"

namespace s2o {

constexpr int kGradientKeys = 64;  // of a block, or of half of one with 128

// Of NsaParams q, k, v, out and lse are what the forward had and gave; slots is top.
struct NsaBackwardParams : NsaParams {
  Tensor<const uint16> dout;  // like out: its gradient
  float* delta;               // [batch * heads, seqlen_q]: dout . out
  float* query_parts;         // [KV rows, tokens, slots, halves, group, width]: what a row's q has from 64 keys
  float* key_parts;           // [KV rows, most_items, halves, 64, width]: what keys have from an item's rows
  float* value_parts;         // likewise
  float* dq;                  // [batch * heads, seqlen_q, head_dim]
  float *dk, *dv;             // [KV rows, seqlen_k, head_dim]; what rounds before have added up
  int halves;                 // of a block

  __device__ __forceinline__ float scale() const { return scale_log2 * 0.69314718055994531f; }
  __device__ __forceinline__ int64 query_part(int kv_row, int token_of_round, int slot, int half, int head) const {
    return (((static_cast<int64>(kv_row) * tokens + token_of_round) * slots + slot) * halves + half) * group + head;
  }
};

}  // namespace s2o
