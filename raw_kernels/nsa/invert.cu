// The tokens of each block of keys, from the blocks of each token: a counting sort. What several threads add up does not
// depend on their order, and places come from those sums.
//
//   chosen [KV rows, seqlen_q, top]
//   -> nsa_count: counts [KV rows, chunks, blocks], the tokens of a chunk that chose each block
//      nsa_totals: counts, those in the chunks before; begins, of each block how many in all
//      nsa_places: begins, items, item_counts
//      nsa_scatter: entries [KV rows, tokens * slots], of each block in turn, by token
#include "nsa/params.cuh"

namespace s2o {

constexpr int kAhead = 32;  // counts that a thread has under way
constexpr int kChunkTokens = 512;
constexpr int kInvertThreads = 512, kTotalThreads = 128, kPlaceThreads = 1024;

// A chunk's tokens of the round.
struct ChunkTokens {
  int kv_row, chunk, first, count;
  __device__ __forceinline__ explicit ChunkTokens(const NsaParams& p)
      : kv_row(blockIdx.x / p.chunks), chunk(blockIdx.x % p.chunks), first(chunk * kChunkTokens) {
    count = min(kChunkTokens, p.tokens - first);
  }
};

struct CountShared {
  int counts[32];  // [blocks]
};

// Block: a chunk of tokens of a KV row.
__device__ __forceinline__ void nsa_count(const NsaParams& p, CountShared& shared) {
  const ChunkTokens tokens(p);
  for (int c = threadIdx.x; c < p.blocks; c += kInvertThreads) shared.counts[c] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < tokens.count * p.slots; i += kInvertThreads) {
    const int token = i / p.slots;
    const int block = p.block_of(tokens.kv_row, p.first_token + tokens.first + token, i - token * p.slots);
    if (block >= 0) atomicAdd(&shared.counts[block], 1);
  }
  __syncthreads();
  int* counts = p.counts + static_cast<int64>(blockIdx.x) * p.blocks;
  for (int c = threadIdx.x; c < p.blocks; c += kInvertThreads) counts[c] = shared.counts[c];
}

// Block: some blocks of keys of a KV row, p.tiles of which have them all.
__device__ __forceinline__ void nsa_totals(const NsaParams& p) {
  const int kv_row = blockIdx.x / p.tiles, c = (blockIdx.x - kv_row * p.tiles) * kTotalThreads + threadIdx.x;
  if (c >= p.blocks) return;
  int* counts = p.counts + (static_cast<int64>(kv_row) * p.chunks * p.blocks + c);
  int total = 0;
  for (int chunk = 0; chunk < p.chunks; chunk += kAhead) {
    int here[kAhead];  // in flight together
#pragma unroll
    for (int x = 0; x < kAhead; ++x)
      here[x] = chunk + x < p.chunks ? counts[static_cast<int64>(chunk + x) * p.blocks] : 0;
#pragma unroll
    for (int x = 0; x < kAhead; ++x) {
      if (chunk + x < p.chunks) counts[static_cast<int64>(chunk + x) * p.blocks] = total;
      total += here[x];
    }
  }
  p.begins[static_cast<int64>(kv_row) * p.blocks + c] = total;
}

struct PlacesShared {
  int sums[2][32];  // of a warp: entries and items
};

// Block: a KV row.
__device__ __forceinline__ void nsa_places(const NsaParams& p, PlacesShared& shared) {
  const int kv_row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int* begins = p.begins + static_cast<int64>(kv_row) * p.blocks;
  BlockItem* items = p.items + static_cast<int64>(kv_row) * p.most_items;
  int entries = 0, made = 0;  // of the blocks before
  for (int first = 0; first < p.blocks; first += kPlaceThreads) {
    const int c = first + threadIdx.x, total = c < p.blocks ? begins[c] : 0;
    const int own_items = (total + p.item_tokens - 1) / p.item_tokens;
    int sum[2] = {total, own_items};  // up to this block's
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kFullWarp, sum[which], step);
        if (lane >= step) sum[which] += other;
      }
      if (lane == 31) shared.sums[which][warp] = sum[which];
    }
    __syncthreads();
    int of_all[2] = {0, 0};
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll 4
      for (int w = 0; w < kPlaceThreads / 32; ++w) {
        const int of_warp = shared.sums[which][w];
        if (w < warp) sum[which] += of_warp;
        of_all[which] += of_warp;
      }
    const int begin = entries + sum[0] - total, first_item = made + sum[1] - own_items;
    if (c < p.blocks) {
      begins[c] = begin;
      const int each = own_items ? (total + own_items - 1) / own_items : 0;  // of equal sizes
      for (int i = 0; i < own_items; ++i)
        items[first_item + i] = {c, begin + i * each, min(each, total - i * each), kv_row};
    }
    entries += of_all[0];
    made += of_all[1];
    __syncthreads();
  }
  if (threadIdx.x == 0) p.item_counts[kv_row] = made;
}

struct ScatterShared {
  uint32 chosen_by[32];  // [blocks]: which of 32 tokens chose a block; and behind these:
                         // [blocks]: where the next of its entries goes
};

// Block: a chunk of tokens of a KV row, 32 tokens at a time.
__device__ __forceinline__ void nsa_scatter(const NsaParams& p, ScatterShared& shared) {
  const ChunkTokens tokens(p);
  uint32* chosen_by = shared.chosen_by;
  int* next = reinterpret_cast<int*>(chosen_by + p.blocks);
  const int* begins = p.begins + static_cast<int64>(tokens.kv_row) * p.blocks;
  const int* counts = p.counts + static_cast<int64>(blockIdx.x) * p.blocks;
  for (int c = threadIdx.x; c < p.blocks; c += kInvertThreads) {
    chosen_by[c] = 0;
    next[c] = begins[c] + counts[c];
  }
  int* entries = p.entries + static_cast<int64>(tokens.kv_row) * p.tokens * p.slots;
  // Slots are no more than 32: of 32 tokens two of a thread.
  const auto load = [&](int first, int x) {
    const int i = threadIdx.x + x * kInvertThreads, token = i / p.slots;
    if (token >= 32 || first + token >= tokens.count) return -1;
    return p.block_of(tokens.kv_row, p.first_token + tokens.first + first + token, i - token * p.slots);
  };
  int later[2] = {load(0, 0), load(0, 1)};
  for (int first = 0; first < tokens.count; first += 32) {
    int block[2], rank[2], all[2];
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      block[x] = later[x];
      later[x] = load(first + 32, x);  // under way while these are placed
      if (block[x] >= 0) atomicOr(&chosen_by[block[x]], 1u << (threadIdx.x + x * kInvertThreads) / p.slots);
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 2; ++x) {
      if (block[x] < 0) continue;
      const int i = threadIdx.x + x * kInvertThreads, token = i / p.slots;
      const uint32 who = chosen_by[block[x]];
      rank[x] = __popc(who & ((1u << token) - 1));
      all[x] = __popc(who);
      entries[next[block[x]] + rank[x]] = (tokens.first + first + token) << kSlotBits | (i - token * p.slots);
    }
    __syncthreads();
#pragma unroll
    for (int x = 0; x < 2; ++x)
      if (block[x] >= 0 && rank[x] == 0) {
        next[block[x]] += all[x];
        chosen_by[block[x]] = 0;
      }
  }
}

}  // namespace s2o
