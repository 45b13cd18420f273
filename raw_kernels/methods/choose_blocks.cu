// Which columns each row chooses by a softmax over its scores, as ascending lists.
//
//   choose_blocks: rows of up to 32 * kOfLane columns, a warp each, with their weights in registers
//   choose_long: longer rows, a block each, with their weights in shared memory
//
//   w = softmax of a row's visible scores. reach: the shortest prefix of the descending order of w whose sum reaches
//   threshold * sum(w); within: the longest whose sum does not exceed it, one entry at least; counted: so many of the
//   largest as the threshold says, but none that is 0 beside the largest. Equal weights count by column. A row with a
//   score that is NaN or +infinity chooses all, and so does every row at a threshold of 1, or of as many columns as it
//   sees, whether its weights have underflowed to 0 or not.
//
// No row is sorted: the weight at which the sum crosses is found by bisection of its bits, as sums are added up in one
// order on every run and do not fall when entries come in.
#include "methods/block_grid.cuh"
#include "methods/block_reduction.cuh"

namespace s2o {

constexpr int kMostHeads = 256;
constexpr int kChoiceThreads = 128, kChoiceWarps = kChoiceThreads / 32;

struct ChooseBlocksParams {
  const float* scores;        // [heads of the round, rows, pitch], in log2 units
  const float* q_similarity;  // [batch * heads, rows]: a row below theta chooses all columns; null: none does
  const float* k_similarity;  // [batch * heads / shared_heads, columns]: a column below theta is chosen by all rows
  const int* first_column;    // [batch * heads / shared_heads]: where key 0 is; null: in column 0
  int* entries;               // [batch * heads, list_entries]
  int64* begins;              // [batch * heads, rows]
  int* keys;                  // likewise
  BlockGrid grid;
  int rows;                   // of all heads of the round
  int first_head;             // of the round
  int shared_heads;           // that have the same mean keys
  int pitch;
  int heads;                  // of a sequence
  int64 list_entries;         // places of the lists of a head
  int within;                 // or reach
  int counted;                // a threshold is a number of columns: each counts 1 towards it, not its weight
  int keep_first;             // the column of key 0 is chosen
  int forced_count;           // it and the columns that are not listed count towards the threshold, before all others
  int thresholds, thetas;     // how many there are: one for all heads, or one for each
  float threshold[kMostHeads];
  float theta[kMostHeads];
};

// A row and what is chosen in it whatever its weight.
struct ChoiceRow {
  int row, head, flat;       // head: of the round; flat: of all
  int visible, listed, kept;
  float threshold, theta;
  const float* scores;
  const float* similar;      // of columns, or null
  bool all;                  // columns

  __device__ __forceinline__ ChoiceRow(const ChooseBlocksParams& p, uint32 index) {
    const BlockGrid& g = p.grid;
    const int rows = g.rows();
    row = rows - 1 - static_cast<int>(index % rows);  // the longest first
    head = index / rows;
    flat = p.first_head + head;
    const int of_sequence = flat < p.heads ? flat : flat % p.heads;
    visible = g.visible(row);
    listed = g.listed(row);
    const int shared_head = flat / p.shared_heads;
    kept = !p.keep_first ? -1 : p.first_column ? p.first_column[shared_head] : 0;
    threshold = p.threshold[p.thresholds > 1 ? of_sequence : 0];
    theta = p.theta[p.thetas > 1 ? of_sequence : 0];
    scores = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch;
    similar = p.k_similarity ? p.k_similarity + static_cast<int64>(shared_head) * g.columns() : nullptr;
    all = threshold >= (p.counted ? static_cast<float>(visible) : 1.f);
    if (p.q_similarity) all |= p.q_similarity[static_cast<int64>(flat) * rows + row] < theta;
  }
  // Of what counts towards the threshold before all others.
  __device__ __forceinline__ bool forced(const ChooseBlocksParams& p, int column) const {
    return p.forced_count && (column >= listed || column == kept);
  }
  __device__ __forceinline__ bool fixed(int column) const { return similar && similar[column] < theta; }
  __device__ __forceinline__ int64 begin(const ChooseBlocksParams& p) const {
    return flat * p.list_entries + p.grid.begin(row);
  }
  // Of one thread.
  __device__ __forceinline__ void write(const ChooseBlocksParams& p, int chosen, bool last) const {
    const BlockGrid& g = p.grid;
    const int64 at = static_cast<int64>(flat) * g.rows() + row;
    p.begins[at] = begin(p);
    p.keys[at] = chosen * g.block_k - (last ? g.columns() * g.block_k - g.seqlen_k : 0);
  }
};

// Weights above `bound` are chosen, and the first `ties` of those that equal it.
struct Bound {
  float bound = 0.f;
  int ties = 0;
  bool every_tie = false;

  // Of `found` weights that equal the bound those that the limit has room for; `above`: the sum of greater ones;
  // `each`: what one of them counts.
  __device__ __forceinline__ void take_ties(bool within, float limit, float above, int found, float each) {
    const float left = (limit - above) / each;
    if (within) {
      ties = min(static_cast<int>(fminf(floorf(left), 1e9f)), found);
      if (above == 0.f) ties = max(ties, 1);
    } else {
      ties = max(1, min(static_cast<int>(fminf(ceilf(left), 1e9f)), found));
    }
    every_tie = ties > 0 && ties == found;
  }
};

// `sum_from(bits)` adds up the weights whose bits are no smaller; `count(x)` how many are x.
template <class SumFrom, class Count>
__device__ __forceinline__ Bound find_bound(bool within, bool counted, float limit, const SumFrom& sum_from,
                                            const Count& count) {
  Bound b;
  uint32 low = 0, high = __float_as_uint(1.f) + 1;  // the sum from `low` on crosses, that from `high` on does not
  float above = 0.f;                                // the latter
#pragma unroll 1
  while (high - low > 1) {
    const uint32 middle = low + (high - low) / 2;
    const float x = sum_from(middle);
    if (within ? x > limit : x >= limit) {
      low = middle;
    } else {
      high = middle;
      above = x;
    }
  }
  b.bound = __uint_as_float(low);
  if (b.bound == 0.f) return b;  // a threshold so near 1 that all of the sum does not cross it
  b.take_ties(within, limit, above, count(b.bound), counted ? 1.f : b.bound);
  return b;
}

struct WarpChoiceShared {
  float found[kChoiceWarps][32];  // weights of a row among which the bound is
};

// x[i * 32] if i * 32 < left, else `other`. No load waits for another one.
__device__ __forceinline__ float load_if(const float* x, int i, int left, float other) {
  float y;
  asm volatile("{\n.reg .pred p;\nsetp.gt.s32 p, %2, %3;\nmov.b32 %0, %4;\n@p ld.global.f32 %0, [%1];\n}"
               : "=&f"(y)
               : "l"(x + i * 32), "r"(left), "r"(i * 32), "f"(other));
  return y;
}
// The same number, of which the compiler knows nothing: it would keep what it has found out about it.
__device__ __forceinline__ int again(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
// Adds a weight up and counts it if it is no smaller than `least`, in three instructions.
__device__ __forceinline__ void add_from(float& sum, int& count, float w, float least) {
  asm("{\n.reg .pred p;\nsetp.ge.ftz.f32 p, %2, %3;\n@p add.ftz.f32 %0, %0, %2;\n@p add.s32 %1, %1, 1;\n}"
      : "+f"(sum), "+r"(count)
      : "f"(w), "f"(least));
}
// Stores a weight whose bits are in [low, low + range) and goes on.
__device__ __forceinline__ void store_between(uint32& to, float w, uint32 low, uint32 range) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b32 x;\nmov.b32 x, %1;\nsub.u32 x, x, %2;\nsetp.lt.u32 p, x, %3;\n"
      "@p st.shared.f32 [%0], %1;\n@p add.u32 %0, %0, 4;\n}"
      : "+r"(to)
      : "f"(w), "r"(low), "r"(range)
      : "memory");
}

// `find_bound` of a warp's weights, which is cheaper by few numbers at the end: weights at `low` and above, below `high`
// are counted, and when there is one for each lane of the warp each lane adds up those that are no smaller than its own.
template <int kOfLane>
__device__ __forceinline__ Bound find_bound_in_registers(const float (&w)[kOfLane], int columns, bool within,
                                                         bool counted, float limit, float total,
                                                         WarpChoiceShared& shared) {
  const int lane = threadIdx.x % 32;
  const auto crosses = [&](float x) { return within ? x > limit : x >= limit; };
  int of_lane;  // weights that the last sum has of the lane
  const auto sum_from = [&](uint32 bits) {
    const float least = __uint_as_float(bits);  // weights are not negative: their bits grow with them
    float part[4] = {};
    of_lane = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) add_from(part[i % 4], of_lane, w[i], least);
    if (counted) return static_cast<float>(__reduce_add_sync(kFullWarp, of_lane));
    return warp_sum((part[0] + part[1]) + (part[2] + part[3]));
  };
  // All weights below the bound and the bound itself make up what the limit leaves, so that it is no smaller than their
  // mean; half of that is out of the reach of rounding unless the limit is next to all. No weight is between 0 and 2^-126.
  const float below = !counted && limit < 0.999f * total ? 0.5f * (total - limit) / columns : 0.f;
  const uint32 least = __float_as_uint(fmaxf(below, 0x1p-126f));
  uint32 low = least, high = __float_as_uint(1.f) + 1;  // the sum from `low` on crosses, that from `high` on does not
  float above = 0.f;                                    // the latter
  int of_low = 0, of_high = 0;  // weights from these on, of the lane; of the first `low` they are counted when needed
  int left = columns;           // from low to high
#pragma unroll 1
  while (high - low > 1 && left > 32) {
    const uint32 middle = low + (high - low) / 2;
    const float x = sum_from(middle);
    if (crosses(x)) {
      low = middle;
      of_low = of_lane;
    } else {
      high = middle;
      of_high = of_lane;
      above = x;
    }
    if (low != least) left = __reduce_add_sync(kFullWarp, of_low - of_high);
  }
  Bound b;
  if (low == least) {
    const float all = sum_from(low);
    if (!crosses(all)) return b;  // a threshold so near 1 that all of the sum does not cross it
    of_low = of_lane;
    left = __reduce_add_sync(kFullWarp, of_low - of_high);
  }
  int ties = left;
  b.bound = __uint_as_float(low);
  if (left <= 32) {
    int upto = of_low - of_high;
#pragma unroll
    for (int stride = 1; stride < 32; stride *= 2) {
      const int x = __shfl_up_sync(kFullWarp, upto, stride);
      upto += lane >= stride ? x : 0;
    }
    float(&found)[32] = shared.found[again(threadIdx.x) / 32];  // no register holds it until now
    uint32 to = shared_address(found + upto - (of_low - of_high));
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) store_between(to, w[i], low, high - low);
    __syncwarp();
    const float mine = lane < left ? found[lane] : 0.f;
    float x = above;
#pragma unroll 8
    for (int j = 0; j < 32; ++j) {
      const float other = __shfl_sync(kFullWarp, mine, j);
      x += other >= mine ? (counted ? 1.f : other) : 0.f;
    }
    // The sum from the least on crosses, whatever the order of adding up makes of it.
    const uint32 bits = lane < left ? __float_as_uint(mine) : 0xffffffffu;
    const uint32 smallest = __reduce_min_sync(kFullWarp, bits);
    const uint32 bound = __reduce_max_sync(kFullWarp, lane < left && (crosses(x) || bits == smallest) ? bits : 0u);
    b.bound = __uint_as_float(bound);
    const uint32 equal = __ballot_sync(kFullWarp, bits == bound);
    ties = __popc(equal);
    above += warp_sum(mine > b.bound ? (counted ? 1.f : mine) : 0.f);
  }
  b.take_ties(within, limit, above, ties, counted ? 1.f : b.bound);
  return b;
}

// Warp: a row of up to 32 * kOfLane visible columns, of which lane t has t, t + 32, ...
template <int kOfLane>
__device__ __forceinline__ void choose_in_registers(const ChooseBlocksParams& p, const ChoiceRow& row,
                                                    WarpChoiceShared& shared) {
  const int lane = threadIdx.x % 32;
  float w[kOfLane];
  uint64 sure = 0;  // bits of the lane's columns that are chosen whatever their weight
  float most = -infinity();
  bool odd = false;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) w[i] = load_if(row.scores + lane, i, row.visible - lane, -infinity());
  if (row.similar) {
    const int left = again(row.visible - lane);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool fixed = load_if(row.similar + lane, i, left, infinity()) < row.theta;
      w[i] = fixed ? -infinity() : w[i];  // out of the softmax
      sure |= fixed ? 1ull << i : 0;
    }
  }
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    odd |= !(w[i] < infinity());
    most = fmaxf(most, w[i]);
  }
  const bool all = row.all || __any_sync(kFullWarp, odd);
  most = warp_max(most);
  const float base = most == -infinity() ? 0.f : most;
  float sum[4] = {};
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    w[i] = exp2_approx(w[i] - base);
    sum[i % 4] += w[i];
  }
  const float total = warp_sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
  float limit = row.threshold * (p.counted ? 1.f : total), rest = total;
  if (p.forced_count) {
    float forced = 0.f;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i)
      if (i * 32 >= again(row.listed - lane) || i * 32 + lane == row.kept) {
        forced += w[i];
        w[i] = 0.f;
      }
    forced = warp_sum(forced);
    limit -= forced;
    rest -= forced;
  }
  Bound b;
  if (p.forced_count && !(limit > 0.f)) {
    b.bound = infinity();
  } else if (total > 0.f && !all) {
    b = find_bound_in_registers(w, row.visible, p.within, p.counted, limit, rest, shared);
  }

  // What is chosen in any case is made infinite, so that one comparison tells.
  float bound = all ? -1.f : fminf(b.bound, 1e38f);
  if (b.every_tie) {
    bound = __uint_as_float(__float_as_uint(bound) - 1);
  } else if (b.ties > 0) {
    int tied = 0;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const bool tie = w[i] == b.bound;
      const uint32 ties = __ballot_sync(kFullWarp, tie);
      if (tie && tied + __popc(ties & (1u << lane) - 1) < b.ties) w[i] = infinity();
      tied += __popc(ties);
    }
  }
  if (row.kept >= 0 && row.kept % 32 == lane) sure |= 1ull << row.kept / 32;
  if (__any_sync(kFullWarp, sure != 0)) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) w[i] = sure >> i & 1 ? infinity() : w[i];
  }
  int* list = p.entries + row.begin(p);
  const uint32 before = (1u << lane) - 1;
  const int left = again(row.listed - lane);
  int chosen = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (i * 32 >= row.listed) break;
    const bool mine = !(w[i] <= bound) && i * 32 < left;  // NaN, where all are
    const uint32 votes = __ballot_sync(kFullWarp, mine);
    if (mine) list[chosen + __popc(votes & before)] = i * 32 + lane;
    chosen += __popc(votes);
  }
  const int end = p.grid.columns() - 1;
  bool last = false;
  if (end < row.listed) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) last |= i * 32 == end - lane && !(w[i] <= bound);
    last = __any_sync(kFullWarp, last);
  }
  if (lane == 0) row.write(p, chosen, last);
}

template <int kOfLane_>
struct ChoiceTraits {
  static constexpr int kOfLane = kOfLane_;  // columns, at most
};

// Block: kChoiceWarps rows. A warp shares nothing with others.
template <class Traits>
__device__ __forceinline__ void choose_blocks(const ChooseBlocksParams& p, WarpChoiceShared& shared) {
  constexpr int kMost = Traits::kOfLane;
  const uint32 index = blockIdx.x * kChoiceWarps + threadIdx.x / 32;
  if (index >= static_cast<uint32>(p.rows)) return;
  const ChoiceRow row(p, index);
  if (kMost > 8 && row.visible <= 256) {
    choose_in_registers<8>(p, row, shared);
  } else if (kMost > 16 && row.visible <= 512) {
    choose_in_registers<16>(p, row, shared);
  } else if (kMost > 32 && row.visible <= 1024) {
    choose_in_registers<32>(p, row, shared);
  } else {
    choose_in_registers<kMost>(p, row, shared);
  }
}

struct ChoiceShared {
  ReductionShared<kChoiceWarps> reduction;
  float weights[32];  // as many as a row has columns
};

// Block: a row.
__device__ __forceinline__ void choose_long(const ChooseBlocksParams& p, ChoiceShared& shared) {
  const ChoiceRow row(p, blockIdx.x);
  const int tid = threadIdx.x;
  BlockReduction<kChoiceWarps> block{shared.reduction};
  float* weights = shared.weights;  // a thread reads none but its own

  float most = -infinity(), odd = 0.f;
  for (int c = tid; c < row.visible; c += kChoiceThreads) {
    const float x = row.fixed(c) ? -infinity() : row.scores[c];
    weights[c] = x;
    most = fmaxf(most, x);
    if (!(x < infinity())) odd = 1.f;
  }
  most = block.most(most);
  const bool all = block.most(odd) > 0.f || row.all;
  float sum = 0.f, forced = 0.f;
  for (int c = tid; c < row.visible; c += kChoiceThreads) {
    const float w = most == -infinity() ? 0.f : exp2_approx(weights[c] - most);
    const bool is_forced = row.forced(p, c);
    sum += w;
    forced += is_forced ? w : 0.f;
    weights[c] = is_forced ? 0.f : w;
  }
  const float total = block.sum(sum);
  const float limit = row.threshold * (p.counted ? 1.f : total) - block.sum(forced);
  Bound b;
  if (p.forced_count && !(limit > 0.f)) {
    b.bound = infinity();
  } else if (total > 0.f && !all) {
    const auto sum_from = [&](uint32 bits) {
      const float least = __uint_as_float(bits);
      float part = 0.f;
#pragma unroll 4
      for (int c = tid; c < row.visible; c += kChoiceThreads) {
        const float w = weights[c];
        part += w >= least ? (p.counted ? 1.f : w) : 0.f;
      }
      return block.sum(part);
    };
    const auto count = [&](float x) {
      float equal = 0.f;
      for (int c = tid; c < row.visible; c += kChoiceThreads) equal += weights[c] == x ? 1.f : 0.f;
      return static_cast<int>(block.sum(equal));
    };
    b = find_bound(p.within, p.counted, limit, sum_from, count);
  }

  int* list = p.entries + row.begin(p);
  int chosen = 0, tied = 0;
  bool last = false;
  for (int first = 0; first < row.listed; first += kChoiceThreads) {
    const int c = first + tid;
    const bool there = c < row.listed;
    const float w = there ? weights[c] : 0.f;
    bool mine = there && (all || c == row.kept || row.fixed(c) || w > b.bound || (b.every_tie && w == b.bound));
    if (b.ties > 0 && !b.every_tie) {
      const bool tie = there && w == b.bound;
      const int2 found = block.count(tie);
      mine |= tie && tied + found.x < b.ties;
      tied += found.y;
    }
    const int2 place = block.count(mine);
    if (mine) list[chosen + place.x] = c;
    last |= mine && c == p.grid.columns() - 1;
    chosen += place.y;
  }
  last = block.count(last).y > 0;
  if (tid == 0) row.write(p, chosen, last);
}

}  // namespace s2o
