// refined_scores of rank="auto" on Hopper (refine.cu has the portable one): the largest score of a candidate over the
// pooled queries of a refined segment, each less its norm; by wgmma.
//
// A block of one warpgroup keeps a row's pooled queries in shared memory and walks keys, 64 at a time: keys are the
// rows of the product, so that a maximum over pooled queries stays within four lanes. Two blocks on a multiprocessor
// take turns by themselves: while one looks for maxima, the other multiplies. Blocks share the time of all refined
// rows evenly, whichever rows these are: nobody on the host knows.
#include "selection/refine_params.cuh"
#include "selection/sortable.cuh"
#include "sm90/wgmma_tile.cuh"

namespace s2o {

constexpr int kRefinePooled = 256, kRefineKeys = 64, kRefineThreads = 128;
constexpr int kRowSteps = 16;  // reading the queries of a row takes as long as so many steps of keys

template <class Element_, int kHeadDim_, bool kPaged_>
struct RefinedScoresTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kStages = 2;
  static constexpr bool kPaged = kPaged_;  // k is a paged cache

  struct Shared {
    uint16 pooled[kRefinePooled * kHeadDim];
    uint16 keys[kStages][kRefineKeys * kHeadDim];
    float norms[kRefinePooled];
    int of_warp[4];
    int row, at;  // where the block begins, and the next refined row
  };
};

// Steps of keys that a row of the chunk takes: 0 if it is not refined.
__device__ __forceinline__ int refined_steps(const RefineParams& p, int row) {
  const int n = p.chunk.first_segment + row % p.chunk.segments, head = p.chunk.first_head + row / p.chunk.segments;
  const int end = p.geometry.is_causal ? p.geometry.candidates(n) : p.geometry.seqlen_k;
  return p.refined[static_cast<int64>(head) * p.geometry.segments() + n] ? (end + kRefineKeys - 1) / kRefineKeys : 0;
}

// The time that a row takes, in steps: its queries come first.
__device__ __forceinline__ int refined_time(const RefineParams& p, int row) {
  const int steps = refined_steps(p, row);
  return steps > 0 ? kRowSteps + steps : 0;
}

// Where this block's even share of the time of all refined rows begins: shared.row, shared.at. Returns how much it
// has.
template <class Shared>
__device__ __forceinline__ int find_share(const RefineParams& p, Shared& shared) {
  const int rows = p.chunk.heads * p.chunk.segments, each = (rows + kRefineThreads - 1) / kRefineThreads;
  const int begin = min(static_cast<int>(threadIdx.x) * each, rows), end = min(begin + each, rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int mine = 0;
#pragma unroll 4
  for (int row = begin; row < end; ++row) mine += refined_time(p, row);
  int sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(kFullWarp, sum, step);
    if (lane >= step) sum += x;
  }
  if (lane == 31) shared.of_warp[warp] = sum;
  if (threadIdx.x == 0) shared.row = -1;
  __syncthreads();
  int before = sum - mine, total = 0;
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    if (w < warp) before += shared.of_warp[w];
    total += shared.of_warp[w];
  }
  const int share = max(2 * kRowSteps, (total + static_cast<int>(gridDim.x) - 1) / static_cast<int>(gridDim.x));
  int first = static_cast<int>(blockIdx.x) * share - before;
  if (first >= 0 && first < mine) {
    int row = begin;
    for (int time = refined_time(p, row); first >= time; time = refined_time(p, ++row)) first -= time;
    shared.row = row;
    shared.at = first;
  }
  __syncthreads();
  return min(share, total - static_cast<int>(blockIdx.x) * share);
}

// The next refined row after `row`; there is one.
template <class Shared>
__device__ __forceinline__ int next_refined_row(const RefineParams& p, Shared& shared, int row) {
  const int rows = p.chunk.heads * p.chunk.segments;
  __syncthreads();
  if (threadIdx.x == 0) shared.row = rows;
  __syncthreads();
  for (int first = row + 1; first < rows; first += kRefineThreads) {
    const int mine = first + static_cast<int>(threadIdx.x);
    const bool found = mine < rows && refined_steps(p, mine) > 0;
    if (found) atomicMin(&shared.row, mine);
    if (__syncthreads_or(found)) break;
  }
  return shared.row;
}

// Means of runs of queries to shared memory; a pooled query whose run is empty repeats the first of all, which
// changes no maximum.
template <class Traits>
__device__ __forceinline__ void load_pooled_queries(const RefineParams& p, typename Traits::Shared& shared,
                                                     const uint16* q, int queries, const float* norms) {
  using Element = typename Traits::Element;
  constexpr int kSlots = kRefineThreads / Traits::kChunks;  // that the block takes at a time
  constexpr int kAtATime = 4, kRows = 4;                  // reads of so many slots and rows under way in a thread
  const uint32 tile = shared_address(shared.pooled);
  const int chunk = threadIdx.x % Traits::kChunks;
  const bool inside = chunk * 8 < p.geometry.head_dim;
#pragma unroll 1
  for (int first = threadIdx.x / Traits::kChunks; first < kRefinePooled; first += kSlots * kAtATime) {
    float total[kAtATime][8] = {};
    for (int base = 0; base < p.run; base += kRows) {
      uint4 x[kAtATime][kRows];
#pragma unroll
      for (int s = 0; s < kAtATime; ++s)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const int slot_begin = (first + s * kSlots) * p.run, begin = slot_begin < queries ? slot_begin : 0;
          const int row = begin + base + r;
          x[s][r] = inside && base + r < p.run && row < queries
                        ? *reinterpret_cast<const uint4*>(q + row * p.q.row + chunk * 8)
                        : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
      for (int s = 0; s < kAtATime; ++s)
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          const uint32 pairs[4] = {x[s][r].x, x[s][r].y, x[s][r].z, x[s][r].w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[s][2 * i] += Element::low(pairs[i]);
            total[s][2 * i + 1] += Element::high(pairs[i]);
          }
        }
    }
#pragma unroll
    for (int s = 0; s < kAtATime; ++s) {
      const int slot = first + s * kSlots, begin = slot * p.run < queries ? slot * p.run : 0;
      const float factor = p.sign / min(p.run, queries - begin);
      uint32 packed[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) packed[i] = Element::pack(total[s][2 * i] * factor, total[s][2 * i + 1] * factor);
      store_shared_16(atom_chunk<kRefinePooled>(tile, slot, chunk),
                      make_uint4(packed[0], packed[1], packed[2], packed[3]));
    }
  }
  for (int r = threadIdx.x; r < kRefinePooled; r += kRefineThreads)
    shared.norms[r] = norms[r * p.run < queries ? r : 0];
}

// Steps [step, end) of a row.
template <class Traits>
__device__ __forceinline__ void score_row(const RefineParams& p, typename Traits::Shared& shared, int row, int step,
                                          int end) {
  using Element = typename Traits::Element;
  constexpr int kSlots = kRefineThreads / Traits::kChunks;  // rows copied at a time
  constexpr int kPasses = kRefineKeys / kSlots;
  const Geometry& g = p.geometry;
  const int n = p.chunk.first_segment + row % p.chunk.segments, head = p.chunk.first_head + row / p.chunk.segments;
  const int batch = head / p.heads;
  const int keys = g.is_causal ? g.candidates(n) : g.seqlen_k;
  const uint16* q = p.q.at(batch, head % p.heads) + g.query_begin(n) * p.q.row;
  const uint16* k = head_rows<Traits::kPaged>(p.k, batch, head % p.heads / (p.heads / p.kv_heads));
  uint16* scores = p.scores + p.chunk.place(head, n);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = threadIdx.x % Traits::kChunks;

  // Of a paged cache a lane looks up one of its warp's 16 rows of a step, a step ahead: nobody waits for the table.
  static_assert(kPasses * (32 / Traits::kChunks) == 16, "a warp's rows");
  const int* entries = Traits::kPaged ? p.pages.of(batch) : nullptr;
  int page = 0;
  const auto kept_key = [&](int at) {
    const int of_pass = lane % 16 / kPasses, pass = lane % kPasses;
    const int key = at * kRefineKeys + pass * kSlots + warp * (32 / Traits::kChunks) + of_pass;
    return at < end && key < keys ? key : -1;
  };
  const auto look_up = [&](int at) {
    if constexpr (Traits::kPaged) page = p.pages.page(entries, kept_key(at));
  };
  [[maybe_unused]] const RowUnits<Traits::kPaged> units(p.pages, p.k);
  const auto load = [&](int at) {
    if (at < end) {
      const uint32 tile = shared_address(shared.keys[at % Traits::kStages]);
      const uint32 kept = Traits::kPaged ? units(p.pages.slot_in(page, kept_key(at))) : 0;
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int r = threadIdx.x / Traits::kChunks + i * kSlots, key = at * kRefineKeys + r;
        const bool present = key < keys && chunk * 8 < g.head_dim;
        const uint16* source = k + key * p.k.row;
        if constexpr (Traits::kPaged)
          source = k + __shfl_sync(kFullWarp, kept, lane / Traits::kChunks * kPasses + i) * 8ull;
        cp_async_16_or_zeros(atom_chunk<kRefineKeys>(tile, r, chunk), present ? source + chunk * 8 : k, present);
      }
      look_up(at + 1);
    }
    cp_async_commit();
  };
  look_up(step);
  load(step);
  const int64 pair = static_cast<int64>(head) * g.segments() + n;
  load_pooled_queries<Traits>(p, shared, q, g.query_count(n), p.norms + pair * p.pooled_queries);

#pragma unroll 1
  for (; step < end; ++step) {
    cp_async_wait<0>();
    fence_for_wgmma();
    __syncthreads();  // everybody's copies are there, and nobody multiplies with the other tile any more
    float d[2][64];   // [keys, pooled queries] of this thread
    const uint32 a = tile_descriptor(shared_address(shared.keys[step % Traits::kStages]), 0);
    const uint32 b = tile_descriptor(shared_address(shared.pooled), 0);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      const uint32 at = descriptor_at(a, atom_columns<kRefineKeys>(c));
#pragma unroll
      for (int half = 0; half < 2; ++half)
        Wgmma<Element>::ss(d[half], at, descriptor_at(b, atom_columns<kRefinePooled>(c) + half * (128 * 128)), c > 0);
    }
    wgmma_commit();
    load(step + 1);
    wgmma_wait<0>();
    float best[2][2];  // of keys lane / 4 and lane / 4 + 8 of the warp's 16, over even and odd pooled queries
#pragma unroll
    for (int h = 0; h < 2; ++h) best[h][0] = best[h][1] = -infinity();
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 norm = *reinterpret_cast<const float2*>(shared.norms + half * 128 + j * 8 + lane % 4 * 2);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          best[h][0] = larger_or_nan(best[h][0], d[half][j * 4 + 2 * h] - norm.x);
          best[h][1] = larger_or_nan(best[h][1], d[half][j * 4 + 2 * h + 1] - norm.y);
        }
      }
    float of_key[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      of_key[h] = larger_or_nan(best[h][0], best[h][1]);
      of_key[h] = larger_or_nan(of_key[h], __shfl_xor_sync(kFullWarp, of_key[h], 1));
      of_key[h] = larger_or_nan(of_key[h], __shfl_xor_sync(kFullWarp, of_key[h], 2));
    }
    const int h = lane % 4, key = step * kRefineKeys + warp * 16 + h * 8 + lane / 4;
    if (h < 2 && key < keys) {
      const float x = (h ? of_key[1] : of_key[0]) * p.scale_log2;
      scores[key] = static_cast<uint16>(Float16::pack(x, 0.f));
    }
  }
  cp_async_wait<0>();
}

template <class Traits>
__device__ __forceinline__ void refined_scores_sm90(const RefineParams& p, typename Traits::Shared& shared) {
  int left = find_share(p, shared);
  if (left <= 0) return;
  int row = shared.row, at = shared.at;
  while (true) {
    const int end = min(refined_time(p, row), at + left), first = max(at - kRowSteps, 0), last = end - kRowSteps;
    if (first < last) score_row<Traits>(p, shared, row, first, last);
    left -= end - at;
    if (left == 0) return;
    row = next_refined_row(p, shared, row);  // everybody is done with the pooled queries
    at = 0;
  }
}

}  // namespace s2o
