// nsa_window on Hopper: by wgmma, a warpgroup 64 rows.
#include "common/keep_finite.cuh"
#include "nsa/position_rows.cuh"
#include "nsa/row_copies.cuh"
#include "nsa/tile_sm90.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct WindowSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8;
  // Three warpgroups attend; one copies keys and values.
  static constexpr int kGroups = 3, kConsumers = kGroups * 128, kCopiers = 128, kThreads = kConsumers + kCopiers;
  static constexpr int kConsumerRegisters = 152, kCopierRegisters = 40;
  static_assert(kConsumers * kConsumerRegisters + kCopiers * kCopierRegisters <= kRegistersOfBlock<kThreads>,
                "one would wait forever");
  // Steps of keys in shared memory. Where care is taken: the one that is attended to, two that copies are under way for,
  // and one whose values still wait.
  static constexpr int kStages = 4;
  using Rows = PositionRows<kGroups * 64>;
  struct Shared {
    uint16 q[kGroups][64 * kHeadDim];  // [warpgroups, rows]; at the end, outputs
    uint16 k[kStages][kWindowStep * kHeadDim];
    uint16 v[kStages][kWindowStep * kHeadDim];
    uint16 zeros[kWindowStep * kHeadDim];  // values of weights that have met theirs
    uint64 full[kStages], empty[kStages];  // barriers: a step's copies have come; all warps are done with it
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
  float acc[kHeadDim / 2];         // [rows, columns] of this thread
  float m[2], l[2];                // running maximum of scores, to be scaled; this thread's part of the sum
  uint32 w[kWindowStep / 8][2];    // weights that wait for their product with values, packed in pairs of keys

  __device__ __forceinline__ explicit WindowRows(const NsaParams& p_) : p(p_) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc[i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = -infinity();
      l[h] = 0.f;
    }
#pragma unroll
    for (int j = 0; j < kWindowStep / 8; ++j) w[j][0] = w[j][1] = 0;
  }
  // acc += w v, in flight.
  __device__ __forceinline__ void issue_output(uint32 v_tile) {
    const uint32 v = tile_descriptor(v_tile, 64 * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kWindowStep / 8; j += 2) {
      const uint32 a[4] = {w[j][0], w[j][1], w[j + 1][0], w[j + 1][1]};
      Wgmma<Element>::rs(acc, a, descriptor_at(v, j * 8 * 128), true);
    }
    wgmma_commit();
  }
  __device__ __forceinline__ void flush(uint32 v_tile) {
    issue_output(v_tile);
    wgmma_wait<0>();
    finished(acc);
  }
  // A step of keys, whose weights wait then; those that wait meet their values, `v_tile`, under the softmax.
  // `edge`: some row of the warpgroup does not see some key; `rising`: scale is positive. `nonfinite`: bits of keys of this
  // step whose values that are not finite were taken out of the product; null: none were. `meanwhile` runs under the
  // products.
  template <class Window, class Meanwhile>
  __device__ __forceinline__ void attend(const Window& window, uint32 q_tile, uint32 k_tile, uint32 v_tile,
                                         int first_position, int first_key, bool edge, bool rising,
                                         const uint32* nonfinite, const uint16* v_rows, const Meanwhile& meanwhile) {
    const int lane = threadIdx.x % 32;
    float s[kWindowStep / 2], rescale_by[2];
    {
      const uint32 a = tile_descriptor(q_tile, 0), b = tile_descriptor(k_tile, 0);
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < kHeadDim / 16; ++c)
        Wgmma<Element>::ss(s, descriptor_at(a, atom_columns<64>(c)), descriptor_at(b, atom_columns<64>(c)), c > 0);
      wgmma_commit();
    }
    issue_output(v_tile);
    meanwhile();
    wgmma_wait<1>();
    finished(s);
    // Of a scale that is not positive scores are multiplied before they are compared.
    const float scale = rising ? p.scale_log2 : 1.f;
    if (!rising) {
#pragma unroll
      for (int i = 0; i < kWindowStep / 2; ++i) s[i] *= p.scale_log2;
    }
    if (edge) {  // in one piece, without a branch for each key
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int last = first_position + 8 * h - first_key - lane % 4 * 2, first = last - window.window + 1;
        const int sinks = window.sinks - first_key - lane % 4 * 2;
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
      float top[2] = {m[h], m[h]}, sum[2] = {};
#pragma unroll
      for (int i = 0; i < kWindowStep / 4; ++i) top[i % 2] = fmaxf(top[i % 2], s[i / 2 * 4 + 2 * h + i % 2]);
      const float highest = row_max(fmaxf(top[0], top[1])), base = highest == -infinity() ? 0.f : highest * scale;
      rescale_by[h] = exp2_approx(fmaf(m[h], scale, -base));
#pragma unroll
      for (int i = 0; i < kWindowStep / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        x = exp2_approx(fmaf(x, scale, -base));
        sum[i % 2] += x;
      }
      m[h] = highest;
      l[h] = l[h] * rescale_by[h] + (sum[0] + sum[1]);
    }
    wgmma_wait_behind(l[0] + l[1]);
    finished(acc);
    if (__any_sync(kFullWarp, rescale_by[0] != 1.f || rescale_by[1] != 1.f)) {
#pragma unroll
      for (int i = 0; i < kHeadDim / 2; ++i) acc[i] *= rescale_by[i / 2 % 2];
    }
#pragma unroll
    for (int j = 0; j < kWindowStep / 8; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) w[j][h] = Element::pack(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]);
    __syncwarp();
    if (nonfinite)
      add_taken_values<Element, kHeadDim>(
          acc, w, nonfinite, p.geometry.head_dim, [&](int key) { return v_rows + (first_key + key) * p.v.row; },
          [&](int h, int key) { return window_sees(p, first_position + 8 * h, first_key + key); });
  }
  // The log of a row's sum of weights, in log2 units.
  __device__ __forceinline__ float lse_of(int h, float total) const {
    return total == 0.f ? -infinity() : m[h] * (p.scale_log2 > 0.f ? p.scale_log2 : 1.f) + __log2f(total);
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
      if (token >= 0 && lane % 4 == 0) p.near_lse[place] = lse_of(h, total);
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
        p.lse[static_cast<int64>(rows.head) * rows.seqlen_q + token] = lse_of(h, total) * 0.69314718055994531f;
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
  constexpr int kStages = Traits::kStages, kHeadDim = Traits::kHeadDim, kConsumers = Traits::kConsumers;
  constexpr int kMeet = 1;         // a named barrier
  constexpr int kCarefully = 256;  // threads that copy where care is taken, each as many rows as the others
  using Rows = typename Traits::Rows;
  using Copies = RowCopies<kHeadDim, kWindowStep, Traits::kCopiers>;
  using CarefulCopies = RowCopies<kHeadDim, kWindowStep, kCarefully>;
  if (threadIdx.x == 0)
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared.full[i], Traits::kCopiers);
      barrier_init(shared.empty[i], kConsumers / 32);
    }
  for (int i = threadIdx.x; i < kWindowStep * Traits::kChunks; i += Traits::kThreads)
    store_shared_16(shared_address(shared.zeros) + i * 16, make_uint4(0, 0, 0, 0));
  if (threadIdx.x < kStages * kWindowStep / 32) shared.nonfinite[0][threadIdx.x] = 0;
  fence_for_wgmma();
  __syncthreads();
  const Rows rows(p, blockIdx.x);
  const WindowSteps steps(p, rows);
  const int batch = rows.batch(p.heads), kv_head = rows.kv_head(p.heads, p.kv_heads);
  const uint16 *k_rows = p.k.at(batch, kv_head), *v_rows = p.v.at(batch, kv_head);
  const auto k_tile = [&](int step) { return shared_address(shared.k[step % kStages]); };
  const auto v_tile = [&](int step) { return shared_address(shared.v[step % kStages]); };
  const auto load = [&](const auto& copies, int step) {
    const int first_key = steps.first_key(step), end = p.geometry.seqlen_k;
    const bool whole = first_key + kWindowStep <= end && p.geometry.head_dim == kHeadDim;
    copies.load(k_tile(step), p.k, k_rows, first_key + copies.slot, copies.kAtATime, end, whole);
    copies.load(v_tile(step), p.v, v_rows, first_key + copies.slot, copies.kAtATime, end, whole);
  };
  if (threadIdx.x >= kConsumers) {
    registers_shrink<Traits::kCopierRegisters>();
    const Copies copies(threadIdx.x - kConsumers, p.geometry.head_dim);
    const uint16* q = p.q.at(batch, rows.head_in_batch(p.heads));
#pragma unroll 1
    for (int row = copies.slot; row < Rows::kRows; row += copies.kAtATime) {
      const int token = rows(row);
      const bool present = copies.inside() && token >= 0;
      cp_async_16_or_zeros(atom_chunk<64>(shared_address(shared.q[row / 64]), row % 64, copies.chunk),
                           present ? q + token * p.q.row + copies.chunk * 8 : q, present);
    }
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {  // with the first, q
      if (step >= kStages) barrier_wait(shared.empty[step % kStages], (step / kStages - 1) & 1);
      load(copies, step);
      barrier_arrive_after_copies(shared.full[step % kStages]);
    }
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }
  registers_grow<Traits::kConsumerRegisters>();
  // Kept in a register, not read from the thread's index at each step; and one that is known to be the warp's.
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  const int warp = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 32, 0), group = warp / 4;
  const int row = warp * 16 + lane / 4;  // and 8 more
  // The same, worked out anew where registers are short.
  const auto own_row = [] { return static_cast<int>(threadIdx.x) / 32 * 16 + static_cast<int>(threadIdx.x) % 32 / 4; };
  const uint32 q_tile = shared_address(shared.q[group]);
  // Positions of the warpgroup's rows; all are of one block of keys.
  const int first = rows.first + group * 64, last = first + 63, near_key = p.near_out ? near_begin(p, first) : -1;
  WindowRows<Traits> state(p);
  // Warpgroups go their own ways, a step or so apart, so that products of one run under the softmax of another.
  //
  // careful: in step, and with values that are not finite taken out of products. A second time so only where one has come
  // in, seen or not.
  const auto walk = [&](const auto& window, bool rising, bool careful) {
    state.clear();
    int waiting = -1;  // the step whose weights wait for their values
    const auto load_if_careful = [&](int step) {
      if (!careful) return;
      if (threadIdx.x < kCarefully && step < steps.count) load(CarefulCopies(threadIdx.x, p.geometry.head_dim), step);
      cp_async_commit();
    };
    const auto leave = [&](int step) {  // the warp reads no more of a step
      __syncwarp();
      if (step >= 0 && !careful && lane == 0) barrier_arrive(shared.empty[step % kStages]);
    };
    const auto flush = [&] {
      if (waiting >= 0) state.flush(v_tile(waiting));
      leave(waiting);
      waiting = -1;
    };
    load_if_careful(0);
    load_if_careful(1);
#pragma unroll 1
    for (int step = 0; step < steps.count; ++step) {
      const int first_key = steps.first_key(step);
      const bool reaches = window_reaches(window, first, last, first_key);
      uint32* nonfinite = shared.nonfinite[step % kStages];
      if (careful) {
        cp_async_wait<1>();
        const CarefulCopies copies(threadIdx.x, p.geometry.head_dim);
        if (threadIdx.x < kCarefully)
#pragma unroll 1
          for (int r = copies.slot; r < kWindowStep; r += copies.kAtATime)  // its copies
            take_nonfinite<typename Traits::Element>(atom_chunk<64>(v_tile(step), r, copies.chunk), r, nonfinite);
        fence_for_wgmma();
        named_sync(kMeet, kConsumers);  // and everybody is done with the step before
        if (threadIdx.x < kWindowStep / 32) shared.nonfinite[(step + 2) % kStages][threadIdx.x] = 0;
      } else {
        // Also for a step that it does not reach: no warp is then so far ahead that it leaves a stage twice before another
        // has left it once.
        barrier_wait(shared.full[step % kStages], step / kStages & 1);
      }
      if (reaches) {
        const uint32 of_waiting = waiting >= 0 ? v_tile(waiting) : shared_address(shared.zeros);
        state.attend(window, q_tile, k_tile(step), of_waiting, rows.first + row, first_key,
                     window_cuts(window, first, last, first_key), rising, careful ? nonfinite : nullptr, v_rows,
                     [&] { load_if_careful(step + 2); });
        leave(waiting);
        waiting = step;
      } else {
        flush();
        leave(step);
        load_if_careful(step + 2);
      }
      if (first_key == near_key) {
        flush();
        state.keep_near(Rows(p, block_index()), own_row());
      }
    }
    flush();
    if (careful) cp_async_wait<0>();
  };
  const bool rising = p.scale_log2 > 0.f;
  bool plain = rising && p.sinks == 0, careful = false;
#pragma unroll 1
  while (true) {
    if (plain)
      walk(PlainWindow{p.window}, true, false);
    else
      walk(p, rising, careful);
    if (named_count(kMeet, kConsumers, !careful && any_nonfinite(state.acc)) == 0) break;
    plain = false;
    careful = true;
  }
  state.store(Rows(p, block_index()), shared_address(shared.q[threadIdx.x / 128]), own_row());
}

}  // namespace s2o
