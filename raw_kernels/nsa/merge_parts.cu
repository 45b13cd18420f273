// The selected branch from its parts, each a token's attention to one block, and the sum of the branches.
//
//   parts, part_lse, of the slots that have a block; near_out, near_lse, where they are not null
//   -> out: their merge, lse: its natural logarithm, where that is not null
//      with gates: out = gates[0] * cmp_out + gates[1] * their merge + gates[2] * out
#include "nsa/params.cuh"

namespace s2o {

constexpr int kMergeThreads = 128;

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

// A warp for each token and head; the heads of a group side by side.
template <class Traits>
__device__ __forceinline__ void nsa_merge_parts(const NsaParams& p) {
  constexpr int kLanes = Traits::kLanes, kRows = Traits::kRows, kAhead = Traits::kAhead;
  const int lane = threadIdx.x % 32, chunk = lane % kLanes, head_dim = p.geometry.head_dim;
  const int64 warp = static_cast<int64>(blockIdx.x) * (kMergeThreads / 32) + threadIdx.x / 32;
  const int64 pair = warp / p.group;
  if (pair >= static_cast<int64>(p.q_tiles) * p.tokens) return;  // KV rows
  const int of_group = static_cast<int>(warp - pair * p.group);
  const int kv_row = static_cast<int>(pair / p.tokens), of_round = static_cast<int>(pair - int64(kv_row) * p.tokens);
  const int batch = kv_row / p.kv_heads, head = (kv_row - batch * p.kv_heads) * p.group + of_group;
  const int token = p.first_token + of_round;
  const int64 row = (static_cast<int64>(batch) * p.heads + head) * p.geometry.seqlen_q + token;
  const int64 parts = p.part_row(kv_row, of_round, 0) + of_group;  // slots are `group` rows apart

  // Lane s has the lse of slot s.
  const bool there = lane < p.slots && p.block_of(kv_row, token, lane) >= 0;
  const uint32 present = __ballot_sync(kFullWarp, there);
  const auto part = [&](int slot) {
    const uint16* row = p.parts + (parts + slot * p.group) * Traits::kHeadDim + chunk * 8;
    return load_16_or_zeros(row, slot < 32 && (present >> slot & 1));
  };
  uint4 x[kAhead];  // parts of the first slots are under way while these are weighed
#pragma unroll
  for (int i = 0; i < kAhead; ++i) x[i] = part(i * kRows + lane / kLanes);
  const float of_slot = there ? p.part_lse[parts + lane * p.group] : -infinity();
  const float near = p.near_out ? p.near_lse[row] : -infinity();
  float top = fmaxf(of_slot, near);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, step));
  const float base = top == -infinity() ? 0.f : top;
  const float weight = exp2_approx(of_slot - base), near_weight = exp2_approx(near - base);
  float total = weight;
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kFullWarp, total, step);
  total += near_weight;
  const float inverse = total == 0.f ? 0.f : 1.f / total;

  float o[8] = {};
  const auto share = [&](int slot) { return __shfl_sync(kFullWarp, weight, slot % 32) * inverse; };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    const int slot = i * kRows + lane / kLanes;
    const float of_part = share(slot);
    if (slot < 32 && (present >> slot & 1)) add_row<Traits>(o, of_part, x[i]);
  }
  for (int first = kAhead * kRows; first < p.slots; first += kRows) {
    const int slot = first + lane / kLanes;
    const float of_part = share(slot);
    if (slot < 32 && (present >> slot & 1)) add_row<Traits>(o, of_part, part(slot));
  }
#pragma unroll
  for (int step = kLanes; step < 32; step *= 2)
#pragma unroll
    for (int e = 0; e < 8; ++e) o[e] += __shfl_xor_sync(kFullWarp, o[e], step);
  if (p.near_out)
    add_row<Traits>(o, near_weight * inverse,
                    *reinterpret_cast<const uint4*>(p.near_out + row * Traits::kHeadDim + chunk * 8));
  if (p.lse && lane == 0) p.lse[row] = total == 0.f ? -infinity() : (base + __log2f(total)) * 0.69314718055994531f;
  if (lane >= kLanes || chunk * 8 >= head_dim) return;

  uint16* out = p.out.at(batch, head) + token * p.out.row + chunk * 8;
  if (p.gates.data) {
    const int64 place = batch * p.gates.batch + head * p.gates.head + token * p.gates.row;
    float gate[3];
#pragma unroll
    for (int i = 0; i < 3; ++i)
      gate[i] = p.gates_wide ? reinterpret_cast<const float*>(p.gates.data)[place + i]
                             : Traits::Element::to_float(p.gates.data[place + i]);
#pragma unroll
    for (int e = 0; e < 8; ++e) o[e] *= gate[1];
    if (p.visible_compressed(token) > 0)
      add_row<Traits>(o, gate[0], *reinterpret_cast<const uint4*>(p.cmp_out + row * head_dim + chunk * 8));
    add_row<Traits>(o, gate[2], *reinterpret_cast<const uint4*>(out));
  }
  store_global_16(out, Traits::Element::pack(o[0], o[1]), Traits::Element::pack(o[2], o[3]),
                  Traits::Element::pack(o[4], o[5]), Traits::Element::pack(o[6], o[7]));
}

}  // namespace s2o
