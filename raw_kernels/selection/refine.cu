// rank="auto": which segments need a better order than their mean query gives, and the scores of their candidates.
// reference/s2o.py: probe, refined_segments and refined_scores define it.
//
//   probe:          how much of the softmax mass of a segment's queries the best tenth of its candidates by mass
//                   holds, and the best tenth by mean score does not: of a sample of candidates, for every
//                   kProbeEvery-th segment                            -> deficits [batch * heads, probes]
//   refined_norms:  which segments are refined, and the log of the mass of each of their pooled queries
//                                                                     -> refined [batch * heads, segments], norms
//   refined_scores: the largest score over a refined segment's pooled queries, each less its norm
//                                                                     -> scores: in place of key_scores'
//
// A block holds pooled queries as fragments in registers, a warp 16 or 32 of them, and walks keys 64 at a time.
#include "selection/refine_params.cuh"
#include "selection/sortable.cuh"

namespace s2o {

constexpr int kRefineStep = 64;         // keys of a step
constexpr int kRefineBlockSteps = 64;   // steps of a block of refined_scores

template <class Element_, int kHeadDim_, int kTiles_, bool kPaged_>
struct RefineTraits {
  using Element = Element_;
  static constexpr int kWarps = 8, kThreads = 32 * kWarps;
  static constexpr bool kPaged = kPaged_;          // k is a paged cache
  static constexpr int kTiles = kTiles_;           // 16-row mma tiles of a warp
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr int kChunks = kHeadDim / 8;
  static constexpr int kTilesAtOnce = kHeadDim > 128 ? 1 : kTiles;  // whose pooled queries memory holds
  static constexpr int kPooledAtOnce = 16 * kTilesAtOnce * kWarps;
  static_assert(kTilesAtOnce == kTiles || kTilesAtOnce == 1, "a part is one tile of each warp");
  static constexpr int kStages = 2 * kTilesAtOnce;
  static_assert(kStages * kRefineStep == kPooledAtOnce, "steps of keys reuse the memory of pooled_queries");

  struct Shared {
    uint16 rows[kPooledAtOnce * kHeadDim];     // pooled queries, until they are in registers; then steps of keys
    float part[2][2][kWarps][kRefineStep];    // [step % 2, quantity, warp, key]
    float mass[spec::kProbeSamples], mean[spec::kProbeSamples];
    uint64 slots[spec::kProbeSamples];
    float sums[kWarps];
    uint16* scores;  // of refined_scores: where the block's go, not in registers
  };
};

template <class Traits>
__device__ __forceinline__ uint32 row_chunk(uint32 tile, int row, int chunk) {
  return tile + row * (Traits::kHeadDim * 2) + ((chunk ^ (row & 7)) << 4);
}

// The candidates of a segment of which every `step`-th is in the sample.
struct Sample {
  int candidates, step, first, count, dense_begin, dense_keys;
  __device__ __forceinline__ Sample(const Geometry& g, int n)
      : candidates(g.candidates(n)),
        step((candidates + spec::kProbeSamples - 1) / spec::kProbeSamples),
        first(step / 2),
        count(candidates > 0 ? (candidates - first + step - 1) / step : 0),
        dense_begin(g.dense_begin(n)),
        dense_keys(g.dense_end(n) - dense_begin) {}
  __device__ __forceinline__ int position(int i) const {  // -1 past the end
    const int c = first + i * step;
    return i >= count ? -1 : c < dense_begin ? c : c + dense_keys;
  }
  __device__ __forceinline__ float weight() const { return static_cast<float>(candidates) / count; }
};

// Means of runs of queries in a block's registers: a warp has 16 * kTiles of them.
template <class Traits>
struct PooledQueries {
  using Element = typename Traits::Element;
  static constexpr int kTiles = Traits::kTiles;
  uint32 a[kTiles][Traits::kHeadDim / 16][4];

  // `queries` rows from q on; a pooled query whose run is empty repeats the first of all, which changes no maximum.
  // kFirst: the first of the tiles of each warp that are loaded at once.
  template <int kFirst = 0>
  __device__ __forceinline__ void load(typename Traits::Shared& shared, const uint16* q, int64 row_stride, int queries,
                                       int run, const RefineParams& p) {
    constexpr int kAtOnce = Traits::kTilesAtOnce;
    const uint32 tile = shared_address(shared.rows);
    const int chunk = threadIdx.x % Traits::kChunks, head_dim = p.geometry.head_dim;
#pragma unroll 1
    for (int slot = threadIdx.x / Traits::kChunks; slot < Traits::kPooledAtOnce;
         slot += Traits::kThreads / Traits::kChunks) {
      const int rep = kAtOnce == kTiles ? slot : (slot / 16 * kTiles + kFirst) * 16 + slot % 16;
      int begin = rep * run;
      if (begin >= queries) begin = 0;
      const int end = min(begin + run, queries);
      float total[8] = {};
      for (int r = begin; r < end; ++r) {
        const uint16* row = q + r * row_stride;
        const uint4 x = p.aligned && chunk * 8 + 8 <= head_dim ? *reinterpret_cast<const uint4*>(row + chunk * 8)
                                                                : load_unaligned(row, chunk * 8, head_dim);
        const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          total[2 * i] += Element::low(pairs[i]);
          total[2 * i + 1] += Element::high(pairs[i]);
        }
      }
      const float factor = p.sign / (end - begin);
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = Element::pack(total[2 * i] * factor, total[2 * i + 1] * factor);
      store_shared_16(row_chunk<Traits>(tile, slot, chunk), make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
    __syncthreads();
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16 * kAtOnce;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
#pragma unroll
      for (int c = 0; c < Traits::kHeadDim / 16; ++c)
        ldmatrix_x4(a[kFirst + i][c], row_chunk<Traits>(tile, warp_row + i * 16 + lane % 16, c * 2 + lane / 16));
    __syncthreads();  // the rows' memory is free
    if constexpr (kFirst + kAtOnce < kTiles) load<kFirst + kAtOnce>(shared, q, row_stride, queries, run, p);
  }

  // s[pooled queries, 16 keys from 8 * j on] += dot products with the keys of a step
  __device__ __forceinline__ void products(float (&s)[kTiles][2][4], uint32 keys, int j) const {
    const int lane = threadIdx.x % 32;
    const uint32 of_lane = row_chunk<Traits>(keys, j * 8 + lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      uint32 b[4];
      ldmatrix_x4(b, of_lane ^ c * 32);  // chunk 2 * c further
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
        Element::mma(s[i][0], a[i][c], b[0], b[1]);
        Element::mma(s[i][1], a[i][c], b[2], b[3]);
      }
    }
  }
};

// Walks `steps` steps of keys through a ring in shared memory: position(i) is key i, or -1; use(step, address).
template <class Traits, class Position, class Use>
__device__ __forceinline__ void walk_keys(typename Traits::Shared& shared, const uint16* k, int64 row_stride,
                                          PagedRows pages, int head_dim, bool aligned, int steps, Position position,
                                          Use use) {
  constexpr int kStages = Traits::kStages, kRows = kRefineStep * Traits::kChunks / Traits::kThreads;
  const uint32 tile = shared_address(shared.rows);
  const int chunk = threadIdx.x % Traits::kChunks;
  const auto address = [&](int step) { return tile + step % kStages * (kRefineStep * Traits::kHeadDim * 2); };
  const auto load = [&](int step) {
    if (step < steps) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int row = threadIdx.x / Traits::kChunks + i * (Traits::kThreads / Traits::kChunks);
        const int key = position(step * kRefineStep + row);
        const uint16* source = k + max(key, 0) * row_stride;
        if constexpr (Traits::kPaged) source = k + pages.offset(max(key, 0));
        const uint32 target = row_chunk<Traits>(address(step), row, chunk);
        if (aligned) {
          const bool present = key >= 0 && chunk * 8 < head_dim;
          cp_async_16_or_zeros(target, present ? source + chunk * 8 : source, present);
        } else {
          store_shared_16(target, key < 0 ? make_uint4(0, 0, 0, 0) : load_unaligned(source, chunk * 8, head_dim));
        }
      }
    }
    cp_async_commit();
  };
#pragma unroll
  for (int step = 0; step < kStages - 1; ++step) load(step);
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // the step has come, and everybody is done with the one before it
    load(step + kStages - 1);
    use(step, address(step));
  }
  cp_async_wait<0>();
  __syncthreads();
}

// x[j][e]: of key 8 * j + lane % 4 * 2 + e of 32, spread over the 8 lanes of equal lane % 4. Every lane gets one key's
// total, that of joined_key().
template <class Join>
__device__ __forceinline__ float join_rows(const float (&x)[4][2], Join join) {
  const uint32 lane = threadIdx.x % 32;
  float half[2][2], quarter[2];
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const float mine = lane & 16 ? x[j + 2][e] : x[j][e], theirs = lane & 16 ? x[j][e] : x[j + 2][e];
      half[j][e] = join(mine, __shfl_xor_sync(kFullWarp, theirs, 16));
    }
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float mine = lane & 8 ? half[1][e] : half[0][e], theirs = lane & 8 ? half[0][e] : half[1][e];
    quarter[e] = join(mine, __shfl_xor_sync(kFullWarp, theirs, 8));
  }
  const float mine = lane & 4 ? quarter[1] : quarter[0], theirs = lane & 4 ? quarter[0] : quarter[1];
  return join(mine, __shfl_xor_sync(kFullWarp, theirs, 4));
}

__device__ __forceinline__ int joined_key() {
  const int lane = threadIdx.x % 32;
  return lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2;
}

// Online log-sum-exp of a warp's pooled queries, of which a thread has a part of two: lane / 4 and lane / 4 + 8.
struct Mass {
  float m[2] = {-infinity(), -infinity()}, l[2] = {};  // in log2 units
  // Dot products s of which visible(h, t, e) count, each for `weight` keys.
  template <class Visible>
  __device__ __forceinline__ void add(const float (&s)[2][4], float scale_log2, float weight, Visible visible) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float x[4], top = m[h];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float score = s[j / 2][2 * h + j % 2] * scale_log2;
        x[j] = fabsf(score) < infinity() && visible(h, j / 2, j % 2) ? score : -infinity();
        top = fmaxf(top, x[j]);
      }
      const float base = top == -infinity() ? 0.f : top;
      float sum = 0.f;
#pragma unroll
      for (int j = 0; j < 4; ++j) sum += exp2_approx(x[j] - base);
      l[h] = l[h] * exp2_approx(m[h] - base) + sum * weight;
      m[h] = top;
    }
  }
  // The log2 of the mass of a pooled query, the same in its four lanes; 0 if nothing was visible.
  __device__ __forceinline__ float log2(int h) const {
    float top = m[h];
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1));
    top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2));
    const float base = top == -infinity() ? 0.f : top;
    float sum = l[h] * exp2_approx(m[h] - base);
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    return sum > 0.f ? base + __log2f(sum) : 0.f;
  }
};

// The sum of the block's values, the same in every thread and on every run.
template <int kWarps>
__device__ __forceinline__ float sum_of_block(float x, float (&sums)[kWarps]) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kFullWarp, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0.f;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) total += sums[w];
  return total;
}

// Block: a head and a probed segment.
template <class Traits>
__device__ __forceinline__ void probe(const RefineParams& p, typename Traits::Shared& shared) {
  constexpr int kOwnStep = spec::kProbeOwnStep;
  const Geometry& g = p.geometry;
  const int head = blockIdx.x / p.probes, n = p.first_ordered + blockIdx.x % p.probes * spec::kProbeEvery;
  const Sample sample(g, n);
  float& deficit = p.deficits[blockIdx.x];
  if (sample.count == 0) {
    if (threadIdx.x == 0) deficit = 0.f;
    return;
  }
  const int batch = head / p.heads, queries = g.query_count(n), run = p.probe_run;
  const uint16* q = p.q.at(batch, head % p.heads) + g.query_begin(n) * p.q.row;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, head % p.heads / (p.heads / p.kv_heads));
  const PagedRows pages{p.k, p.pages, batch, 0};
  PooledQueries<Traits> pooled;
  pooled.load(shared, q, p.q.row, queries, run, p);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, present = (queries + run - 1) / run;

  // The mass of each pooled query: of the sample, and of the keys that pass 1 reads.
  Mass mass;
  const auto sampled = [&](int i) { return sample.position(i); };
  const int steps = (sample.count + kRefineStep - 1) / kRefineStep;
  walk_keys<Traits>(shared, k, p.k.row, pages, g.head_dim, p.aligned, steps, sampled, [&](int step, uint32 keys) {
#pragma unroll
    for (int j = 0; j < kRefineStep / 8; j += 2) {
      float s[1][2][4] = {};
      pooled.products(s, keys, j);
      mass.add(s[0], p.scale_log2, sample.weight(), [&](int, int t, int e) {
        return step * kRefineStep + (j + t) * 8 + lane % 4 * 2 + e < sample.count;
      });
    }
  });
  const int own = (sample.dense_keys + kOwnStep - 1) / kOwnStep;
  const auto own_key = [&](int i) { return i < own ? sample.dense_begin + i * kOwnStep : -1; };
  walk_keys<Traits>(shared, k, p.k.row, pages, g.head_dim, p.aligned, (own + kRefineStep - 1) / kRefineStep, own_key,
                    [&](int step, uint32 keys) {
#pragma unroll
    for (int j = 0; j < kRefineStep / 8; j += 2) {
      float s[1][2][4] = {};
      pooled.products(s, keys, j);
      mass.add(s[0], p.scale_log2, kOwnStep, [&](int h, int t, int e) {
        const int i = step * kRefineStep + (j + t) * 8 + lane % 4 * 2 + e;
        const int last = min((warp * 16 + h * 8 + lane / 4 + 1) * run, queries) - 1;  // query of the run
        return i < own && (!g.is_causal || own_key(i) <= g.query_begin(n) + last + g.offset());
      });
    }
  });
  const float norm[2] = {mass.log2(0), mass.log2(1)};

  // Of each sampled key: the mass that all pooled queries give it, and the sum of their scores.
  const auto add = [](float a, float b) { return a + b; };
  const auto gather_step = [&](int step) {  // one step's parts, when everybody has written them
    if (threadIdx.x >= 2 * kRefineStep) return;
    const int key = threadIdx.x % kRefineStep, what = threadIdx.x / kRefineStep;
    float total = 0.f;
#pragma unroll
    for (int w = 0; w < Traits::kWarps; ++w) total += shared.part[step % 2][what][w][key];
    (what ? shared.mean : shared.mass)[step * kRefineStep + key] = total;
  };
  walk_keys<Traits>(shared, k, p.k.row, pages, g.head_dim, p.aligned, steps, sampled, [&](int step, uint32 keys) {
    if (step > 0) gather_step(step - 1);
#pragma unroll
    for (int first = 0; first < kRefineStep / 8; first += 4) {
      float weights[4][2], scores[4][2];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        float s[1][2][4] = {};
        pooled.products(s, keys, first + j);
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            weights[j + t][e] = scores[j + t][e] = 0.f;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              if (warp * 16 + h * 8 + lane / 4 >= present) continue;
              const float x = s[0][t][2 * h + e], score = x * p.scale_log2;
              scores[j + t][e] += x;
              if (fabsf(score) < infinity()) weights[j + t][e] += exp2_approx(score - norm[h]);
            }
          }
      }
      shared.part[step % 2][0][warp][first * 8 + joined_key()] = join_rows(weights, add);
      shared.part[step % 2][1][warp][first * 8 + joined_key()] = join_rows(scores, add);
    }
  });
  gather_step(steps - 1);
  __syncthreads();

  // What the best by mass hold, less what the best by mean score hold.
  const int best = max(1, sample.count / spec::kProbeTop);
  int slots = 32;
  while (slots < sample.count) slots *= 2;
  float held[2];
#pragma unroll 1
  for (int what = 0; what < 2; ++what) {
    const float* by = what ? shared.mean : shared.mass;
    for (int i = threadIdx.x; i < slots; i += Traits::kThreads)
      shared.slots[i] = i < sample.count ? static_cast<uint64>(~sortable(by[i])) << 32 | i : ~0ull;
    __syncthreads();
    bitonic_sort(shared.slots, slots);
    float sum = 0.f;
    for (int i = threadIdx.x; i < best; i += Traits::kThreads) sum += shared.mass[static_cast<uint32>(shared.slots[i])];
    held[what] = sum_of_block(sum, shared.sums);
  }
  if (threadIdx.x == 0) deficit = (held[0] - held[1]) * sample.weight() / present;
}

// Whether a segment is refined: its head's latest probes before it say so, or there is none.
__device__ __forceinline__ bool is_refined(const RefineParams& p, int head, int n) {
  if (n < p.first_ordered) return false;
  const int before = (n - p.first_ordered + spec::kProbeEvery - 1) / spec::kProbeEvery;
  const int count = min(before, spec::kProbeWindow);
  float sum = 0.f;
  for (int i = before - count; i < before; ++i)
    sum = __fadd_rn(sum, p.deficits[static_cast<int64>(head) * p.probes + i]);
  // Of 2^-20: as an integer is all that a kernel's constants are.
  return count == 0 || sum > __fmul_rn(static_cast<float>(count), spec::kProbeDeficit * 0x1p-20f);
}

// Block: a head and a segment.
template <class Traits>
__device__ __forceinline__ void refined_norms(const RefineParams& p, typename Traits::Shared& shared) {
  const Geometry& g = p.geometry;
  const int head = blockIdx.x / g.segments(), n = blockIdx.x % g.segments();
  const Sample sample(g, n);
  const bool refined = sample.count > 0 && is_refined(p, head, n);
  if (threadIdx.x == 0) p.refined[blockIdx.x] = refined;
  if (!refined) return;
  const int batch = head / p.heads, queries = g.query_count(n);
  const uint16* q = p.q.at(batch, head % p.heads) + g.query_begin(n) * p.q.row;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, head % p.heads / (p.heads / p.kv_heads));
  const PagedRows pages{p.k, p.pages, batch, 0};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  PooledQueries<Traits> pooled;
  pooled.load(shared, q, p.q.row, queries, p.run, p);
  Mass mass[Traits::kTiles];
  walk_keys<Traits>(shared, k, p.k.row, pages, g.head_dim, p.aligned, (sample.count + kRefineStep - 1) / kRefineStep,
                    [&](int i) { return sample.position(i); }, [&](int step, uint32 keys) {
#pragma unroll
    for (int j = 0; j < kRefineStep / 8; j += 2) {
      float s[Traits::kTiles][2][4] = {};
      pooled.products(s, keys, j);
#pragma unroll
      for (int i = 0; i < Traits::kTiles; ++i)
        mass[i].add(s[i], p.scale_log2, 1.f, [&](int, int t, int e) {
          return step * kRefineStep + (j + t) * 8 + lane % 4 * 2 + e < sample.count;
        });
    }
  });
#pragma unroll
  for (int i = 0; i < Traits::kTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = (warp * Traits::kTiles + i) * 16 + h * 8 + lane / 4;
      const float norm = mass[i].log2(h) / p.scale_log2;
      if (lane % 4 == 0 && r < p.pooled_queries)
        p.norms[static_cast<int64>(blockIdx.x) * p.pooled_queries + r] = norm;
    }
}

// Block: a row of the chunk and kRefineBlockSteps steps of keys.
template <class Traits>
__device__ __forceinline__ void refined_scores(const RefineParams& p, typename Traits::Shared& shared) {
  const Geometry& g = p.geometry;
  uint32 block = blockIdx.x;
  const int key_block = block % p.key_blocks;
  block /= p.key_blocks;
  const int n = p.chunk.first_segment + p.chunk.segments - 1 - static_cast<int>(block / p.chunk.heads);
  const int head = p.chunk.first_head + static_cast<int>(block % p.chunk.heads);
  const int64 pair = static_cast<int64>(head) * g.segments() + n;
  const int first_key = key_block * kRefineBlockSteps * kRefineStep;
  const int end = g.is_causal ? g.candidates(n) : g.seqlen_k;
  const int keys = min(kRefineBlockSteps * kRefineStep, end - first_key);
  if (keys <= 0 || !p.refined[pair]) return;

  const int batch = head / p.heads, queries = g.query_count(n);
  const uint16* q = p.q.at(batch, head % p.heads) + g.query_begin(n) * p.q.row;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, head % p.heads / (p.heads / p.kv_heads));
  if (!Traits::kPaged) k += first_key * p.k.row;
  const PagedRows pages{p.k, p.pages, batch, first_key};
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int steps = (keys + kRefineStep - 1) / kRefineStep;
  if (threadIdx.x == 0) shared.scores = p.scores + p.chunk.place(head, n) + first_key;
  PooledQueries<Traits> pooled;
  pooled.load(shared, q, p.q.row, queries, p.run, p);
  float norm[Traits::kTiles][2];
#pragma unroll
  for (int i = 0; i < Traits::kTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      int r = (warp * Traits::kTiles + i) * 16 + h * 8 + lane / 4;
      if (r * p.run >= queries) r = 0;
      norm[i][h] = p.norms[pair * p.pooled_queries + r];
    }
  const auto write_step = [&](int step) {  // when everybody has written its part of it
    const int i = step * kRefineStep + static_cast<int>(threadIdx.x);
    if (threadIdx.x >= kRefineStep || i >= keys) return;
    float best = shared.part[step % 2][0][0][threadIdx.x];
#pragma unroll
    for (int w = 1; w < Traits::kWarps; ++w) best = larger_or_nan(best, shared.part[step % 2][0][w][threadIdx.x]);
    best *= p.scale_log2;
    shared.scores[i] = static_cast<uint16>(Float16::pack(best, 0.f));
  };
  walk_keys<Traits>(shared, k, p.k.row, pages, g.head_dim, p.aligned, steps, [&](int i) { return i < keys ? i : -1; },
                    [&](int step, uint32 address) {
    if (step > 0) write_step(step - 1);
#pragma unroll
    for (int first = 0; first < kRefineStep / 8; first += 4) {
      float best[4][2];
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        float s[Traits::kTiles][2][4];
#pragma unroll
        for (int i = 0; i < Traits::kTiles; ++i)
#pragma unroll
          for (int t = 0; t < 2; ++t)
#pragma unroll
            for (int e = 0; e < 4; ++e) s[i][t][e] = -norm[i][e / 2];
        pooled.products(s, address, first + j);
#pragma unroll
        for (int t = 0; t < 2; ++t)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            best[j + t][e] = larger_or_nan(s[0][t][e], s[0][t][2 + e]);
#pragma unroll
            for (int i = 1; i < Traits::kTiles; ++i)
              best[j + t][e] = larger_or_nan(best[j + t][e], larger_or_nan(s[i][t][e], s[i][t][2 + e]));
          }
      }
      shared.part[step % 2][0][warp][first * 8 + joined_key()] = join_rows(best, larger_or_nan);
    }
  });
  write_step(steps - 1);
}

}  // namespace s2o
