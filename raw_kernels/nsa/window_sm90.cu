// nsa_window on Hopper: by wgmma, a warpgroup 64 rows.
#include "common/keep_finite.cuh"
#include "nsa/position_rows.cuh"
#include "nsa/tile_sm90.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct WindowSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kGroups = 3, kThreads = kGroups * 128, kChunks = kHeadDim / 8;
  static constexpr int kStages = 3;  // steps of keys in shared memory: one barrier a step
  using Rows = PositionRows<kGroups * 64>;
  struct Shared {
    uint16 q[kGroups][64 * kHeadDim];  // [warpgroups, rows]; at the end, outputs
    uint16 k[kStages][kWindowStep * kHeadDim];
    uint16 v[kStages][kWindowStep * kHeadDim];
    // What only copies need is read back for each step: the registers belong to the accumulators.
    const uint16 *k_rows, *v_rows;
    int steps[4];  // WindowSteps
    uint32 nonfinite[kStages][kWindowStep / 32];  // bits of the step's keys with values that are not finite
  };
};

// A warpgroup's rows and their online softmax.
template <class Traits>
struct WindowRows {
  using Element = typename Traits::Element;
  using Rows = typename Traits::Rows;
  static constexpr int kHeadDim = Traits::kHeadDim;
  const NsaParams& p;
  float acc[kHeadDim / 2];  // [rows, columns] of this thread
  float m[2], l[2];         // running maximum of scale_log2 * score; this thread's part of the sum

  __device__ __forceinline__ explicit WindowRows(const NsaParams& p_) : p(p_) {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc[i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = -infinity();
      l[h] = 0.f;
    }
  }
  // A step of keys. `edge`: some row of the warpgroup does not see some key. `nonfinite`: bits of keys whose values that
  // are not finite were taken out of the product; null: none were.
  __device__ __forceinline__ void attend(uint32 q_tile, uint32 k_tile, uint32 v_tile, int first_position, int first_key,
                                         bool edge, const uint32* nonfinite, const uint16* v_rows) {
    const int lane = threadIdx.x % 32;
    float s[kWindowStep / 2];
    multiply_scores<Element, kHeadDim>(s, q_tile, k_tile);
    const auto sees = [&](int h, int key) { return window_sees(p, first_position + 8 * h, first_key + key); };
    uint32 w[kWindowStep / 8][2];  // weights, packed in pairs of keys
#pragma unroll
    for (int i = 0; i < kWindowStep / 2; ++i) s[i] *= p.scale_log2;
    if (edge) {  // in one piece, without a branch for each key
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int last = first_position + 8 * h - first_key - lane % 4 * 2, first = last - p.window + 1;
        const int sinks = p.sinks - first_key - lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kWindowStep / 4; ++i) {
          const int key = i / 2 * 8 + i % 2;  // from the thread's first on
          const bool seen = (key <= last) & ((key >= first) | (key < sinks));
          float& x = s[i / 2 * 4 + 2 * h + i % 2];
          x = seen ? x : -infinity();
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top = m[h];
#pragma unroll
      for (int i = 0; i < kWindowStep / 4; ++i) top = fmaxf(top, s[i / 2 * 4 + 2 * h + i % 2]);
      top = row_max(top);
      const float base = top == -infinity() ? 0.f : top, rescale_by = exp2_approx(m[h] - base);
      float sum = l[h] * rescale_by;
#pragma unroll
      for (int j = 0; j < kWindowStep / 8; ++j) {
        const float x = exp2_approx(s[j * 4 + 2 * h] - base), y = exp2_approx(s[j * 4 + 2 * h + 1] - base);
        sum += x + y;
        w[j][h] = Element::pack(x, y);
      }
      m[h] = top;
      l[h] = sum;
      if (__any_sync(kFullWarp, rescale_by != 1.f)) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 4; ++i) acc[i / 2 * 4 + 2 * h + i % 2] *= rescale_by;
      }
    }
    __syncwarp();
    if (nonfinite)
      add_taken_values<Element, kHeadDim>(acc, w, nonfinite, p.geometry.head_dim,
                                          [&](int key) { return v_rows + (first_key + key) * p.v.row; }, sees);
    multiply_values<Element, kHeadDim>(acc, w, v_tile, true);
  }
  __device__ __forceinline__ uint32 near_pair(int d, int h, float inverse) const {
    return pack_finite<Element>(acc[d * 4 + 2 * h] * inverse, acc[d * 4 + 2 * h + 1] * inverse);
  }
  // Leaves what the rows have seen so far. `row`: of this thread among the block's, and 8 more.
  __device__ __forceinline__ void keep_near(const Rows& rows, int row) const {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = rows(row + 8 * h);
      const float total = row_sum(l[h]), inverse = total == 0.f ? 0.f : 1.f / total;
      const int64 place = static_cast<int64>(rows.head) * rows.seqlen_q + token;
      if (token >= 0 && lane % 4 == 0) p.near_lse[place] = total == 0.f ? -infinity() : m[h] + __log2f(total);
      // Neighbouring lanes exchange halves of two dim tiles, so that four write 32 bytes of a row.
      const bool odd = lane % 2;
      uint16* target = p.near_out + place * kHeadDim + odd * 8 + lane % 4 / 2 * 4;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; d += 2) {
        const uint32 even_tile = near_pair(d, h, inverse), odd_tile = near_pair(d + 1, h, inverse);
        const uint32 other = __shfl_xor_sync(kFullWarp, odd ? even_tile : odd_tile, 1);
        if (token >= 0)
          *reinterpret_cast<uint2*>(target + d * 8) = make_uint2(odd ? other : even_tile, odd ? odd_tile : other);
      }
    }
    __syncwarp();
  }
  // out and lse. `tile`: of the warpgroup's queries, which nobody reads any more.
  __device__ __forceinline__ void store(const Rows& rows, uint32 tile, int row) {
    const int lane = threadIdx.x % 32, warp_row = row - lane / 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = rows(row + 8 * h);
      const float total = row_sum(l[h]), inverse = total == 0.f ? 0.f : 1.f / total;
      keep_finite<Element, kHeadDim / 4>([&](int e) -> float& { return acc[e / 2 * 4 + 2 * h + e % 2]; }, total);
      if (p.lse && token >= 0 && lane % 4 == 0)
        p.lse[static_cast<int64>(rows.head) * rows.seqlen_q + token] =
            total == 0.f ? -infinity() : (m[h] + __log2f(total)) * 0.69314718055994531f;
#pragma unroll
      for (int d = 0; d < kHeadDim / 8; ++d)
        store_shared_4(atom_chunk<64>(tile, (row + 8 * h) % 64, d) + lane % 4 * 4,
                       Element::pack(acc[d * 4 + 2 * h] * inverse, acc[d * 4 + 2 * h + 1] * inverse));
      __syncwarp();
    }
    uint16* out = p.out.at(rows.batch(p.heads), rows.head_in_batch(p.heads));
    const int chunk = lane % Traits::kChunks;
#pragma unroll
    for (int x = 0; x < Traits::kChunks / 2; ++x) {
      const int r = warp_row + x * (32 / Traits::kChunks) + lane / Traits::kChunks, token = rows(r);
      const uint4 o = load_shared_16(atom_chunk<64>(tile, r % 64, chunk));
      if (token >= 0 && chunk * 8 < p.geometry.head_dim)
        store_global_16(out + token * p.out.row + chunk * 8, o.x, o.y, o.z, o.w);
    }
  }
};

// Block: 192 positions of a head.
template <class Traits>
__device__ __forceinline__ void nsa_window_sm90(const NsaParams& p, typename Traits::Shared& shared) {
  const int chunk = threadIdx.x % Traits::kChunks, slot = threadIdx.x / Traits::kChunks;
  constexpr int kAtATime = Traits::kThreads / Traits::kChunks;  // rows of a tile that the block copies
  constexpr int kStages = Traits::kStages;
  using Rows = typename Traits::Rows;
  if (threadIdx.x == 0) {
    const Rows rows(p, block_index());
    const int batch = rows.batch(p.heads), kv_head = rows.kv_head(p.heads, p.kv_heads);
    shared.k_rows = p.k.at(batch, kv_head);
    shared.v_rows = p.v.at(batch, kv_head);
    reinterpret_cast<WindowSteps&>(shared.steps) = WindowSteps(p, rows);
  }
  if (threadIdx.x < kStages * kWindowStep / 32) shared.nonfinite[0][threadIdx.x] = 0;
  __syncthreads();
  const WindowSteps& steps = reinterpret_cast<const WindowSteps&>(shared.steps);
  const bool inside = chunk * 8 < p.geometry.head_dim;
  const auto load = [&](int step) {
    if (step < steps.count) {
      const uint16 *k = shared.k_rows, *v = shared.v_rows;
      const int first_key = steps.first_key(step);
#pragma unroll
      for (int row = slot; row < kWindowStep; row += kAtATime) {
        const bool present = inside && first_key + row < p.geometry.seqlen_k;
        const int64 key = present ? first_key + row : 0;
        cp_async_16_or_zeros(atom_chunk<64>(shared_address(shared.k[step % kStages]), row, chunk),
                             present ? k + key * p.k.row + chunk * 8 : k, present);
        cp_async_16_or_zeros(atom_chunk<64>(shared_address(shared.v[step % kStages]), row, chunk),
                             present ? v + key * p.v.row + chunk * 8 : v, present);
      }
    }
    cp_async_commit();
  };
  {
    const Rows rows(p, block_index());
    const uint16* q = p.q.at(rows.batch(p.heads), rows.head_in_batch(p.heads));
#pragma unroll
    for (int i = 0; i < Traits::Rows::kRows / kAtATime; ++i) {
      const int row = slot + i * kAtATime, token = rows(row);
      const bool present = inside && token >= 0;
      cp_async_16_or_zeros(atom_chunk<64>(shared_address(shared.q[row / 64]), row % 64, chunk),
                           present ? q + token * p.q.row + chunk * 8 : q, present);
    }
  }
  const int group = threadIdx.x / 128, row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // and 8 more
  const uint32 q_tile = shared_address(shared.q[group]);
  // Positions of the warpgroup's rows; all are of one block of keys.
  const int tile_first = Rows(p, block_index()).first, first = tile_first + group * 64, last = first + 63;
  // A second time, with values that are not finite taken out of products, only where one has come in, seen or not.
#pragma unroll 1
  for (bool careful = false;; careful = true) {
    load(0);
    load(1);
    WindowRows<Traits> state(p);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      cp_async_wait<1>();
      uint32* nonfinite = shared.nonfinite[step % kStages];
      if (careful) {
#pragma unroll 1
        for (int r = slot; r < kWindowStep; r += kAtATime)  // its copies
          take_nonfinite<typename Traits::Element>(
              atom_chunk<64>(shared_address(shared.v[step % kStages]), r, chunk), r, nonfinite);
      }
      fence_for_wgmma();
      __syncthreads();  // and everybody is done with the step before, whose place is filled
      load(step + 2);
      if (careful && threadIdx.x < kWindowStep / 32) shared.nonfinite[(step + 2) % kStages][threadIdx.x] = 0;
      const int first_key = steps.first_key(step);
      if (window_reaches(p, first, last, first_key))
        state.attend(q_tile, shared_address(shared.k[step % kStages]), shared_address(shared.v[step % kStages]),
                     tile_first + row, first_key, window_cuts(p, first, last, first_key), careful ? nonfinite : nullptr,
                     shared.v_rows);
      if (p.near_out && first_key == near_begin(p, first)) state.keep_near(Rows(p, block_index()), row);
    }
    cp_async_wait<0>();
    if (!__syncthreads_or(!careful && any_nonfinite(state.acc))) {
      state.store(Rows(p, block_index()), q_tile, row);
      return;
    }
  }
}

}  // namespace s2o
