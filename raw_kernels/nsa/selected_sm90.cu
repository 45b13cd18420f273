// nsa_selected on Hopper, for blocks of 64 keys, by wgmma: a warpgroup takes 64 rows at a time, and shares nothing but
// keys and values with the other one.
#include "common/keep_finite.cuh"
#include "nsa/tile_sm90.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct SelectedSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kBlock = 64, kThreads = 256;  // kBlock: keys
  static constexpr int kChunks = kHeadDim / 8, kKeyTiles = kBlock / 8, kDimTiles = kHeadDim / 8;
  static constexpr int kItemTokens = 1024;  // that an item may have
  struct Shared {
    uint16 q[2][2][64 * kHeadDim];  // [warpgroups, buffers, rows]; then outputs
    uint16 k[kBlock * kHeadDim];
    uint16 v[kBlock * kHeadDim];
    // Of each row of q: its row of parts (-1: there is no such row), and its position.
    int target[2][2][64], position[2][2][64];
    int entries[kItemTokens];
    uint64 arrived[2][2];  // barriers: the queries of a buffer have come
    BlockItem item;
    uint32 nonfinite[kBlock / 32];  // bits of the keys with values that are not finite
  };
};

template <class Traits>
struct SelectedSm90 {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kBlock = Traits::kBlock, kKeyTiles = Traits::kKeyTiles;
  const NsaParams& p;
  typename Traits::Shared& shared;
  int lane, warp, group;  // warp of its warpgroup, and which that is

  // Starts the copy of a warp's 16 queries of a warpgroup's tile; half of the lanes look one row up each.
  __device__ __forceinline__ void load_queries(int tile, int buffer) const {
    const int row = warp * 16 + lane % 16, of_item = tile * 64 + row;
    const int index = of_item * p.group_magic >> 16, head = of_item - index * p.group;
    const int kv_row = shared.item.kv_row, entry = index < shared.item.count ? shared.entries[index] : -1;
    uint32 lanes_source = kNoRow;  // of its query: 16-byte units from that of token 0 and the group's first head
    int target = -1, position = 0x7fffffff;
    if (entry >= 0) {
      const int of_round = entry >> kSlotBits, token = p.first_token + of_round;
      lanes_source = static_cast<uint32>((token * p.q.row + head * p.q.head) >> 3);
      target = static_cast<int>(p.part_row(kv_row, of_round, entry & ((1 << kSlotBits) - 1))) + head;
      position = p.position(token);
    }
    if (lane < 16) {
      shared.target[group][buffer][row] = target;
      shared.position[group][buffer][row] = position;
    }
    const int batch = kv_row / p.kv_heads, kv_head = kv_row - batch * p.kv_heads;
    const uint16* q = p.q.at(batch, kv_head * p.group);
    const uint32 q_tile = shared_address(shared.q[group][buffer]);
    const int chunk = lane % Traits::kChunks;
#pragma unroll
    for (int x = 0; x < Traits::kChunks / 2; ++x) {
      const int r = x * (32 / Traits::kChunks) + lane / Traits::kChunks;
      const uint32 source = __shfl_sync(kFullWarp, lanes_source, r);
      const bool present = source != kNoRow && chunk * 8 < p.geometry.head_dim;
      cp_async_16_or_zeros(atom_chunk<64>(q_tile, warp * 16 + r, chunk),
                           present ? q + (static_cast<int64>(source) + chunk) * 8 : q, present);
    }
    barrier_arrive_after_copies(shared.arrived[group][buffer]);
  }

  // s = q k^T of a tile whose queries have come, in flight.
  __device__ __forceinline__ void issue_scores(float (&s)[kBlock / 2], int buffer) const {
    const uint32 a = tile_descriptor(shared_address(shared.q[group][buffer]), 0);
    const uint32 b = tile_descriptor(shared_address(shared.k), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      Wgmma<Element>::ss(s, descriptor_at(a, atom_columns<64>(c)), descriptor_at(b, atom_columns<64>(c)), c > 0);
    wgmma_commit();
  }

  // A tile, whose scores are in flight. The next one's are when it ends: under the way of its outputs. `next`: how often
  // that one's buffer was waited for.
  __device__ __forceinline__ void attend(float (&s)[kBlock / 2], int buffer, int next, bool is_last) const {
    const int first_key = shared.item.block << p.block_shift;
    const int* positions = shared.position[group][buffer] + warp * 16;
    wgmma_wait<0>();
    finished(s);
    // Only tokens of the block itself do not see all of it.
    const bool masked = __any_sync(kFullWarp, positions[lane % 16] < first_key + kBlock - 1);
    const auto sees = [&](int h, int key) { return first_key + key <= positions[lane / 4 + 8 * h]; };
    uint32 w[kKeyTiles][2];  // weights, packed in pairs of keys
    float m[2], l[2];  // in log2 units; the sum of weights
    // Of a scale that is not positive scores are multiplied before they are compared.
    const float scale = p.scale_log2 > 0.f ? p.scale_log2 : 1.f;
    if (!(p.scale_log2 > 0.f)) {
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i) s[i] *= p.scale_log2;
    }
    if (masked) {  // in one piece, without a branch for each key
#pragma unroll
      for (int i = 0; i < kBlock / 2; ++i)
        s[i] = sees(i / 2 % 2, i / 4 * 8 + lane % 4 * 2 + i % 2) ? s[i] : -infinity();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top[2] = {-infinity(), -infinity()}, sum[2] = {};
#pragma unroll
      for (int i = 0; i < kBlock / 4; ++i) top[i % 2] = fmaxf(top[i % 2], s[i / 2 * 4 + 2 * h + i % 2]);
      const float highest = row_max(fmaxf(top[0], top[1])), base = highest == -infinity() ? 0.f : highest * scale;
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) {
        const float x = exp2_approx(fmaf(s[j * 4 + 2 * h], scale, -base));
        const float y = exp2_approx(fmaf(s[j * 4 + 2 * h + 1], scale, -base));
        sum[0] += x;
        sum[1] += y;
        w[j][h] = Element::pack(x, y);
      }
      m[h] = base;
      l[h] = row_sum(sum[0] + sum[1]);
    }
    __syncwarp();
    float acc[kHeadDim / 2];  // [rows, columns] of this thread
    const bool taken = (shared.nonfinite[0] | shared.nonfinite[1]) != 0;
    if (taken) {
      const int batch = shared.item.kv_row / p.kv_heads, kv_head = shared.item.kv_row - batch * p.kv_heads;
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) acc[i] = 0.f;
      const uint16* v = p.v.at(batch, kv_head) + first_key * p.v.row;
      add_taken_values<Element, kHeadDim>(acc, w, shared.nonfinite, p.geometry.head_dim,
                                          [&](int key) { return v + key * p.v.row; }, sees);
    }
    multiply_values<Element, kHeadDim>(acc, w, shared_address(shared.v), taken);
    // Behind the last tile this product is for nothing. Where that tile is the first one, too, queries are still copied.
    if (!is_last || next == 0) barrier_wait(shared.arrived[group][buffer ^ 1], next & 1);
    issue_scores(s, buffer ^ 1);
    store(acc, m, l, buffer);
  }

  __device__ __forceinline__ void store(float (&acc)[kHeadDim / 2], const float (&m)[2], const float (&l)[2],
                                        int buffer) const {
    const uint32 tile = shared_address(shared.q[group][buffer]);  // a warp reads and writes only its own rows of it
    const int* targets = shared.target[group][buffer];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = warp * 16 + h * 8 + lane / 4, target = targets[r];
      const float inverse = l[h] == 0.f ? 0.f : 1.f / l[h];
      keep_finite<Element, kHeadDim / 4>([&](int e) -> float& { return acc[e / 2 * 4 + 2 * h + e % 2]; }, l[h]);
      if (target >= 0 && lane % 4 == 0) p.part_lse[target] = l[h] == 0.f ? -infinity() : m[h] + __log2f(l[h]);
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d)
        store_shared_4(atom_chunk<64>(tile, r, d) + lane % 4 * 4,
                       Element::pack(acc[d * 4 + 2 * h] * inverse, acc[d * 4 + 2 * h + 1] * inverse));
    }
    __syncwarp();
    const int chunk = lane % Traits::kChunks;
#pragma unroll
    for (int x = 0; x < Traits::kChunks / 2; ++x) {
      const int r = warp * 16 + x * (32 / Traits::kChunks) + lane / Traits::kChunks, target = targets[r];
      const uint4 o = load_shared_16(atom_chunk<64>(tile, r, chunk));
      if (target >= 0) store_global_16_streamed(p.parts + static_cast<int64>(target) * kHeadDim + chunk * 8, o);
    }
    __syncwarp();
  }
};

// Block: an item of a KV row, of p.most_items at most.
template <class Traits>
__device__ __forceinline__ void nsa_selected_sm90(const NsaParams& p, typename Traits::Shared& shared) {
  const int kv_row = blockIdx.x / p.most_items, index = blockIdx.x - kv_row * p.most_items;
  if (index >= p.item_counts[kv_row]) return;
  {
    const BlockItem item = p.items[static_cast<int64>(kv_row) * p.most_items + index];
    if (threadIdx.x == 0) shared.item = item;
    if (threadIdx.x < Traits::kBlock / 32) shared.nonfinite[threadIdx.x] = 0;
    if (threadIdx.x < 4) barrier_init(shared.arrived[0][threadIdx.x], 128);
    const int batch = kv_row / p.kv_heads, kv_head = kv_row - batch * p.kv_heads, first_key = item.block << p.block_shift;
    const uint16 *k = p.k.at(batch, kv_head), *v = p.v.at(batch, kv_head);
    const int* entries = p.entries + static_cast<int64>(kv_row) * p.tokens * p.slots + item.begin;
    for (int i = threadIdx.x; i < item.count; i += Traits::kThreads)
      cp_async_4(shared_address(&shared.entries[i]), entries + i);
    const int chunk = threadIdx.x % Traits::kChunks;
#pragma unroll
    for (int r = threadIdx.x / Traits::kChunks; r < Traits::kBlock; r += Traits::kThreads / Traits::kChunks) {
      const bool present = first_key + r < p.geometry.seqlen_k && chunk * 8 < p.geometry.head_dim;
      const int64 row = first_key + r;
      cp_async_16_or_zeros(atom_chunk<Traits::kBlock>(shared_address(shared.k), r, chunk),
                           present ? k + row * p.k.row + chunk * 8 : k, present);
      cp_async_16_or_zeros(atom_chunk<Traits::kBlock>(shared_address(shared.v), r, chunk),
                           present ? v + row * p.v.row + chunk * 8 : v, present);
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
  __syncthreads();
  const SelectedSm90<Traits> selected{p, shared, static_cast<int>(threadIdx.x % 32),
                                      static_cast<int>(threadIdx.x / 32 % 4),
                                      __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0)};
  const int tiles = (shared.item.count * p.group + 63) / 64;
  selected.load_queries(selected.group, 0);
  selected.load_queries(selected.group + 2, 1);
  for (int r = threadIdx.x / Traits::kChunks; r < Traits::kBlock; r += Traits::kThreads / Traits::kChunks)  // its copies
    take_nonfinite<typename Traits::Element>(
        atom_chunk<Traits::kBlock>(shared_address(shared.v), r, threadIdx.x % Traits::kChunks), r, shared.nonfinite);
  fence_for_wgmma();
  __syncthreads();
  if (selected.group < tiles) {
    float s[Traits::kBlock / 2];  // [rows, keys] of this thread
    barrier_wait(shared.arrived[selected.group][0], 0);
    selected.issue_scores(s, 0);
    int turn = 0;
#pragma unroll 1
    for (int tile = selected.group; tile < tiles; tile += 2, ++turn) {
      const int buffer = turn % 2;
      selected.attend(s, buffer, (turn + 1) / 2, tile + 2 >= tiles);
      if (tile + 4 < tiles) selected.load_queries(tile + 4, buffer);
    }
    wgmma_wait<0>();
  }
  cp_async_commit();
  cp_async_wait<0>();
}

}  // namespace s2o
