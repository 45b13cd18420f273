// Which columns each row chooses by a softmax over its scores, as ascending lists.
//
//   choose_blocks: rows of up to kMostOfRow columns, a warp each, with their weights in registers
//   choose_long: longer rows, a block each, with their weights in shared memory
//
//   w = softmax of a row's visible scores. reach: the shortest prefix of the descending order of w whose sum reaches
//   threshold * sum(w); within: the longest whose sum does not exceed it, one entry at least. Equal weights count by
//   column. A row with a score that is NaN or +infinity chooses all, and so does every row at a threshold of 1, whether
//   its weights have underflowed to 0 or not.
//
// No row is sorted: the weight at which the sum crosses is found by bisection of its bits, as sums are added up in one
// order on every run and do not fall when entries come in.
#include "blocks/block_grid.cuh"
#include "blocks/block_reduction.cuh"

namespace s2o {

constexpr int kMostHeads = 256;
constexpr int kChoiceThreads = 128, kChoiceWarps = kChoiceThreads / 32;
constexpr int kMostOfRow = 2048;

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
    const int of_sequence = flat % p.heads;
    visible = g.visible(row);
    listed = g.listed(row);
    kept = !p.keep_first ? -1 : p.first_column ? p.first_column[flat / p.shared_heads] : 0;
    threshold = p.threshold[p.thresholds > 1 ? of_sequence : 0];
    theta = p.theta[p.thetas > 1 ? of_sequence : 0];
    scores = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch;
    similar = p.k_similarity ? p.k_similarity + static_cast<int64>(flat / p.shared_heads) * g.columns() : nullptr;
    all = threshold >= 1.f;
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
};

// `sum_from(bits)` adds up the weights whose bits are no smaller; `count(x)` how many are x.
template <class SumFrom, class Count>
__device__ __forceinline__ Bound find_bound(bool within, float limit, const SumFrom& sum_from, const Count& count) {
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
  const int found = count(b.bound);
  const float left = (limit - above) / b.bound;
  if (within) {
    b.ties = min(static_cast<int>(fminf(floorf(left), 1e9f)), found);
    if (above == 0.f) b.ties = max(b.ties, 1);
  } else {
    b.ties = max(1, min(static_cast<int>(fminf(ceilf(left), 1e9f)), found));
  }
  b.every_tie = b.ties == found;
  return b;
}

// Warp: a row of up to 32 * kOfLane visible columns, of which lane t has t, t + 32, ...
template <int kOfLane>
__device__ __forceinline__ void choose_in_registers(const ChooseBlocksParams& p, const ChoiceRow& row) {
  const int lane = threadIdx.x % 32;
  float w[kOfLane];
  uint64 fixed = 0;  // bits of the lane's columns
  float most = -infinity();
  bool odd = false;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int c = i * 32 + lane;
    w[i] = c < row.visible ? row.scores[c] : -infinity();
    if (c < row.visible && row.fixed(c)) {  // out of the softmax
      w[i] = -infinity();
      fixed |= 1ull << i;
    }
    odd |= !(w[i] < infinity());
    most = fmaxf(most, w[i]);
  }
  const bool all = row.all || __any_sync(kFullWarp, odd);
  most = warp_max(most);
  float sum = 0.f, forced = 0.f;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    w[i] = most == -infinity() ? 0.f : exp2_approx(w[i] - most);
    sum += w[i];
    if (row.forced(p, i * 32 + lane)) {
      forced += w[i];
      w[i] = 0.f;
    }
  }
  const float total = warp_sum(sum);
  const float limit = row.threshold * total - warp_sum(forced);
  Bound b;
  if (p.forced_count && !(limit > 0.f)) {
    b.bound = infinity();
  } else if (total > 0.f && !all) {
    const auto sum_from = [&](uint32 bits) {
      const float least = __uint_as_float(bits);  // weights are not negative: their bits grow with them
      float part = 0.f;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) part += w[i] >= least ? w[i] : 0.f;
      return warp_sum(part);
    };
    const auto count = [&](float x) {
      float equal = 0.f;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) equal += w[i] == x ? 1.f : 0.f;
      return static_cast<int>(warp_sum(equal));
    };
    b = find_bound(p.within, limit, sum_from, count);
  }

  int* list = p.entries + row.begin(p);
  const uint32 before = (1u << lane) - 1;
  const int end = p.grid.columns() - 1;
  int chosen = 0, tied = 0;
  bool last = false;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (i * 32 >= row.listed) break;
    const int c = i * 32 + lane;
    bool mine = all || c == row.kept || (fixed >> i & 1) || w[i] > b.bound || (b.every_tie && w[i] == b.bound);
    if (b.ties > 0 && !b.every_tie) {
      const bool tie = w[i] == b.bound;
      const uint32 ties = __ballot_sync(kFullWarp, tie);
      mine |= tie && tied + __popc(ties & before) < b.ties;
      tied += __popc(ties);
    }
    mine &= c < row.listed;
    const uint32 votes = __ballot_sync(kFullWarp, mine);
    if (mine) list[chosen + __popc(votes & before)] = c;
    last |= mine && c == end;
    chosen += __popc(votes);
  }
  last = __any_sync(kFullWarp, last);
  if (lane == 0) row.write(p, chosen, last);
}

// Block: kChoiceWarps rows. Nothing is shared.
__device__ __forceinline__ void choose_blocks(const ChooseBlocksParams& p) {
  const uint32 index = blockIdx.x * kChoiceWarps + threadIdx.x / 32;
  if (index >= static_cast<uint32>(p.rows)) return;
  const ChoiceRow row(p, index);
  if (row.visible <= 256) {
    choose_in_registers<8>(p, row);
  } else if (row.visible <= 512) {
    choose_in_registers<16>(p, row);
  } else if (row.visible <= 1024) {
    choose_in_registers<32>(p, row);
  } else {
    choose_in_registers<kMostOfRow / 32>(p, row);
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
  const float limit = row.threshold * total - block.sum(forced);
  Bound b;
  if (p.forced_count && !(limit > 0.f)) {
    b.bound = infinity();
  } else if (total > 0.f && !all) {
    const auto sum_from = [&](uint32 bits) {
      const float least = __uint_as_float(bits);
      float part = 0.f;
#pragma unroll 4
      for (int c = tid; c < row.visible; c += kChoiceThreads) part += weights[c] >= least ? weights[c] : 0.f;
      return block.sum(part);
    };
    const auto count = [&](float x) {
      float equal = 0.f;
      for (int c = tid; c < row.visible; c += kChoiceThreads) equal += weights[c] == x ? 1.f : 0.f;
      return static_cast<int>(block.sum(equal));
    };
    b = find_bound(p.within, limit, sum_from, count);
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
