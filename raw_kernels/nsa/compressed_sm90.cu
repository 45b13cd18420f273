// Compressed attention on Hopper together with what blocks of keys weigh in it: one product of queries and compressed
// keys, one exponential for both. Weights are left for each query head, relative to the largest score that its row had
// met by then; nsa_top_blocks, which knows the row's log-sum-exp, adds heads up.
//
//   q, k_cmp, v_cmp -> cmp_out; weights [KV rows, tokens, group, weight_stride], step_tops, step_bases, head_lse
#include "common/keep_finite.cuh"
#include "nsa/block_sums.cuh"
#include "nsa/compressed_keys.cuh"
#include "nsa/row_copies.cuh"
#include "nsa/tile_sm90.cuh"

namespace s2o {

template <class Element_, int kHeadDim_>
struct CompressedTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8;
  // Two warpgroups attend; one copies keys and values.
  static constexpr int kConsumers = 256, kCopiers = 128, kThreads = kConsumers + kCopiers;
  static constexpr int kConsumerRegisters = 240, kCopierRegisters = 24;
  static_assert(kConsumers * kConsumerRegisters + kCopiers * kCopierRegisters <= kRegistersOfBlock<kThreads>,
                "one would wait forever");
  static constexpr int kTokens = 128, kTile = 128, kStages = 3;  // of a block; compressed keys of a step
  static constexpr int kKeyTiles = kTile / 8, kDimTiles = kHeadDim / 8;
  struct Shared {
    uint16 q[2][64 * kHeadDim];  // [warpgroups, rows]; at the end, outputs
    uint16 k[kStages][kTile * kHeadDim];
    uint16 v[kStages][kTile * kHeadDim];
    // Barriers of keys and of values: a step's copies have come; all warps are done with it.
    uint64 full[2][kStages], empty[2][kStages];
    uint32 nonfinite[kStages][kTile / 32];  // bits of a step's rows of v with values that are not finite
  };
};

// Copies of a step's compressed keys, or values, by kThreads threads.
template <class Traits, int kThreads>
struct StepCopies : RowCopies<Traits::kHeadDim, Traits::kTile, kThreads> {
  using Base = RowCopies<Traits::kHeadDim, Traits::kTile, kThreads>;
  const NsaParams& p;
  int own_key;  // of the thread's first row

  __device__ __forceinline__ StepCopies(const NsaParams& p_, int thread)
      : Base(thread, p_.geometry.head_dim), p(p_), own_key(key_of_row(Base::slot)) {}
  __device__ __forceinline__ void bring(uint32 tile, const Tensor<const uint16>& x, const uint16* rows, int step) const {
    const bool whole = (step + 1) * Traits::kTile <= p.compressed && p.geometry.head_dim == Traits::kHeadDim;
    Base::load(tile, x, rows, step * Traits::kTile + own_key, Base::kAtATime / 4, p.compressed, whole);
  }
};

// A warpgroup's rows and their online softmax.
template <class Traits>
struct CompressedRows {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kTile = Traits::kTile, kKeyTiles = Traits::kKeyTiles;
  const NsaParams& p;
  float acc[kHeadDim / 2];   // [rows, columns] of this thread
  float s[kTile / 2];        // [rows, keys]: scores, then weights
  uint32 w[kKeyTiles][2];    // those of the step before, packed in pairs of keys
  float m[2], l[2];          // running maximum of scores, in 1 / scale log2 units; this thread's part of the sum
  float rescale_by[2], carried[2];
  // Of one that is not positive scores are multiplied before they are compared.
  const float scale;

  __device__ __forceinline__ explicit CompressedRows(const NsaParams& p_)
      : p(p_), scale(p_.scale_log2 > 0.f ? p_.scale_log2 : 1.f) {}
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < kHeadDim / 2; ++i) acc[i] = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      m[h] = -infinity();
      l[h] = carried[h] = 0.f;
    }
  }
  __device__ __forceinline__ void issue_scores(uint32 q_tile, uint32 k_tile) {
    const uint32 a = tile_descriptor(q_tile, 0), b = tile_descriptor(k_tile, 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kHeadDim / 16; ++c)
      Wgmma<Element>::ss(s, descriptor_at(a, atom_columns<64>(c)), descriptor_at(b, atom_columns<kTile>(c)), c > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ float top(int h) const { return m[h] * scale; }  // in log2 units
  __device__ __forceinline__ void issue_output(uint32 v_tile) {
    const uint32 v = tile_descriptor(v_tile, kTile * 128);
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < kKeyTiles; j += 2) {
      const uint32 a[4] = {w[j][0], w[j][1], w[j + 1][0], w[j + 1][1]};
      Wgmma<Element>::rs(acc, a, descriptor_at(v, j * 8 * 128), true);
    }
    wgmma_commit();
  }
  // Scores of a thread's 32 keys, from first_key on, become weights. `masked`: not every row sees all of the step;
  // `rising`: scale is positive.
  __device__ __forceinline__ void softmax(int first_key, const int (&visible)[2], bool masked, bool rising) {
    if (!rising) {
#pragma unroll
      for (int i = 0; i < kTile / 2; ++i) s[i] *= p.scale_log2;
    }
    if (masked) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int i = 0; i < kTile / 4; ++i) {
          float& x = s[i / 2 * 4 + 2 * h + i % 2];
          x = i < visible[h] - first_key ? x : -infinity();
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float top[4] = {m[h], m[h], m[h], m[h]};
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) top[i % 4] = fmaxf(top[i % 4], s[i / 2 * 4 + 2 * h + i % 2]);
      const float highest = row_max(fmaxf(fmaxf(top[0], top[1]), fmaxf(top[2], top[3])));
      const float base = highest == -infinity() ? 0.f : highest * scale;
      rescale_by[h] = exp2_approx(fmaf(m[h], scale, -base));
      m[h] = highest;
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {
        float& x = s[i / 2 * 4 + 2 * h + i % 2];
        x = exp2_approx(fmaf(x, scale, -base));
      }
      l[h] *= rescale_by[h];
      carried[h] *= rescale_by[h];
    }
  }
  // After the product with the weights before.
  __device__ __forceinline__ void rescale_and_pack() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if (__any_sync(kFullWarp, rescale_by[h] != 1.f)) {
#pragma unroll
        for (int i = 0; i < kHeadDim / 4; ++i) acc[i / 2 * 4 + 2 * h + i % 2] *= rescale_by[h];
      }
#pragma unroll
      for (int j = 0; j < kKeyTiles; ++j) w[j][h] = Element::pack(s[j * 4 + 2 * h], s[j * 4 + 2 * h + 1]);
    }
    __syncwarp();
  }
};

// Block: 128 tokens of a query head, p.tiles of each of p.q_tiles KV rows; those that see the most keys first.
template <class Traits>
__device__ __forceinline__ void nsa_compressed_sm90(const NsaParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kHeadDim = Traits::kHeadDim, kTile = Traits::kTile, kStages = Traits::kStages;
  constexpr int kChunks = Traits::kChunks, kConsumers = Traits::kConsumers, kMeet = 1;  // kMeet: a named barrier
  using Copies = StepCopies<Traits, kConsumers>;
  const int heads = p.q_tiles * p.group, of_all = blockIdx.x % heads, kv_row = of_all / p.group;
  const int of_group = of_all - kv_row * p.group, batch = kv_row / p.kv_heads, kv_head = kv_row - batch * p.kv_heads;
  const int head = kv_head * p.group + of_group, head_dim = p.geometry.head_dim;
  const int first_token = p.first_token + (p.tiles - 1 - static_cast<int>(blockIdx.x / heads)) * Traits::kTokens;
  const int end_token = min(first_token + Traits::kTokens, p.first_token + p.tokens);
  const uint16* k = p.k_cmp.at(batch, kv_head);
  const uint16* v = p.v_cmp.at(batch, kv_head);
  const int ratio = p.ratio();
  const int keys = max(p.visible_compressed(end_token - 1), max(0, p.own_block(end_token - 1) - p.local + 1) * ratio);
  const int steps = (keys + kTile - 1) / kTile;
  if (steps == 0) return;
  enum { kKeys, kValues };
  const auto k_tile = [&](int step) { return shared_address(shared.k[step % kStages]); };
  const auto v_tile = [&](int step) { return shared_address(shared.v[step % kStages]); };
  if (threadIdx.x == 0)
    for (int i = 0; i < 2 * kStages; ++i) {
      barrier_init(shared.full[0][i], Traits::kCopiers);
      barrier_init(shared.empty[0][i], kConsumers / 32);
    }
  __syncthreads();
  if (threadIdx.x >= kConsumers) {
    registers_shrink<Traits::kCopierRegisters>();
    const StepCopies<Traits, Traits::kCopiers> copies(p, threadIdx.x - kConsumers);
    const uint16* q = p.q.at(batch, head);
#pragma unroll 1
    for (int row = copies.slot; row < Traits::kTokens; row += copies.kAtATime) {
      const int token = first_token + row;
      const bool present = copies.inside() && token < end_token;
      cp_async_16_or_zeros(atom_chunk<64>(shared_address(shared.q[row / 64]), row % 64, copies.chunk),
                           present ? q + token * p.q.row + copies.chunk * 8 : q, present);
    }
    const auto bring = [&](int what, int step) {
      const int stage = step % kStages;
      if (step >= kStages) barrier_wait(shared.empty[what][stage], (step / kStages - 1) & 1);
      if (what == kKeys)
        copies.bring(k_tile(step), p.k_cmp, k, step);
      else
        copies.bring(v_tile(step), p.v_cmp, v, step);
      barrier_arrive_after_copies(shared.full[what][stage]);
    };
#pragma unroll 1
    for (int step = 0; step <= steps; ++step) {  // with the first keys, q
      if (step < steps) bring(kKeys, step);
      if (step > 0) bring(kValues, step - 1);
    }
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }
  registers_grow<Traits::kConsumerRegisters>();
  // Kept in a register, not read from the thread's index at each step; and one that is known to be the warp's.
  int lane = threadIdx.x % 32;
  asm volatile("" : "+r"(lane));
  const int warpgroup = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / 128, 0);
  const int own_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;  // and 8 more
  const uint32 q_tile = shared_address(shared.q[warpgroup]);
  const int least = p.visible_compressed(first_token + warpgroup * 64);
  int visible[2];
  int places[2];  // of a row among those of the round, which weights bound to 32 bits; -1: there is no such row
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = first_token + own_row + 8 * h;
    visible[h] = p.visible_compressed(token);
    places[h] = token < end_token ? (kv_row * p.tokens + (token - p.first_token)) * p.group + of_group : -1;
  }
  // The warpgroups go their own ways, a step or so apart, so that products of one run under the softmax of the other.
  //
  // careful: in step, and with values that are not finite taken out of products. A second time so only where one has come
  // in, seen or not.
  CompressedRows<Traits> rows(p);
  const auto walk = [&](const auto& shape, bool rising, bool careful) {
    rows.clear();
    if (careful)
      for (int i = threadIdx.x; i < kStages * kTile / 32; i += kConsumers) shared.nonfinite[0][i] = 0;
    const auto expect = [&](int what, int step) {
      if (!careful) barrier_wait(shared.full[what][step % kStages], step / kStages & 1);
    };
    const auto leave = [&](int what, int step) {  // the warp reads no more of them
      __syncwarp();
      if (!careful && lane == 0) barrier_arrive(shared.empty[what][step % kStages]);
    };
    // Where care is taken: this thread's copies for `step` are there, its keys, and the values of the step before.
    const auto landed = [&](int step) {
      if (!careful) return;
      cp_async_wait<1>();
      if (step > 0) {
        const Copies copies(p, threadIdx.x);
#pragma unroll 1
        for (int r = copies.slot; r < kTile; r += Copies::kAtATime)
          take_nonfinite<Element>(atom_chunk<kTile>(v_tile(step - 1), r, copies.chunk), r,
                                  shared.nonfinite[(step - 1) % kStages]);
      }
      fence_for_wgmma();
    };
    // And everybody's; everybody is done with those of the step before.
    const auto meet = [&] {
      if (careful) named_sync(kMeet, kConsumers);
    };
    const auto load_next = [&](int step) {
      if (!careful) return;
      const Copies copies(p, threadIdx.x);
      if (step + 2 < steps) copies.bring(k_tile(step + 2), p.k_cmp, k, step + 2);
      if (step + 1 < steps) copies.bring(v_tile(step + 1), p.v_cmp, v, step + 1);
      cp_async_commit();
      if (threadIdx.x < kTile / 32) shared.nonfinite[(step + 1) % kStages][threadIdx.x] = 0;
    };
    if (careful) {
      const Copies copies(p, threadIdx.x);
      copies.bring(k_tile(0), p.k_cmp, k, 0);
      cp_async_commit();
      load_next(-1);
    }
    meet();
    const auto add_taken = [&](int step) {
      if (careful)
        add_taken_values<Element, kHeadDim>(
            rows.acc, rows.w, shared.nonfinite[step % kStages], head_dim,
            [&](int row) { return v + (step * kTile + key_of_row(row)) * p.v_cmp.row; },
            [&](int h, int row) { return step * kTile + key_of_row(row) < visible[h]; });
    };
    // Scores become weights, of which blocks have theirs.
    const auto weigh = [&](int step) {
      const int first_key = step * kTile + lane % 4 * (kTile / 4);
      rows.softmax(first_key, visible, (step + 1) * kTile > least, rising);
      landed(step + 1);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const auto weight = [&](int i) { return rows.s[i / 2 * 4 + 2 * h + i % 2]; };
        float four[kTile / 16], sum[2] = {};
        add_fours<kTile / 4>(four, weight);
#pragma unroll
        for (int i = 0; i < kTile / 16; ++i) sum[i % 2] += four[i];
        rows.l[h] += sum[0] + sum[1];
        const float most = write_visible_weights<kTile / 4>(shape, weight, four, rows.carried[h], first_key,
                                                            weights_of(p, places[h]));
        write_step_top(p, places[h], step, most);
        if (places[h] >= 0 && lane % 4 == 0)
          p.step_bases[static_cast<int64>(places[h]) * p.step_stride + step] = rows.top(h);
      }
      __syncwarp();
    };
    landed(0);
    meet();
    expect(kKeys, 0);
    rows.issue_scores(q_tile, k_tile(0));
    load_next(0);
    wgmma_wait<0>();
    finished(rows.s);
    leave(kKeys, 0);
    weigh(0);
    rows.rescale_and_pack();
#pragma unroll 1
    for (int step = 1; step < steps; ++step) {
      meet();
      add_taken(step - 1);
      expect(kKeys, step);
      expect(kValues, step - 1);
      rows.issue_scores(q_tile, k_tile(step));
      rows.issue_output(v_tile(step - 1));
      load_next(step);
      wgmma_wait<1>();
      finished(rows.s);
      leave(kKeys, step);
      weigh(step);
      wgmma_wait<0>();
      finished(rows.acc);
      leave(kValues, step - 1);
      rows.rescale_and_pack();
    }
    meet();  // the last step's values
    add_taken(steps - 1);
    expect(kValues, steps - 1);
    rows.issue_output(v_tile(steps - 1));
    wgmma_wait<0>();
    finished(rows.acc);
    if (careful) cp_async_wait<0>();
  };
  const bool rising = p.scale_log2 > 0.f;
  bool usual = rising && UsualBlockShape::is_of(p), careful = false;
#pragma unroll 1
  while (true) {
    if (usual)
      walk(UsualBlockShape(), true, false);
    else
      walk(BlockShape(p), rising, careful);
    if (named_count(kMeet, kConsumers, !careful && any_nonfinite(rows.acc)) == 0) break;
    usual = false;
    careful = true;
  }

  float total[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    total[h] = row_sum(rows.l[h]);
    const float inverse = total[h] == 0.f ? 0.f : 1.f / total[h];
    keep_finite<Element, kHeadDim / 4>([&](int e) -> float& { return rows.acc[e / 2 * 4 + 2 * h + e % 2]; },
                                       total[h]);
    if (places[h] >= 0 && lane % 4 == 0)
      p.head_lse[places[h]] = total[h] == 0.f ? -infinity() : rows.top(h) + __log2f(total[h]);
#pragma unroll
    for (int d = 0; d < Traits::kDimTiles; ++d)
      store_shared_4(atom_chunk<64>(q_tile, (own_row + 8 * h) % 64, d) + lane % 4 * 4,
                     Element::pack(rows.acc[d * 4 + 2 * h] * inverse, rows.acc[d * 4 + 2 * h + 1] * inverse));
  }
  __syncwarp();
  uint16* out = p.cmp_out + (static_cast<int64>(batch) * p.heads + head) * p.geometry.seqlen_q * head_dim;
  const int warp_row = own_row - lane / 4, of_row = lane % kChunks;
#pragma unroll
  for (int x = 0; x < kChunks / 2; ++x) {
    const int r = warp_row + x * (32 / kChunks) + lane / kChunks, token = first_token + r;
    const uint4 o = load_shared_16(atom_chunk<64>(q_tile, r % 64, of_row));
    if (token < end_token && of_row * 8 < head_dim)
      store_global_16(out + static_cast<int64>(token) * head_dim + of_row * 8, o.x, o.y, o.z, o.w);
  }
}

}  // namespace s2o
