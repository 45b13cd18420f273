// The selected branch from its parts, each a token's attention to one block, and the sum of the branches.
//
//   parts, part_lse, of the slots that have a block; near_out, near_lse, where they are not null
//   -> out: their merge, lse: its natural logarithm, where that is not null
//      with gates: out = gates[0] * cmp_out + gates[1] * their merge + gates[2] * out
#include "common/part_weights.cuh"
#include "nsa/params.cuh"

namespace s2o {

constexpr int kMergeThreads = 128, kMergeTokens = 4;  // tokens of a warp

template <class Element_, int kHeadDim_>
struct MergeTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kLanes = kHeadDim / 8;        // of a row, 8 elements each
  static constexpr int kRows = 32 / kLanes;          // parts that a warp reads at a time
  static constexpr int kAhead = 16 / kRows;          // and so often at once
};

template <class Traits>
__device__ __forceinline__ void add_row(float (&o)[8], float weight, const uint4& x) {
  using Element = typename Traits::Element;
  const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    o[2 * i] += weight * Element::low(pairs[i]);
    o[2 * i + 1] += weight * Element::high(pairs[i]);
  }
}

// A row of the output.
//
//   part: of the lane in the first slots; lse: of slot 0; chosen: the token's blocks; gates: where its gates are
template <class Traits>
__device__ __forceinline__ void merge_row(const NsaParams& p, int64 row, int token, const uint16* part,
                                          const float* lse, const int* chosen, uint16* out, int64 gates) {
  constexpr int kLanes = Traits::kLanes, kRows = Traits::kRows, kAhead = Traits::kAhead;
  const int lane = threadIdx.x % 32, chunk = lane % kLanes, head_dim = p.geometry.head_dim;
  const bool inside = chunk * 8 < head_dim, sums = p.gates.data != nullptr;
  const int of_slot_row = p.group * Traits::kHeadDim;  // elements from a slot's part to the next one's

  // All that is read is under way at once. Of slots without a block it is whatever was there before, and is not used.
  uint4 x[kAhead];  // parts of the first slots
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    x[i] = load_16_or_zeros(part + i * kRows * of_slot_row, i * kRows + lane / kLanes < p.slots);
  const uint4 of_near =
      load_16_or_zeros(p.near_out + row * Traits::kHeadDim + chunk * 8, p.near_out && lane < kLanes);
  const bool sees_compressed = sums && p.visible_compressed(token) > 0;
  const uint4 of_cmp = load_16_or_zeros(p.cmp_out + row * head_dim + chunk * 8, sees_compressed && inside);
  const uint4 of_window = load_16_or_zeros(out, sums && inside);
  float gate[3] = {};
  if (sums) {
#pragma unroll
    for (int i = 0; i < 3; ++i)
      gate[i] = p.gates_wide ? reinterpret_cast<const float*>(p.gates.data)[gates + i]
                             : Traits::Element::to_float(p.gates.data[gates + i]);
  }
  // Lane s has the lse of slot s.
  const float found = lane < p.slots ? lse[lane * p.group] : 0.f;
  const bool there = lane < p.slots && p.block_at(chosen, token, lane) >= 0;
  const uint32 present = __ballot_sync(kFullWarp, there);
  const float of_slot = there ? found : -infinity();
  const float near = p.near_out ? p.near_lse[row] : -infinity();
  const PartWeights weights(of_slot, near);

  float o[8] = {};
  const auto kept = [&](int slot, const uint4& part) {
    return slot < 32 && (present >> slot & 1) ? part : make_uint4(0, 0, 0, 0);
  };
  const auto add_part = [&](int slot, const uint4& part) {
    add_row<Traits>(o, __shfl_sync(kFullWarp, weights.weight, slot % 32), part);
  };
  if (__popc(present) != p.slots) {  // seldom is there one without a block
#pragma unroll
    for (int i = 0; i < kAhead; ++i) x[i] = kept(i * kRows + lane / kLanes, x[i]);
  }
#pragma unroll
  for (int i = 0; i < kAhead; ++i) add_part(i * kRows + lane / kLanes, x[i]);
  for (int first = kAhead * kRows; first < p.slots; first += kRows) {
    const int slot = first + lane / kLanes;
    add_part(slot, kept(slot, load_16_or_zeros(part + first * of_slot_row, slot < p.slots)));
  }
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
    for (int e = 0; e < 8; ++e) o[e] += __shfl_xor_sync(kFullWarp, o[e], step);
  if (p.near_out) add_row<Traits>(o, weights.own_weight, of_near);
  if (p.lse && lane == 0) p.lse[row] = weights.lse * 0.69314718055994531f;
  if (lane >= kLanes || !inside) return;
  if (sums) {
#pragma unroll
    for (int e = 0; e < 8; ++e) o[e] *= gate[1];
    if (sees_compressed) add_row<Traits>(o, gate[0], of_cmp);
    add_row<Traits>(o, gate[2], of_window);
  }
  store_global_16(out, Traits::Element::pack(o[0], o[1]), Traits::Element::pack(o[2], o[3]),
                  Traits::Element::pack(o[4], o[5]), Traits::Element::pack(o[6], o[7]));
}

// A warp for kMergeTokens tokens of a head; the heads of a group side by side.
template <class Traits>
__device__ __forceinline__ void nsa_merge_parts(const NsaParams& p) {
  constexpr int kLanes = Traits::kLanes;
  const int lane = threadIdx.x % 32, chunk = lane % kLanes;
  // Parts of 2^32 tokens and heads would fit no memory.
  const uint32 warp = blockIdx.x * (kMergeThreads / 32) + threadIdx.x / 32, of_head = warp / p.group;
  const int of_group = warp - of_head * p.group, turns = (p.tokens + kMergeTokens - 1) / kMergeTokens;
  const int kv_row = of_head / turns, first = (of_head - kv_row * turns) * kMergeTokens;
  if (kv_row >= p.q_tiles) return;  // KV rows
  const int batch = kv_row / p.kv_heads, head = (kv_row - batch * p.kv_heads) * p.group + of_group;
  const int count = min(kMergeTokens, p.tokens - first), of_slot_row = p.group * Traits::kHeadDim;
  int token = p.first_token + first;
  int64 row = (static_cast<int64>(batch) * p.heads + head) * p.geometry.seqlen_q + token;
  int64 part_row = p.part_row(kv_row, first, 0) + of_group;  // slots are `group` rows apart
  const int* chosen = p.chosen_by(kv_row, token);
  uint16* out = p.out.at(batch, head) + token * p.out.row + chunk * 8;
  int64 gates = batch * p.gates.batch + head * p.gates.head + token * p.gates.row;
#pragma unroll 1
  for (int turn = 0; turn < count; ++turn) {
    merge_row<Traits>(p, row, token, p.parts + part_row * Traits::kHeadDim + lane / kLanes * of_slot_row + chunk * 8,
                      p.part_lse + part_row, chosen, out, gates);
    ++token, ++row;
    part_row += p.slots * p.group;
    chosen += p.top;
    out += p.out.row;
    gates += p.gates.row;
  }
}

}  // namespace s2o
