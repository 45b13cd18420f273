// What the blocks of keys weigh for each token, by the softmax weights of the compressed keys.
//
//   q [batch, heads, seqlen_q, head_dim], k_cmp [batch, kv_heads, compressed, head_dim], cmp_lse
//   -> weights [KV rows, tokens, weight_stride], of blocks 0 .. own - local
//
// block_weights_sm90.cu does the same by wgmma.
#include "nsa/block_sums.cuh"
#include "nsa/tile.cuh"

namespace s2o {

// kHeads: query heads of a KV head that a thread's four rows have; the others take turns.
template <class Element_, int kHeadDim_, int kHeads_>
struct BlockWeightTraits : NsaTile<Element_, kHeadDim_> {
  static constexpr int kHeads = kHeads_, kTokens = 128 / kHeads;  // of a block
  static_assert(kHeads == 1 || kHeads == 2 || kHeads == 4, "a thread has four rows");
  struct Shared {
    uint16 k[2][64 * kHeadDim_];
    float lse[4][128];           // [turns, rows], in log2 units
    uint16 q[128 * kHeadDim_];   // [turns, 128 rows]: as many as the group has
  };
};

// Compressed key number x of a step, 16 * t + y with y < 16, stands in slot 8 * (y / 2) + 2 * t + y % 2: the columns
// that thread t of four has of the eight products of eight slots are then the keys 16 * t to 16 * t + 15, in order.
__device__ __forceinline__ int key_of_slot(int slot) { return slot % 8 / 2 * 16 + slot / 8 * 2 + slot % 2; }

template <class Traits>
struct BlockWeights {
  static constexpr int kKeyTiles = Traits::kKeyTiles, kHeads = Traits::kHeads;
  const NsaParams& p;
  typename Traits::Shared& shared;
  int lane, warp_row, batch, kv_head, first_token, turns;

  __device__ __forceinline__ BlockWeights(const NsaParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), lane(threadIdx.x % 32), warp_row(threadIdx.x / 32 * 32) {
    const int kv_rows = p.q_tiles, kv_row = blockIdx.x % kv_rows;
    batch = kv_row / p.kv_heads;
    kv_head = kv_row % p.kv_heads;
    first_token = p.first_token + (p.tiles - 1 - static_cast<int>(blockIdx.x / kv_rows)) * Traits::kTokens;
    turns = (p.group + kHeads - 1) / kHeads;
  }
  // A warp's row is lane / 4 + 8 * x with x from 0 to 3: heads vary with x, tokens with lane / 4 and what is left of x.
  __device__ __forceinline__ int token_of(int row) const {
    const int x = row % 32 / 8;
    return first_token + row / 32 * (32 / kHeads) + x / kHeads * 8 + row % 8;
  }
  __device__ __forceinline__ int head_of(int turn, int row) const { return turn * kHeads + row % 32 / 8 % kHeads; }

  __device__ __forceinline__ bool is_there(int turn, int row) const {
    return token_of(row) < p.first_token + p.tokens && head_of(turn, row) < p.group;
  }
  __device__ __forceinline__ void load_queries() {
    const int chunk = threadIdx.x % Traits::kChunks, head_dim = p.geometry.head_dim;
    for (int turn = 0; turn < turns; ++turn) {
      const uint32 tile = shared_address(shared.q) + turn * (128 * Traits::kHeadDim * 2);
      for (int r = threadIdx.x / Traits::kChunks; r < 128; r += Traits::kThreads / Traits::kChunks) {
        // Heads that are not there have the last one's query: that of zeros would make NaN of an infinite key.
        const int head = min(head_of(turn, r), p.group - 1);
        const bool present = token_of(r) < p.first_token + p.tokens && chunk * 8 < head_dim;
        const uint16* q = p.q.at(batch, kv_head * p.group);
        const uint16* row = q + head * p.q.head + token_of(r) * p.q.row + chunk * 8;
        cp_async_16_or_zeros(chunk_address<Traits>(tile, r, chunk), present ? row : q, present);
      }
      const int r = threadIdx.x, token = token_of(r);
      // A row that is not there, or sees no compressed key, weighs nothing.
      const bool weighs = is_there(turn, r) && p.visible_compressed(token) > 0;
      const float lse =
          weighs ? p.cmp_lse[p.cmp_lse_place(batch, kv_head * p.group + head_of(turn, r), token)] : infinity();
      shared.lse[turn][r] = lse * 1.4426950408889634f;
    }
  }
  __device__ __forceinline__ void load_keys(int step, int steps) {
    if (step < steps) {
      const uint16* k = p.k_cmp.at(batch, kv_head);
      const uint32 tile = shared_address(shared.k[step % 2]);
      const int chunk = threadIdx.x % Traits::kChunks;
#pragma unroll
      for (int r = threadIdx.x / Traits::kChunks; r < 64; r += Traits::kThreads / Traits::kChunks) {
        const int key = step * 64 + key_of_slot(r);
        const bool present = key < p.compressed && chunk * 8 < p.geometry.head_dim;
        cp_async_16_or_zeros(chunk_address<Traits>(tile, r, chunk), present ? k + key * p.k_cmp.row + chunk * 8 : k,
                             present);
      }
    }
    cp_async_commit();
  }
  // s[row, slot]: products of a turn's rows and a step's keys.
  __device__ __forceinline__ void multiply(float (&s)[2][kKeyTiles][4], int turn, int step) const {
    const uint32 q_tile = shared_address(shared.q) + turn * (128 * Traits::kHeadDim * 2);
    const uint32 k_tile = shared_address(shared.k[step % 2]);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      uint32 a[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        ldmatrix_x4(a[i], chunk_address<Traits>(q_tile, warp_row + i * 16 + lane % 16, c * 2 + lane / 16));
#pragma unroll
      for (int j = 0; j < kKeyTiles; j += 2) {
        uint32 b[4];
        ldmatrix_x4(b, chunk_address<Traits>(k_tile, j * 8 + lane % 8 + lane / 16 * 8, c * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          Traits::Element::mma(s[i][j], a[i], b[0], b[1]);
          Traits::Element::mma(s[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
  }
};

// Block: kTokens tokens of a KV row, p.tiles times p.q_tiles KV rows; those that see the most keys first.
template <class Traits>
__device__ __forceinline__ void nsa_block_weights(const NsaParams& p, typename Traits::Shared& shared) {
  constexpr int kHeads = Traits::kHeads, kOwn = 4 / kHeads;  // tokens of a thread
  BlockWeights<Traits> of(p, shared);
  const int lane = of.lane, t = lane % 4, ratio = p.ratio();
  // Blocks that the last token may choose by weight, and the compressed keys that count for them.
  const int last_token = min(of.first_token + Traits::kTokens, p.first_token + p.tokens) - 1;
  const int steps = (max(0, p.own_block(last_token) - p.local + 1) * ratio + 63) / 64;
  of.load_queries();
  of.load_keys(0, steps);

  int token[kOwn], visible[kOwn];
  float* weights[kOwn];
  float carried[kOwn];  // P of the last compressed key before the thread's: of thread 0, of the step before
#pragma unroll
  for (int n = 0; n < kOwn; ++n) {
    token[n] = of.token_of(of.warp_row + n * kHeads * 8 + lane / 4);
    visible[n] = p.visible_compressed(token[n]);
    const int64 row = static_cast<int64>(of.batch * p.kv_heads + of.kv_head) * p.tokens + (token[n] - p.first_token);
    weights[n] = token[n] < p.first_token + p.tokens ? p.weights + row * p.weight_stride : nullptr;
    carried[n] = 0.f;
  }
  for (int step = 0; step < steps; ++step) {
    of.load_keys(step + 1, steps);
    cp_async_wait<1>();
    __syncthreads();
    float sum[kOwn][16];  // P of the thread's 16 compressed keys
#pragma unroll
    for (int n = 0; n < kOwn; ++n)
#pragma unroll
      for (int x = 0; x < 16; ++x) sum[n][x] = 0.f;
    for (int turn = 0; turn < of.turns; ++turn) {
      float s[2][Traits::kKeyTiles][4];
      of.multiply(s, turn, step);
#pragma unroll
      for (int x = 0; x < 4; ++x) {  // rows of the thread
        const float lse = shared.lse[turn][of.warp_row + x * 8 + lane / 4];
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            sum[x / kHeads][j * 2 + e] += exp2_approx(fmaf(s[x / 2][j][x % 2 * 2 + e], p.scale_log2, -lse));
      }
    }
#pragma unroll
    for (int n = 0; n < kOwn; ++n) {
      write_block_weights(BlockShape(p), sum[n], carried[n], step * 64 + t * 16, visible[n], weights[n]);
    }
    __syncthreads();  // every warp is done with this step's keys
  }
  cp_async_wait<0>();
}

}  // namespace s2o
