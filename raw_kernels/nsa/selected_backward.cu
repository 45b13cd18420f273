// Gradients of the selected branch by blocks of keys, with the lists of the forward: a block's gradients stay in
// registers while its rows pass, heads of a group side by side, and what a row's query has from the block is left as a
// part. No atomics.
//
//   q, k, v, dout, lse, delta; entries and items of nsa_places and nsa_scatter
//   -> query_parts, of the slots that have a block; key_parts and value_parts of each item
//
// Scores are computed with keys as rows, so that weights and their gradients are at once operands of the products with
// dout and q: a warp has 16 of 64 keys, and of 64 rows all.
#include "nsa/backward_params.cuh"
#include "sm80/shared.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct BackwardTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 128, kRows = 64, kKeys = kGradientKeys;
  static constexpr int kChunks = kHeadDim / 8, kDimTiles = kHeadDim / 8;
  static constexpr int kRowTiles = 4;  // of 8 rows, whose scores a warp holds at a time
  struct Shared {
    uint16 q[kRows * kHeadDim], dout[kRows * kHeadDim];
    uint16 k[kKeys * kHeadDim], v[kKeys * kHeadDim];
    uint16 ds[kKeys * kRows];           // gradients of scores, [keys, rows]
    float lse[kRows], delta[kRows];     // lse in log2 units, infinity of a row that is not there
    int token[kRows], head[kRows];      // of the group; token -1: there is no such row
    int target[kRows];                  // slot
    BlockItem item;
  };
};

template <class Traits>
struct Backward {
  using Element = typename Traits::Element;
  static constexpr int kChunks = Traits::kChunks, kDimTiles = Traits::kDimTiles, kRowTiles = Traits::kRowTiles;
  static constexpr int kAtATime = Traits::kThreads / kChunks, kRowBytes = Traits::kHeadDim * 2;
  const NsaBackwardParams& p;
  typename Traits::Shared& shared;
  int lane, warp, batch, kv_head, first_key;

  __device__ __forceinline__ void copy_keys(uint16* tile, const Tensor<const uint16>& x) const {
    const uint16* rows = x.at(batch, kv_head);
    const int chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int r = threadIdx.x / kChunks; r < Traits::kKeys; r += kAtATime) {
      const bool present = first_key + r < p.geometry.seqlen_k && chunk * 8 < p.geometry.head_dim;
      const uint16* row = rows + (first_key + r) * x.row + chunk * 8;
      cp_async_16_or_zeros(chunk_address<Traits>(shared_address(tile), r, chunk), present ? row : rows, present);
    }
  }
  __device__ __forceinline__ void copy_rows(uint16* tile, const Tensor<const uint16>& x) const {
    const uint16* rows = x.at(batch, kv_head * p.group);
    const int chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int r = threadIdx.x / kChunks; r < Traits::kRows; r += kAtATime) {
      const bool present = shared.token[r] >= 0 && chunk * 8 < p.geometry.head_dim;
      const uint16* row = rows + shared.head[r] * x.head + shared.token[r] * x.row + chunk * 8;
      cp_async_16_or_zeros(chunk_address<Traits>(shared_address(tile), r, chunk), present ? row : rows, present);
    }
  }
  // Which rows a tile has; of the block's first 64 threads one each.
  __device__ __forceinline__ void find_rows(int tile) const {
    const int r = threadIdx.x, of_item = tile * Traits::kRows + r, index = of_item / p.group;
    if (r >= Traits::kRows) return;
    const BlockItem& item = shared.item;
    const int64 place = static_cast<int64>(item.kv_row) * p.tokens * p.slots + item.begin + index;
    const int entry = index < item.count ? p.entries[place] : -1;
    shared.token[r] = -1;
    shared.lse[r] = infinity();
    shared.delta[r] = 0.f;
    if (entry < 0) return;
    const int of_round = entry >> kSlotBits, head = of_item - index * p.group, token = p.first_token + of_round;
    const int64 row =
        (static_cast<int64>(batch) * p.heads + kv_head * p.group + head) * p.geometry.seqlen_q + token;
    shared.token[r] = token;
    shared.head[r] = head;
    shared.target[r] = entry & ((1 << kSlotBits) - 1);
    shared.lse[r] = p.lse[row] * 1.4426950408889634f;
    shared.delta[r] = p.delta[row];
  }

  // A tile of fewer rows; `first` is a multiple of 8.
  static __device__ __forceinline__ uint32 rows_from(const uint16* tile, int first) {
    return shared_address(tile) + first * kRowBytes;
  }
  // x = keys' rows of `keys` times the rows of `rows` from `first` on: [keys, rows] of this warp.
  __device__ __forceinline__ void multiply(float (&x)[kRowTiles][4], const uint16* keys, const uint16* rows,
                                           int first) const {
    const uint32 row_tile = rows_from(rows, first), key_tile = shared_address(keys) + warp * 16 * kRowBytes;
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[j][e] = 0.f;
#pragma unroll 2
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      uint32 a[4];
      ldmatrix_x4(a, chunk_address<Traits>(key_tile, lane % 16, c * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kRowTiles; j += 2) {
        uint32 b[4];
        ldmatrix_x4(b, chunk_address<Traits>(row_tile, j * 8 + lane % 8 + lane / 16 * 8, c * 2 + lane / 8 % 2));
        Element::mma(x[j], a, b[0], b[1]);
        Element::mma(x[j + 1], a, b[2], b[3]);
      }
    }
  }
  // acc += w x: w [keys, rows from `first` on] of this warp, packed in pairs of rows; x: rows, whole.
  __device__ __forceinline__ void add_product(float (&acc)[kDimTiles][4], const uint32 (&w)[kRowTiles][2],
                                              const uint16* x, int first) const {
    const uint32 tile = rows_from(x, first);
#pragma unroll
    for (int j = 0; j < kRowTiles; j += 2) {
      const uint32 a[4] = {w[j][0], w[j][1], w[j + 1][0], w[j + 1][1]};
#pragma unroll
      for (int d = 0; d < kDimTiles; d += 2) {
        uint32 b[4];
        ldmatrix_x4_transposed(b, chunk_address<Traits>(tile, j * 8 + lane % 16, d + lane / 16));
        Element::mma(acc[d], a, b[0], b[1]);
        Element::mma(acc[d + 1], a, b[2], b[3]);
      }
    }
  }
  __device__ __forceinline__ uint32 score_chunk(int key, int chunk) const {
    return shared_address(shared.ds) + key * (Traits::kRows * 2) + ((chunk ^ (key & 7)) << 4);
  }

  // Of some of the tile's rows, from `first` on: what they add to the keys' gradients, and ds.
  __device__ __forceinline__ void add_rows(float (&dk)[kDimTiles][4], float (&dv)[kDimTiles][4], int first) const {
    float s[kRowTiles][4], ds[kRowTiles][4];  // [keys, rows] of this thread: scores, then weights; gradients
    multiply(s, shared.k, shared.q, first);
    multiply(ds, shared.v, shared.dout, first);
    uint32 w[kRowTiles][2], dw[kRowTiles][2];  // packed in pairs of rows
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j) {
      const int row = first + j * 8 + lane % 4 * 2;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int r = row + e % 2, key = first_key + warp * 16 + lane / 4 + e / 2 * 8;
        const bool seen = (shared.token[r] >= 0) & (key <= p.position(shared.token[r]));
        const float weight = exp2_approx(s[j][e] * p.scale_log2 - shared.lse[r]);
        s[j][e] = seen ? weight : 0.f;
        ds[j][e] = seen ? weight * (ds[j][e] - shared.delta[r]) : 0.f;
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        w[j][h] = Element::pack(s[j][2 * h], s[j][2 * h + 1]);
        dw[j][h] = Element::pack(ds[j][2 * h], ds[j][2 * h + 1]);
        store_shared_4(score_chunk(warp * 16 + lane / 4 + h * 8, first / 8 + j) + lane % 4 * 4, dw[j][h]);
      }
    }
    add_product(dv, w, shared.dout, first);
    add_product(dk, dw, shared.q, first);
  }
  // What 16 of the tile's rows have from all keys, whose ds are there, to their parts: 64 columns, from `first` on.
  __device__ __forceinline__ void leave_query_parts(int half, int first) const {
    float dq[8][4];  // [rows, columns] of this thread
#pragma unroll
    for (int d = 0; d < 8; ++d)
#pragma unroll
      for (int e = 0; e < 4; ++e) dq[d][e] = 0.f;
#pragma unroll
    for (int key = 0; key < Traits::kKeys; key += 16) {
      uint32 a[4];
      ldmatrix_x4_transposed(a, score_chunk(key + lane / 16 * 8 + lane % 8, warp * 2 + lane / 8 % 2));
#pragma unroll
      for (int d = 0; d < 8; d += 2) {
        uint32 b[4];
        ldmatrix_x4_transposed(
            b, chunk_address<Traits>(shared_address(shared.k), key + lane % 16, first / 8 + d + lane / 16));
        Element::mma(dq[d], a, b[0], b[1]);
        Element::mma(dq[d + 1], a, b[2], b[3]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = warp * 16 + lane / 4 + 8 * h, token = shared.token[r];
      if (token < 0) continue;
      const int64 part = p.query_part(shared.item.kv_row, token - p.first_token, shared.target[r], half, shared.head[r]);
      float2* target = reinterpret_cast<float2*>(p.query_parts + part * Traits::kHeadDim + first) + lane % 4;
#pragma unroll
      for (int d = 0; d < 8; ++d) target[d * 4] = make_float2(dq[d][2 * h], dq[d][2 * h + 1]);
    }
  }
  __device__ __forceinline__ void leave_key_parts(const float (&x)[kDimTiles][4], float* parts, int64 part) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64 row = part * Traits::kKeys + warp * 16 + lane / 4 + 8 * h;
      float2* target = reinterpret_cast<float2*>(parts + row * Traits::kHeadDim) + lane % 4;
#pragma unroll
      for (int d = 0; d < kDimTiles; ++d) target[d * 4] = make_float2(x[d][2 * h], x[d][2 * h + 1]);
    }
  }
};

// Block: half of an item's keys, or all; p.most_items items at most of each KV row.
template <class Traits>
__device__ __forceinline__ void nsa_selected_backward(const NsaBackwardParams& p, typename Traits::Shared& shared) {
  const int half = blockIdx.x % p.halves, of_all = blockIdx.x / p.halves, kv_row = of_all / p.most_items;
  const int index = of_all - kv_row * p.most_items;
  if (index >= p.item_counts[kv_row]) return;
  if (threadIdx.x == 0) shared.item = p.items[of_all];
  __syncthreads();
  const int batch = kv_row / p.kv_heads;
  const Backward<Traits> backward{p, shared, static_cast<int>(threadIdx.x % 32), static_cast<int>(threadIdx.x / 32),
                                  batch, kv_row - batch * p.kv_heads,
                                  (shared.item.block << p.block_shift) + half * kGradientKeys};
  backward.copy_keys(shared.k, p.k);
  backward.copy_keys(shared.v, p.v);
  float dk[Traits::kDimTiles][4], dv[Traits::kDimTiles][4];  // [keys, columns] of this thread
#pragma unroll
  for (int d = 0; d < Traits::kDimTiles; ++d)
#pragma unroll
    for (int e = 0; e < 4; ++e) dk[d][e] = dv[d][e] = 0.f;
  const int tiles = (shared.item.count * p.group + Traits::kRows - 1) / Traits::kRows;
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    backward.find_rows(tile);
    __syncthreads();
    backward.copy_rows(shared.q, p.q);
    backward.copy_rows(shared.dout, p.dout);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll 1
    for (int first = 0; first < Traits::kRows; first += Traits::kRowTiles * 8) backward.add_rows(dk, dv, first);
    __syncthreads();  // ds is there
#pragma unroll 1
    for (int first = 0; first < Traits::kHeadDim; first += 64) backward.leave_query_parts(half, first);
    __syncthreads();  // the tile is free
  }
  const int64 part = static_cast<int64>(of_all) * p.halves + half;
  backward.leave_key_parts(dk, p.key_parts, part);
  backward.leave_key_parts(dv, p.value_parts, part);
}

}  // namespace s2o
