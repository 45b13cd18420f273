// What the last queries of a head make of every key and of every distance: sums of their causal softmax.
//
//   line_sums: (maximum, sum) of last_row_sums, q, k -> columns [heads of the round, parts, seqlen_k]
//                                                       diagonals [heads of the round, parts, tiles, 128]
//   line_totals: columns, diagonals -> sums [heads of the round, 2, seqlen_k]: by key, and by distance
//
// A part is kPart of the queries, a tile kPart keys. Weights of the two stand in shared memory, where a thread adds up a
// column or a diagonal of them; a distance crosses two tiles of a part at most. Sums are in a fixed order.
#include "common/geometry.cuh"
#include "sm80/shared.cuh"

namespace s2o {

constexpr int kPart = 64;
constexpr int kLastRows = 128;  // that last_row_sums has room for

struct LineSumsParams {
  Tensor<const uint16> q, k;
  const float2* partial;  // [batch * heads, splits, kLastRows]
  float* columns;
  float* diagonals;       // number d + kPart - 1 is that of queries d behind keys, counted in the part and the tile
  float* sums;
  int heads, kv_heads;    // of a sequence
  int seqlen_q, seqlen_k, head_dim;
  int rows;               // last queries, up to kLastRows
  int parts, tiles;
  int splits;             // of the keys, of last_row_sums
  int block_tiles;        // tiles of a block of line_sums
  int first_head, round_heads;
  float scale_log2;       // scale * log2(e)
};

template <class Element_, int kHeadDim_>
struct LineTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 128;
  static constexpr int kStages = kHeadDim > 128 ? 1 : 2;
  struct Shared {
    uint16 q[kPart * kHeadDim];
    uint16 k[kStages][kPart * kHeadDim];
    float weights[kPart][kPart + 1];
    float norms[kPart];  // of the queries
  };
};

// Block: a part of the queries of a head, and block_tiles tiles; heads that share keys stand side by side.
template <class Traits>
__device__ __forceinline__ void line_sums(const LineSumsParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kChunks = Traits::kHeadDim / 8, kStages = Traits::kStages;
  uint32 index = blockIdx.x;
  const int in_round = index % p.round_heads;
  index /= p.round_heads;
  const int part = index % p.parts, first_tile = index / p.parts * p.block_tiles;
  const int tiles = min(p.block_tiles, p.tiles - first_tile);
  const int head = p.first_head + in_round, batch = head / p.heads, of_sequence = head % p.heads;
  const int first_row = part * kPart, rows = min(kPart, p.rows - first_row);
  const uint16* q = p.q.at(batch, of_sequence) + static_cast<int64>(p.seqlen_q - p.rows + first_row) * p.q.row;
  const uint16* k = p.k.at(batch, of_sequence / (p.heads / p.kv_heads));
  const auto load = [&](uint32 to, const uint16* from, int64 row, int present) {
    const int chunk = threadIdx.x % kChunks;
    for (int r = threadIdx.x / kChunks; r < kPart; r += Traits::kThreads / kChunks) {
      const bool there = r < present && chunk * 8 < p.head_dim;
      cp_async_16_or_zeros(chunk_address<Traits>(to, r, chunk), there ? from + r * row + chunk * 8 : from, there);
    }
  };
  const auto load_keys = [&](int tile) {
    if (tile < tiles) {
      const int first = (first_tile + tile) * kPart;
      load(shared_address(shared.k[tile % kStages]), k + first * p.k.row, p.k.row, p.seqlen_k - first);
    }
    cp_async_commit();
  };
  load(shared_address(shared.q), q, p.q.row, rows);
  if constexpr (kStages > 1) load_keys(0);
  if (threadIdx.x < kPart) {
    const float2* from = p.partial + static_cast<int64>(head) * p.splits * kLastRows + first_row + threadIdx.x;
    float most = -infinity(), sum = 0.f;
    for (int i = 0; i < p.splits; ++i) most = fmaxf(most, from[static_cast<int64>(i) * kLastRows].x);
    for (int i = 0; i < p.splits; ++i) {
      const float2 x = from[static_cast<int64>(i) * kLastRows];
      sum += x.x == -infinity() ? 0.f : x.y * exp2_approx(x.x - most);
    }
    shared.norms[threadIdx.x] = most + __log2f(sum);
  }

  const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16;
  const int64 place = static_cast<int64>(in_round) * p.parts + part;
  for (int tile = 0; tile < tiles; ++tile) {
    load_keys(tile + kStages - 1);
    cp_async_wait<kStages - 1>();
    __syncthreads();
    const uint32 of_q = shared_address(shared.q), of_k = shared_address(shared.k[tile % kStages]);
    float s[8][4] = {};
#pragma unroll 4
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      uint32 a[4];
      ldmatrix_x4(a, chunk_address<Traits>(of_q, warp_row + lane % 16, c * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < 8; j += 2) {
        uint32 b[4];
        ldmatrix_x4(b, chunk_address<Traits>(of_k, j * 8 + lane % 8 + lane / 16 * 8, c * 2 + lane / 8 % 2));
        Element::mma(s[j], a, b[0], b[1]);
        Element::mma(s[j + 1], a, b[2], b[3]);
      }
    }
    const int first_key = (first_tile + tile) * kPart;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = warp_row + h * 8 + lane / 4;
      // Keys of the tile that the query sees.
      const int seen = row < rows ? p.seqlen_k - p.rows + first_row + row + 1 - first_key : 0;
      const float norm = shared.norms[row];
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int key = j * 8 + lane % 4 * 2 + e;
          shared.weights[row][key] = key < seen ? exp2_approx(fmaf(s[j][2 * h + e], p.scale_log2, -norm)) : 0.f;
        }
    }
    __syncthreads();
    const int d = static_cast<int>(threadIdx.x) - (kPart - 1);
    float along = 0.f;
#pragma unroll 8
    for (int row = 0; row < kPart; ++row) {
      const int key = row - d;
      if (key >= 0 && key < kPart) along += shared.weights[row][key];
    }
    p.diagonals[(place * p.tiles + first_tile + tile) * (2 * kPart) + threadIdx.x] = along;
    if (threadIdx.x < kPart && first_key + static_cast<int>(threadIdx.x) < p.seqlen_k) {
      float down = 0.f;
#pragma unroll 8
      for (int row = 0; row < kPart; ++row) down += shared.weights[row][threadIdx.x];
      p.columns[place * p.seqlen_k + first_key + threadIdx.x] = down;
    }
    __syncthreads();
  }
}

constexpr int kTotalsThreads = 256;

// Block: kTotalsThreads keys and distances of a head.
__device__ __forceinline__ void line_totals(const LineSumsParams& p) {
  const int blocks = (p.seqlen_k + kTotalsThreads - 1) / kTotalsThreads;
  const int in_round = blockIdx.x / blocks, i = blockIdx.x % blocks * kTotalsThreads + threadIdx.x;
  if (i >= p.seqlen_k) return;
  float of_key = 0.f, of_distance = 0.f;
  for (int part = 0; part < p.parts; ++part) {
    const int64 place = static_cast<int64>(in_round) * p.parts + part;
    of_key += p.columns[place * p.seqlen_k + i];
    // The part's query row and the tile's key are i apart where row - key = far + tile * kPart.
    const int far = i - (p.seqlen_k - p.rows + part * kPart);
    for (int tile = max(0, (-far - kPart) / kPart); tile < p.tiles; ++tile) {
      const int d = far + tile * kPart;
      if (d >= kPart) break;
      if (d > -kPart) of_distance += p.diagonals[(place * p.tiles + tile) * (2 * kPart) + d + kPart - 1];
    }
  }
  float* sums = p.sums + static_cast<int64>(in_round) * 2 * p.seqlen_k;
  sums[i] = of_key;
  sums[p.seqlen_k + i] = of_distance;
}

}  // namespace s2o
