// Which columns each row chooses by a softmax over its scores, as ascending lists.
//
//   w = softmax of a row's visible scores. reach: the shortest prefix of the descending order of w whose sum reaches
//   threshold * sum(w); within: the longest whose sum does not exceed it, one entry at least. Equal weights count by
//   column. A row with a score that is NaN or +infinity chooses all.
//
// No row is sorted: the weight at which the sum crosses is found by bisection of its bits, as sums over a block are the
// same on every run and do not fall when entries are added.
#include "blocks/block_grid.cuh"
#include "blocks/block_reduction.cuh"

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

struct ChoiceShared {
  ReductionShared<kChoiceWarps> reduction;
  float weights[32];  // as many as a row has columns
};

// Block: a row.
__device__ __forceinline__ void choose_blocks(const ChooseBlocksParams& p, ChoiceShared& shared) {
  const BlockGrid& g = p.grid;
  const int rows = g.rows(), row = rows - 1 - static_cast<int>(blockIdx.x % rows), head = blockIdx.x / rows;
  const int flat = p.first_head + head, of_sequence = flat % p.heads;
  const int visible = g.visible(row), listed = g.listed(row), tid = threadIdx.x;
  const float* scores = p.scores + (static_cast<int64>(head) * rows + row) * p.pitch;
  const float theta = p.theta[p.thetas > 1 ? of_sequence : 0];
  const float* similar =
      p.k_similarity ? p.k_similarity + static_cast<int64>(flat / p.shared_heads) * g.columns() : nullptr;
  const int kept = !p.keep_first ? -1 : p.first_column ? p.first_column[flat / p.shared_heads] : 0;
  BlockReduction<kChoiceWarps> block{shared.reduction};
  float* weights = shared.weights;

  // Scores, of which those of fixed columns are out of the softmax.
  float most = -infinity(), odd = 0.f;
  for (int c = tid; c < visible; c += kChoiceThreads) {
    float x = scores[c];
    if (similar && similar[c] < theta) x = -infinity();
    weights[c] = x;
    most = fmaxf(most, x);
    if (!(x < infinity())) odd = 1.f;
  }
  most = block.most(most);
  bool all = block.most(odd) > 0.f;
  if (p.q_similarity) all |= p.q_similarity[static_cast<int64>(flat) * rows + row] < theta;
  float sum = 0.f;
  for (int c = tid; c < visible; c += kChoiceThreads) {
    weights[c] = most == -infinity() ? 0.f : exp2_approx(weights[c] - most);
    sum += weights[c];
  }
  const float total = block.sum(sum), threshold = p.threshold[p.thresholds > 1 ? of_sequence : 0];
  float forced = 0.f;
  if (p.forced_count) {
    sum = 0.f;
    for (int c = tid; c < visible; c += kChoiceThreads) {
      if (c < listed && c != kept) continue;
      sum += weights[c];
      weights[c] = 0.f;
    }
    forced = block.sum(sum);
  }

  // Chosen: weights above `bound`, and the first `ties` of those equal to it.
  float bound = 0.f;
  int ties = 0;
  bool every_tie = false;
  const float limit = threshold * total - forced;
  if (p.forced_count && threshold >= 1.f) {
    all = true;
  } else if (p.forced_count && !(limit > 0.f)) {
    bound = infinity();
  } else if (total > 0.f && threshold < 1.f && !all) {
    const auto sum_from = [&](uint32 bits) {
      float part = 0.f;
      for (int c = tid; c < visible; c += kChoiceThreads)
        part += __float_as_uint(weights[c]) >= bits ? weights[c] : 0.f;
      return block.sum(part);
    };
    uint32 low = 0, high = __float_as_uint(1.f) + 1;  // the sum from `low` on crosses, that from `high` on does not
    float above = 0.f;                                // the latter
    while (high - low > 1) {
      const uint32 middle = low + (high - low) / 2;
      const float x = sum_from(middle);
      if (p.within ? x > limit : x >= limit) {
        low = middle;
      } else {
        high = middle;
        above = x;
      }
    }
    bound = __uint_as_float(low);
    float equal = 0.f;
    for (int c = tid; c < visible; c += kChoiceThreads) equal += weights[c] == bound;
    const int found = static_cast<int>(block.sum(equal));
    const float left = (limit - above) / bound;
    if (p.within) {
      ties = min(static_cast<int>(fminf(floorf(left), 1e9f)), found);
      if (above == 0.f) ties = max(ties, 1);
    } else {
      ties = max(1, min(static_cast<int>(fminf(ceilf(left), 1e9f)), found));
    }
    if (bound == 0.f) ties = 0;  // a threshold so near 1 that all of the sum does not cross it
    every_tie = ties == found && ties > 0;
  }

  int64 begin = flat * p.list_entries + g.begin(row);
  int* list = p.entries + begin;
  int chosen = 0, tied = 0;
  bool last = false;  // the last column is chosen, in one thread
  for (int first = 0; first < listed; first += kChoiceThreads) {
    const int c = first + tid;
    bool mine = false;
    if (c < listed) {
      mine = all || c == kept || (similar && similar[c] < theta);
      if (c < visible) mine |= weights[c] > bound || (every_tie && weights[c] == bound);
    }
    if (ties > 0 && !every_tie && tied < ties) {
      const bool tie = c < visible && weights[c] == bound;
      const int2 found = block.count(tie);
      mine |= tie && c < listed && tied + found.x < ties;
      tied += found.y;
    }
    const int2 place = block.count(mine);
    if (mine) list[chosen + place.x] = c;
    last |= mine && c == g.columns() - 1;
    chosen += place.y;
  }
  const bool short_one = block.count(last).y > 0;
  if (tid == 0) {
    const int64 at = static_cast<int64>(flat) * rows + row;
    p.begins[at] = begin;
    p.keys[at] = chosen * g.block_k - (short_one ? g.columns() * g.block_k - g.seqlen_k : 0);
  }
}

}  // namespace s2o
