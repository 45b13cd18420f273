// What the kernels of NSA are given, and where things lie that several of them read.
//
// A token is a query by its number; a round has some tokens of all sequences. "KV row" is batch * kv_heads + kv_head.
#pragma once
#include "common/attention_params.cuh"

namespace s2o {

// Compressed attention runs as plain causal attention of the queries i with one remainder i % stride, as of these each
// sees one compressed key more than the one before. Neighbouring remainders with the same lengths share a launch.
struct Remainders {
  int first;     // remainder
  int rows;      // queries of each that see a compressed key
  int skipped;   // that see none, before them
  int64 lse;     // where their lse begins: [remainders, heads, rows]
};

// Some tokens of one block of keys.
struct BlockItem {
  int block;
  int begin, count;  // among the entries of its KV row
  int kv_row;
};

constexpr int kSlotBits = 5;  // of an entry: token of the round << kSlotBits | slot

// Of AttentionParams q, k, v, out, lse, geometry (lengths and head_dim), heads, kv_heads and scale_log2, which has
// scale's sign.
struct NsaParams : AttentionParams {
  Tensor<const uint16> gates;    // [batch, heads, seqlen_q, 3], in 16 bits or float32; null: there are none
  Tensor<const uint16> k_cmp;    // [batch, kv_heads, compressed, head_dim]
  Tensor<const uint16> v_cmp;    // likewise
  uint16* cmp_out;         // [batch * heads, seqlen_q, head_dim], of rows that see a compressed key
  const float* cmp_lse;          // by Remainders, of sequence b `batch_lse` elements further
  float* weights;                // [KV rows, tokens, weight_stride]; with `fused` [KV rows, tokens, group, weight_stride]
  float* step_tops;              // as weights, [.., step_stride, 4]: the largest with each quarter of 128 compressed keys;
                                 // null: it is not known
  float* step_bases;             // with `fused`, as weights, [.., step_stride]: what those with 128 compressed keys are
                                 // relative to, in log2 units
  float* head_lse;               // with `fused`, [KV rows, tokens, group], in log2 units
  int* chosen;                   // [KV rows, seqlen_q, top]: blocks, ascending, -1 behind the last
  int* counts;                   // [KV rows, chunks, blocks]: tokens of each block; then those in chunks before
  int* begins;                   // [KV rows, blocks]: the first entry of each block
  int* entries;                  // [KV rows, tokens * slots]: of each block in turn, ascending
  BlockItem* items;              // [KV rows, most_items]
  int* item_counts;              // [KV rows]
  uint16* parts;                 // [KV rows, tokens, slots, group, width]: a token's attention to one block
  float* part_lse;               // [KV rows, tokens, slots, group], in log2 units
  uint16* near_out;              // [batch * heads, seqlen_q, width]: attention to a token's last `local` blocks
  float* near_lse;               // [batch * heads, seqlen_q], in log2 units
  Remainders remainders_0, remainders_1, remainders_2;
  int64 batch_lse;
  int gates_wide;                // gates are float32
  int group, group_magic;        // query heads of a KV head; n * group_magic >> 16 is n / group for n < 4096
  int compressed, length;        // compressed keys; the keys of each
  int stride_shift;              // log2 of the keys from one to the next
  int blocks, block_shift;       // of keys; log2 of a block's keys
  int top, first, local;         // slots of `chosen`; blocks that are always chosen: the first, and the last
  int apart;                     // 1: the last `local` blocks are in near_out, and in no slot
  int slots;                     // top, less those
  int window, sinks;
  int weight_stride, chunks, most_items, item_tokens;
  int fused, step_stride;        // weights are those of heads, by nsa_compressed
  int first_token, tokens;       // of the round

  __device__ __forceinline__ int position(int token) const { return token + geometry.offset(); }
  __device__ __forceinline__ int own_block(int token) const { return position(token) >> block_shift; }
  // Strides of a block of keys.
  __device__ __forceinline__ int ratio() const { return 1 << (block_shift - stride_shift); }
  __device__ __forceinline__ int visible_compressed(int token) const {
    const int past = position(token) - length + 1;
    return past < 0 ? 0 : (past >> stride_shift) + 1;
  }
  // Where the lse of a token's compressed attention lies, which it has if it sees a compressed key.
  __device__ __forceinline__ int64 cmp_lse_place(int batch, int head, int token) const {
    const int row = token >> stride_shift, remainder = token - (row << stride_shift);
    const Remainders& of =
        remainder >= remainders_2.first ? remainders_2 : remainder >= remainders_1.first ? remainders_1 : remainders_0;
    return batch * batch_lse + of.lse + (static_cast<int64>(remainder - of.first) * heads + head) * of.rows + row -
           of.skipped;
  }
  __device__ __forceinline__ const int* chosen_by(int kv_row, int token) const {
    return chosen + (static_cast<int64>(kv_row) * geometry.seqlen_q + token) * top;
  }
  // The block that a slot of a token's has, or -1: none, or one in near_out.
  __device__ __forceinline__ int block_at(const int* of_token, int token, int slot) const {
    const int block = of_token[slot];
    return block < blocks && (!apart || block <= own_block(token) - local) ? block : -1;
  }
  __device__ __forceinline__ int block_of(int kv_row, int token, int slot) const {
    return block_at(chosen_by(kv_row, token), token, slot);
  }
  __device__ __forceinline__ int64 part_row(int kv_row, int token_of_round, int slot) const {
    return ((static_cast<int64>(kv_row) * tokens + token_of_round) * slots + slot) * group;
  }
};

}  // namespace s2o
