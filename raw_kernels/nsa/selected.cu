// The selected branch by blocks of keys: each block's keys and values are read once for some of the tokens that chose it,
// and all heads of their group, and leave a part of the result for each.
//
//   q, k, v; entries and items of nsa_places and nsa_scatter
//   -> parts [KV rows, tokens, slots, group, width], normalised, and part_lse
//
// A warp takes 32 rows at a time, (token, head) pairs with heads side by side, and shares nothing but keys and values
// with the other warps.
#include "nsa/tile.cuh"

namespace s2o {

// kBlock: keys of a block, 64 or 128.
template <class Element_, int kHeadDim_, int kBlock_>
struct SelectedTraits : NsaTile<Element_, kHeadDim_, kBlock_> {
  static constexpr int kBlock = kBlock_;
  static constexpr int kBuffers = kBlock == 64 ? 2 : 1;  // of queries: two blocks of threads fit a multiprocessor
  struct Shared {
    uint16 q[kBuffers * 128 * kHeadDim_];  // [buffers, warps, 32 rows]; then a warp's outputs
    uint16 k[kBlock * kHeadDim_];
    uint16 v[kBlock * kHeadDim_];
    // Of each row of q: its row of parts (-1: there is no such row), and its position.
    int target[kBuffers * 128], position[kBuffers * 128];
    BlockItem item;
    uint32 nonfinite[kBlock / 32];  // bits of the keys with values that are not finite
  };
};

template <class Traits>
struct Selected {
  static constexpr int kStep = Traits::kStep;
  using Tile = AttentionTile<Traits>;
  const NsaParams& p;
  typename Traits::Shared& shared;
  int lane, warp;

  // Starts the copy of a warp's 32 queries; each lane looks one row up.
  __device__ __forceinline__ void load_queries(int tile, int buffer) const {
    const int row = tile * 32 + lane, index = row * p.group_magic >> 16, head = row - index * p.group;
    const int first = buffer * 128 + warp * 32;
    uint32 lanes_source = kNoRow;  // of its query: 16-byte units from that of token 0 and the group's first head
    int target = -1, position = 0x7fffffff;
    const BlockItem& item = shared.item;
    const int kv_row = item.kv_row;
    const int64 place = static_cast<int64>(kv_row) * p.tokens * p.slots + item.begin + index;
    const int entry = index < item.count ? p.entries[place] : -1;
    if (entry >= 0) {
      const int of_round = entry >> kSlotBits, token = p.first_token + of_round;
      lanes_source = static_cast<uint32>((token * p.q.row + head * p.q.head) >> 3);
      target = static_cast<int>(p.part_row(kv_row, of_round, entry & ((1 << kSlotBits) - 1))) + head;
      position = p.position(token);
    }
    shared.target[first + lane] = target;
    shared.position[first + lane] = position;
    const int batch = kv_row / p.kv_heads, kv_head = kv_row - batch * p.kv_heads;
    const uint16* q = p.q.at(batch, kv_head * p.group);
    const uint32 q_tile = shared_address(shared.q);
    const int chunk = lane % Traits::kChunks;
#pragma unroll
    for (int x = 0; x < Traits::kChunks; ++x) {
      const int r = x * (32 / Traits::kChunks) + lane / Traits::kChunks;
      const uint32 source = __shfl_sync(kFullWarp, lanes_source, r);
      const bool present = source != kNoRow && chunk * 8 < p.geometry.head_dim;
      cp_async_16_or_zeros(chunk_address<Traits>(q_tile, first + r, chunk),
                           present ? q + (static_cast<int64>(source) + chunk) * 8 : q, present);
    }
    cp_async_commit();
  }
  __device__ __forceinline__ void attend(int buffer) const {
    const int first_key = shared.item.block << p.block_shift, first_row = buffer * 128 + warp * 32;
    // Only tokens of the block itself do not see all of it.
    const bool masked = __any_sync(kFullWarp, shared.position[first_row + lane] < first_key + Traits::kBlock - 1);
    Tile attention(shared, p);
    attention.warp_row = first_row;
    const auto sees = [&](int i, int h, int key) { return first_key + key <= shared.position[attention.row(i, h)]; };
    uint32 w[Traits::kRowTiles][Traits::kKeyTiles][2];  // weights, packed in pairs of keys
    {
      float s[Traits::kRowTiles][Traits::kKeyTiles][4];
      attention.scores(s, shared_address(shared.k));
      if (masked) {
#pragma unroll
        for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
          for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (!sees(i, e / 2, j * 8 + lane % 4 * 2 + e % 2)) s[i][j][e] = -infinity();
      }
      softmax(attention, s, w);
    }
    uint32 taken = 0;
#pragma unroll
    for (int i = 0; i < Traits::kBlock / 32; ++i) taken |= shared.nonfinite[i];
    if (taken) {
      const int kv_row = shared.item.kv_row, batch = kv_row / p.kv_heads;
      const uint16* v = p.v.at(batch, kv_row - batch * p.kv_heads) + first_key * p.v.row;
      add_taken_values<Traits>(attention, w, shared.nonfinite, v, sees);
    }
    attention.accumulate(w, shared_address(shared.v));
    store(attention);
  }
  // Of rows that have seen nothing before: nothing is rescaled, and the accumulators take no registers yet.
  __device__ __forceinline__ void softmax(Tile& attention, float (&s)[Traits::kRowTiles][Traits::kKeyTiles][4],
                                          uint32 (&w)[Traits::kRowTiles][Traits::kKeyTiles][2]) const {
#pragma unroll
    for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = -infinity(), sum = 0.f;
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) s[i][j][e] = __fmul_rn(s[i][j][e], attention.scale());
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
        const float base = top == -infinity() ? 0.f : top;
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j) {
          const float x = exp2_approx(s[i][j][2 * h] - base), y = exp2_approx(s[i][j][2 * h + 1] - base);
          sum += x + y;
          w[i][j][h] = Traits::Element::pack(x, y);
        }
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        attention.m[i][h] = top;
        attention.l[i][h] = sum;
      }
  }
  __device__ __forceinline__ void store(Tile& attention) const {
    const uint32 tile = shared_address(shared.q);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Traits::kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = attention.row(i, h), target = shared.target[r];
        const float l = attention.l[i][h], inverse = l == 0.f ? 0.f : 1.f / l;
        keep_finite<typename Traits::Element, Traits::kDimTiles * 2>(
            [&](int e) -> float& { return attention.acc[i][e / 2][2 * h + e % 2]; }, l);
        if (target >= 0 && lane % 4 == 0) p.part_lse[target] = lse_of(attention.m[i][h], l);
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d)
          store_shared_4(chunk_address<Traits>(tile, r, d) + lane % 4 * 4,
                         Traits::Element::pack(attention.acc[i][d][2 * h] * inverse,
                                               attention.acc[i][d][2 * h + 1] * inverse));
      }
    __syncwarp();
    const int chunk = lane % Traits::kChunks;
#pragma unroll
    for (int x = 0; x < Traits::kChunks; ++x) {
      const int r = attention.warp_row + x * (32 / Traits::kChunks) + lane / Traits::kChunks;
      const int target = shared.target[r];
      const uint4 o = load_shared_16(chunk_address<Traits>(tile, r, chunk));
      if (target >= 0)
        store_global_16(p.parts + static_cast<int64>(target) * Traits::kHeadDim + chunk * 8, o.x, o.y, o.z, o.w);
    }
    __syncwarp();
  }
};

// Block: an item of a KV row, of p.most_items at most.
template <class Traits>
__device__ __forceinline__ void nsa_selected(const NsaParams& p, typename Traits::Shared& shared) {
  const int kv_row = blockIdx.x / p.most_items, index = blockIdx.x - kv_row * p.most_items;
  if (index >= p.item_counts[kv_row]) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  {
    const BlockItem item = p.items[static_cast<int64>(kv_row) * p.most_items + index];
    if (threadIdx.x == 0) shared.item = item;
    if (threadIdx.x < Traits::kBlock / 32) shared.nonfinite[threadIdx.x] = 0;
    const int batch = kv_row / p.kv_heads, kv_head = kv_row - batch * p.kv_heads, first_key = item.block << p.block_shift;
    const int end = p.geometry.seqlen_k, head_dim = p.geometry.head_dim;
    const uint16 *k = p.k.at(batch, kv_head), *v = p.v.at(batch, kv_head);
    copy_rows<Traits, Traits::kBlock>(shared_address(shared.k), k, p.k.row, head_dim, first_key, end);
    copy_rows<Traits, Traits::kBlock>(shared_address(shared.v), v, p.v.row, head_dim, first_key, end);
  }
  __syncthreads();
  const Selected<Traits> selected{p, shared, lane, warp};
  const int tiles = (shared.item.count * p.group + 31) / 32;
  int tile = warp, buffer = 0;
  selected.load_queries(tile, 0);
  cp_async_wait<0>();
  for (int r = threadIdx.x / Traits::kChunks; r < Traits::kBlock; r += Traits::kThreads / Traits::kChunks)  // its copies
    take_nonfinite<typename Traits::Element>(
        chunk_address<Traits>(shared_address(shared.v), r, threadIdx.x % Traits::kChunks), r, shared.nonfinite);
  __syncthreads();
  for (; tile < tiles; tile += 4) {
    if (Traits::kBuffers == 2) selected.load_queries(tile + 4, buffer ^ 1);
    selected.attend(buffer);
    if (Traits::kBuffers == 2) {
      buffer ^= 1;
    } else {
      selected.load_queries(tile + 4, 0);
    }
    cp_async_wait<0>();
    __syncwarp();
  }
}

}  // namespace s2o
