// last_row_sums and column_means (last_rows.cuh) by wgmma, for kHeads query heads that share keys. A warpgroup has 64 of a
// head's rows and walks the tiles of keys. Warpgroups take turns with their products, or they would all multiply and then all
// take exponentials. One warp, or four, copy the tiles.
#include "methods/last_rows.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, int kHeads_>
struct LastRowsSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kHeads = kHeads_;
  static constexpr int kGroups = 2 * kHeads, kCopiers = kHeads > 1 ? 128 : 32, kThreads = kGroups * 128 + kCopiers;
  static constexpr int kRows = 128, kTile = 128, kStages = 1 + kHeads;  // queries, keys, tiles of keys
  struct Shared {
    uint16 q[kHeads][kRows * kHeadDim];
    uint16 k[kStages][kTile * kHeadDim];
    float norms[kHeads][kRows];  // of the queries
    uint64 full[kStages], empty[kStages];
  };
};

// What a warpgroup works on.
template <class Traits>
struct LastRowsOf {
  static constexpr int kTile = Traits::kTile, kRows = Traits::kRows, kStages = Traits::kStages;
  static constexpr int kChunks = Traits::kHeadDim / 8;
  const LastRowsParams& p;
  typename Traits::Shared& shared;
  const uint16* k;
  int head, of_block, split, first_tile, tiles, lane, first_row;  // first_row: of the lane's warp, of a product

  __device__ __forceinline__ LastRowsOf(const LastRowsParams& params, typename Traits::Shared& shared_)
      : p(params), shared(shared_) {
    uint32 index = blockIdx.x;
    const int group = p.heads / p.kv_heads, members = group / Traits::kHeads, member = index % members;
    index /= members;
    split = index % p.splits;
    const int kv_head = index / p.splits, batch = kv_head / p.kv_heads, warp = threadIdx.x / 32;
    of_block = warp / 8 % Traits::kHeads;
    const int first_head = kv_head * group + member * Traits::kHeads;
    head = first_head + of_block;
    first_tile = split * p.split_tiles;
    tiles = min(p.split_tiles, (p.seqlen_k + kTile - 1) / kTile - first_tile);
    lane = threadIdx.x % 32, first_row = warp % 8 * 16;
    k = p.k.at(batch, kv_head % p.kv_heads);
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        barrier_init(shared.full[i], Traits::kCopiers);
        barrier_init(shared.empty[i], Traits::kGroups);
      }
    }
    const int64 begin = static_cast<int64>(p.seqlen_q - p.rows) * p.q.row;
    for (int h = 0; h < Traits::kHeads; ++h)
      load(shared_address(shared.q[h]), p.q.at(batch, (first_head + h) % p.heads) + begin, p.q.row, p.rows, threadIdx.x,
           Traits::kThreads);
    cp_async_commit();
    cp_async_wait<0>();
    fence_for_wgmma();
    __syncthreads();
  }
  // 128 rows by some threads.
  __device__ __forceinline__ void load(uint32 to, const uint16* from, int64 row, int present, int thread, int threads) {
    const int chunk = thread % kChunks;
#pragma unroll 4
    for (int r = thread / kChunks; r < 128; r += threads / kChunks) {
      const bool there = r < present && chunk * 8 < p.head_dim;
      cp_async_16_or_zeros(atom_chunk<128>(to, r, chunk), there ? from + r * row + chunk * 8 : from, there);
    }
  }
  __device__ __forceinline__ int first_key(int tile) const { return (first_tile + tile) * kTile; }
  __device__ __forceinline__ bool copies() const { return threadIdx.x >= Traits::kGroups * 128; }
  __device__ __forceinline__ void copy_tiles() {
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages;
      barrier_wait(shared.empty[stage], tile / kStages % 2 ^ 1);
      load(shared_address(shared.k[stage]), k + static_cast<int64>(first_key(tile)) * p.k.row, p.k.row,
           p.seqlen_k - first_key(tile), threadIdx.x - Traits::kGroups * 128, Traits::kCopiers);
      barrier_arrive_after_copies(shared.full[stage]);
    }
    cp_async_wait<0>();
  }
  // Tile by tile s[64, 128] = 64 queries . keys, or with kOfKeys 64 keys . queries.
  template <bool kOfKeys, class Use>
  __device__ __forceinline__ void walk(const Use& use) {
    constexpr int kBarrier = 1, kWaiting = 256;  // of the first warpgroup's turn; threads of two
    const int group = threadIdx.x / 128, next = (group + 1) % Traits::kGroups;
    if (next == 0) named_arrive(kBarrier, kWaiting);
    const uint32 rows = first_row / 64 * (64 * 128), q = shared_address(shared.q[of_block]) + (kOfKeys ? 0 : rows);
    for (int tile = 0; tile < tiles; ++tile) {
      const int stage = tile % kStages;
      float s[64];  // [2 * h + x of 4 * j]: row first_row + lane / 4 + h * 8, column j * 8 + lane % 4 * 2 + x
      barrier_wait(shared.full[stage], tile / kStages % 2);
      const uint32 keys = shared_address(shared.k[stage]) + (kOfKeys ? rows : 0);
      const uint32 a = tile_descriptor(kOfKeys ? keys : q, 0), b = tile_descriptor(kOfKeys ? q : keys, 0);
      named_sync(kBarrier + group, kWaiting);
      wgmma_fence();
      constexpr int kSteps = Traits::kHeadDim / 16;
#pragma unroll
      for (int c = 0; c < kSteps; ++c) {
        Wgmma<typename Traits::Element>::ss(s, descriptor_at(a, atom_columns<128>(c)),
                                            descriptor_at(b, atom_columns<128>(c)), c > 0);
        if (c == kSteps / 2 - 1) wgmma_commit();
      }
      wgmma_commit();
      wgmma_wait<1>();  // the next one's begins while this one's ends
      if (next > 0 || tile + 1 < tiles) named_arrive(kBarrier + next, kWaiting);
      wgmma_wait<0>();
      finished(s);
      if (threadIdx.x % 128 == 0) barrier_arrive(shared.empty[stage]);
      use(tile, s);
    }
  }
};

template <class Traits>
__device__ __forceinline__ void last_row_sums_sm90(const LastRowsParams& p, typename Traits::Shared& shared) {
  LastRowsOf<Traits> of(p, shared);
  if (of.copies()) return of.copy_tiles();
  float2 found[2];  // of queries first_row + lane / 4 + h * 8
  found[0] = found[1] = make_float2(-infinity(), 0.f);
  of.template walk<false>([&](int tile, float (&s)[64]) {
    float scale = p.scale_log2;
    if (of.first_key(tile) + Traits::kTile > p.seqlen_k - (p.is_causal ? p.rows - 1 : 0)) {
      const int present = p.seqlen_k - of.first_key(tile) - of.lane % 4 * 2;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int after = p.is_causal ? max(p.rows - 1 - of.first_row - h * 8 - of.lane / 4, 0) : 0;
#pragma unroll
        for (int j = 0; j < 16; ++j)
#pragma unroll
          for (int x = 0; x < 2; ++x) {
            float& y = s[j * 4 + 2 * h + x];
            y = j * 8 + x < present - after ? y * scale : -infinity();
          }
      }
      scale = 1.f;
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float most[2] = {found[h].x, -infinity()};
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int x = 0; x < 2; ++x) most[x] = fmaxf(most[x], s[j * 4 + 2 * h + x] * scale);
      most[0] = fmaxf(most[0], most[1]);
      const float base = most[0] == -infinity() ? 0.f : most[0];
      float sum[2] = {found[h].y * exp2_approx(found[h].x - base), 0.f};
#pragma unroll
      for (int j = 0; j < 16; ++j)
#pragma unroll
        for (int x = 0; x < 2; ++x) sum[x] += exp2_approx(fmaf(s[j * 4 + 2 * h + x], scale, -base));
      found[h] = make_float2(most[0], sum[0] + sum[1]);
    }
  });
  float2* to = p.partial + (static_cast<int64>(of.head) * p.splits + of.split) * Traits::kRows;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float2 x = found[h];
#pragma unroll
    for (int stride = 1; stride <= 2; stride *= 2)
      x = joined(x, make_float2(__shfl_xor_sync(kFullWarp, x.x, stride), __shfl_xor_sync(kFullWarp, x.y, stride)));
    if (of.lane % 4 == 0) to[of.first_row + h * 8 + of.lane / 4] = x;
  }
}

template <class Traits>
__device__ __forceinline__ void column_means_sm90(const LastRowsParams& p, typename Traits::Shared& shared) {
  LastRowsOf<Traits> of(p, shared);
  if (!of.copies()) write_norm<Traits::kRows>(p, of.head, threadIdx.x % 256, shared.norms[of.of_block]);
  __syncthreads();
  if (of.copies()) return of.copy_tiles();
  const float factor = 1.f / p.rows;
  const float* norms = shared.norms[of.of_block] + of.lane % 4 * 2;
  float* importance = p.importance + static_cast<int64>(of.head) * p.seqlen_k;
  of.template walk<true>([&](int tile, float (&s)[64]) {
    float sum[2][2] = {};
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const float2 norm = *reinterpret_cast<const float2*>(norms + j * 8);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        sum[h][0] += exp2_approx(fmaf(s[j * 4 + 2 * h], p.scale_log2, -norm.x));
        sum[h][1] += exp2_approx(fmaf(s[j * 4 + 2 * h + 1], p.scale_log2, -norm.y));
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x = sum[h][0] + sum[h][1];
      x += __shfl_xor_sync(kFullWarp, x, 1);
      x += __shfl_xor_sync(kFullWarp, x, 2);
      const int key = of.first_key(tile) + of.first_row + h * 8 + of.lane / 4;
      if (of.lane % 4 == 0 && key < p.seqlen_k) importance[key] = x * factor;
    }
  });
}

template <class Traits>
__device__ __forceinline__ void last_row_sums_of_two_sm90(const LastRowsParams& p, typename Traits::Shared& shared) {
  last_row_sums_sm90<Traits>(p, shared);
}
template <class Traits>
__device__ __forceinline__ void column_means_of_two_sm90(const LastRowsParams& p, typename Traits::Shared& shared) {
  column_means_sm90<Traits>(p, shared);
}

}  // namespace s2o
