// What stands before and behind nsa_selected_backward: dot products of rows, and the sums of its parts, in one order.
//
//   nsa_deltas: delta = dout . out
//   nsa_query_gradients: dq, of the slots of a row that have a block
//   nsa_key_gradients: dk and dv += what the items of a block have left
#include "nsa/backward_params.cuh"

namespace s2o {

constexpr int kSumThreads = 128;

template <class Element_, int kHeadDim_>
struct SumTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
};

// A warp for each row: p.q_tiles KV rows, p.tokens of all.
template <class Traits>
__device__ __forceinline__ void nsa_deltas(const NsaBackwardParams& p) {
  using Element = typename Traits::Element;
  const int64 row = static_cast<int64>(blockIdx.x) * (kSumThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, head_of_all = static_cast<int>(row / p.geometry.seqlen_q);
  if (head_of_all >= p.q_tiles * p.group) return;
  const int batch = head_of_all / p.heads, head = head_of_all - batch * p.heads;
  const int token = static_cast<int>(row - static_cast<int64>(head_of_all) * p.geometry.seqlen_q);
  const uint16* out = p.out.at(batch, head) + token * p.out.row;
  const uint16* dout = p.dout.at(batch, head) + token * p.dout.row;
  float sum = 0.f;
  for (int c = lane * 2; c < p.geometry.head_dim; c += 64) {
    const uint32 x = *reinterpret_cast<const uint32*>(out + c), y = *reinterpret_cast<const uint32*>(dout + c);
    sum += Element::low(x) * Element::low(y) + Element::high(x) * Element::high(y);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(kFullWarp, sum, step);
  if (lane == 0) p.delta[row] = sum;
}

// A warp for each token and head of the round; the heads of a group side by side.
template <class Traits>
__device__ __forceinline__ void nsa_query_gradients(const NsaBackwardParams& p) {
  const int lane = threadIdx.x % 32, head_dim = p.geometry.head_dim;
  const uint32 warp = blockIdx.x * (kSumThreads / 32) + threadIdx.x / 32, pair = warp / p.group;
  if (pair >= static_cast<uint32>(p.q_tiles) * p.tokens) return;  // KV rows
  const int of_group = warp - pair * p.group, kv_row = pair / p.tokens, of_round = pair - kv_row * p.tokens;
  const int batch = kv_row / p.kv_heads, head = (kv_row - batch * p.kv_heads) * p.group + of_group;
  const int token = p.first_token + of_round;
  const bool there = lane < p.slots && p.block_of(kv_row, token, lane) >= 0;
  uint32 present = __ballot_sync(kFullWarp, there);
  float2 sum[Traits::kHeadDim / 64] = {};
  for (; present; present &= present - 1) {
    const int slot = __ffs(present) - 1;
    for (int half = 0; half < p.halves; ++half) {
      const float* part = p.query_parts + p.query_part(kv_row, of_round, slot, half, of_group) * Traits::kHeadDim;
#pragma unroll
      for (int i = 0; i < Traits::kHeadDim / 64; ++i) {
        const float2 x = *reinterpret_cast<const float2*>(part + i * 64 + lane * 2);
        sum[i].x += x.x;
        sum[i].y += x.y;
      }
    }
  }
  float* dq = p.dq + ((static_cast<int64>(batch) * p.heads + head) * p.geometry.seqlen_q + token) * head_dim;
#pragma unroll
  for (int i = 0; i < Traits::kHeadDim / 64; ++i)
    if (i * 64 + lane * 2 < head_dim)
      *reinterpret_cast<float2*>(dq + i * 64 + lane * 2) = make_float2(sum[i].x * p.scale(), sum[i].y * p.scale());
}

// A block of threads for each item; the first of those of a block of keys adds them up.
template <class Traits>
__device__ __forceinline__ void nsa_key_gradients(const NsaBackwardParams& p) {
  const int kv_row = blockIdx.x / p.most_items, index = blockIdx.x - kv_row * p.most_items;
  const int count = p.item_counts[kv_row], head_dim = p.geometry.head_dim;
  const BlockItem* items = p.items + static_cast<int64>(kv_row) * p.most_items;
  if (index >= count || (index > 0 && items[index - 1].block == items[index].block)) return;
  const int block = items[index].block, keys = p.halves * kGradientKeys, first_key = block << p.block_shift;
  int end = index + 1;
  while (end < count && items[end].block == block) ++end;
  for (int i = threadIdx.x; i < keys * Traits::kHeadDim; i += kSumThreads) {
    const int key = i / Traits::kHeadDim, column = i % Traits::kHeadDim;
    if (first_key + key >= p.geometry.seqlen_k || column >= head_dim) continue;
    float of_key = 0.f, of_value = 0.f;
    for (int item = index; item < end; ++item) {
      const int64 place = static_cast<int64>(blockIdx.x + item - index) * keys * Traits::kHeadDim + i;
      of_key += p.key_parts[place];
      of_value += p.value_parts[place];
    }
    const int64 target = (static_cast<int64>(kv_row) * p.geometry.seqlen_k + first_key + key) * head_dim + column;
    p.dk[target] += of_key * p.scale();
    p.dv[target] += of_value;
  }
}

}  // namespace s2o
