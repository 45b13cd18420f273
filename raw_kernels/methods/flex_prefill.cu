// FlexPrefill's choice, from sums by key and by distance and from scores of mean rows.
//
//   flex_lines: sums, q, k_means -> lines [heads of the round, 2, columns]: 1 for a chosen column, or diagonal
//                                   by_means [heads of the round]: whether single blocks are chosen by means as well
//   row_weights: scores -> their softmax over the visible columns, in place
//   flex_bound: weights -> the bound [heads of the round, 2] above which blocks are chosen: a weight's bits, and the
//               last one of those equal to it, counted through the head
//   flex_lists: all of them -> lists
#include "methods/block_grid.cuh"
#include "methods/largest.cuh"

namespace s2o {

struct FlexPrefillParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  const uint16* k_means;   // [batch * kv_heads, columns, 2, kHeadDim]
  const float* sums;       // [heads of the round, 2, seqlen_k]
  float* scores;           // [heads of the round, rows, pitch], in log2 units, then weights
  float* blocks;           // [heads of the round, 3, columns]: sums of blocks, and the softmax over mean keys
  int* lines;
  int* by_means;
  int64* bound;
  int* entries;            // [batch * heads, list_entries]
  int64* begins;           // [batch * heads, rows]
  int* keys;               // likewise
  BlockGrid grid;
  int heads, kv_heads;     // of a sequence
  int head_dim;
  int rows;                // last queries
  int first_head;          // of the round
  int pitch;
  int min_blocks;
  int64 list_entries;
  float gamma, tau;
  float scale_log2;        // scale * log2(e)
};

constexpr float kLn2 = 0.693147180559945f;

// The longest prefix of the descending order of weights whose sum does not exceed `limit`: those above a bound, and some
// of those equal to it. NaN is passed over. for_each calls its argument with every weight of this thread.
struct Prefix {
  uint32 bound;
  int64 above, equal;  // how many weights: above the bound, and equal to it in the prefix

  template <class ForEach>
  static __device__ __forceinline__ Prefix find(float limit, BlockReduction<kLargestWarps>& block,
                                                const ForEach& for_each) {
    uint32 low = 0, high = 0x7f800000u;  // the sum from `low` on exceeds the limit, that from `high` on does not
    float sum = 0.f;
    while (high - low > 1) {
      const uint32 middle = low + (high - low) / 2;
      float part = 0.f;
      for_each([&](float x) { part += x == x && __float_as_uint(x) >= middle ? x : 0.f; });
      part = block.sum(part);
      if (part > limit) {
        low = middle;
      } else {
        high = middle;
        sum = part;
      }
    }
    float counts[2] = {};  // whole numbers below 2^24 in a thread, and a float's range in all
    for_each([&](float x) {
      counts[0] += x == x && __float_as_uint(x) > low;
      counts[1] += __float_as_uint(x) == low;
    });
    const int64 above = total(counts[0], block), found = total(counts[1], block);
    const float bound = __uint_as_float(low), fits = bound > 0.f ? floorf((limit - sum) / bound) : infinity();
    return {low, above, fits >= found ? found : static_cast<int64>(fits)};
  }
  // Exact: of the low and of the high parts of a count.
  static __device__ __forceinline__ int64 total(float count, BlockReduction<kLargestWarps>& block) {
    const int n = static_cast<int>(count);
    const float low = block.sum(static_cast<float>(n & 4095)), high = block.sum(static_cast<float>(n >> 12));
    return static_cast<int64>(low) + (static_cast<int64>(high) << 12);
  }
};

template <class Element_, int kHeadDim_>
struct FlexTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  struct Shared {
    LargestShared largest;
    float mean[kHeadDim];
  };
};

// Block: a head.
template <class Traits>
__device__ __forceinline__ void flex_lines(const FlexPrefillParams& p, typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kBlock = 128, kHeadDim = Traits::kHeadDim;
  const BlockGrid& g = p.grid;
  const int columns = g.columns(), head = p.first_head + blockIdx.x, tid = threadIdx.x;
  const float* sums = p.sums + static_cast<int64>(blockIdx.x) * 2 * g.seqlen_k;
  float* of_blocks = p.blocks + static_cast<int64>(blockIdx.x) * 3 * columns;
  BlockReduction<kLargestWarps> block{shared.largest.reduction};
  const float factor = 1.f / p.rows;
  const int fewest = min(p.min_blocks, columns);

  int count[2];
  for (int line = 0; line < 2; ++line) {
    const float* of = sums + static_cast<int64>(line) * g.seqlen_k;
    const auto for_each = [&](const auto& use) {
#pragma unroll 8
      for (int i = tid; i < g.seqlen_k; i += kLargestThreads) use(of[i]);
    };
    float odd = 0.f;
    for_each([&](float x) { odd += x != x; });
    int64 held = 0;
    if (block.sum(odd) == 0.f) {  // or none is known to hold anything
      const Prefix prefix = Prefix::find(p.gamma * p.rows, block, for_each);
      held = prefix.above + prefix.equal;
    }
    count[line] = p.gamma >= 1.f ? columns : min(max(static_cast<int>((held + 1) / kBlock) + 1, fewest), columns);
    for (int c = tid; c < columns; c += kLargestThreads) {
      float sum = 0.f;
      for (int i = c * kBlock; i < min((c + 1) * kBlock, g.seqlen_k); ++i) sum += of[i];
      of_blocks[line * columns + c] = sum * factor;
    }
  }

  if (tid < kHeadDim) {
    const uint16* q = p.q.at(head / p.heads, head % p.heads) + static_cast<int64>(g.seqlen_q - p.rows) * p.q.row;
    float sum = 0.f;
    if (tid < p.head_dim)
      for (int r = 0; r < p.rows; ++r) sum += Element::to_float(q[r * p.q.row + tid]) * factor;
    shared.mean[tid] = sum;
  }
  __syncthreads();
  const int kv_head = head / p.heads * p.kv_heads + head % p.heads / (p.heads / p.kv_heads);
  const uint16* means = p.k_means + static_cast<int64>(kv_head) * columns * 2 * kHeadDim;
  float* weights = of_blocks + 2 * columns;
  for (int c = tid / 32; c < columns; c += kLargestWarps) {
    const uint16* mean = means + static_cast<int64>(c) * 2 * kHeadDim;
    float sum = 0.f;
    for (int i = tid % 32; i < kHeadDim; i += 32)
      sum += shared.mean[i] * (Element::to_float(mean[i]) + Element::to_float(mean[kHeadDim + i]));
#pragma unroll
    for (int stride = 16; stride > 0; stride /= 2) sum += __shfl_xor_sync(kFullWarp, sum, stride);
    if (tid % 32 == 0) weights[c] = sum * p.scale_log2;
  }
  __syncthreads();
  float most = -infinity(), total = 0.f, apart = 0.f;
  for (int c = tid; c < columns; c += kLargestThreads) most = fmaxf(most, weights[c]);
  most = block.most(most);
  for (int c = tid; c < columns; c += kLargestThreads) total += exp2_approx(weights[c] - most);
  total = block.sum(total);
  for (int c = tid; c < columns; c += kLargestThreads) {
    const float x = exp2_approx(weights[c] - most) / total, y = of_blocks[c], middle = (x + y) / 2;
    const auto of = [&](float z) { return z > 0.f ? z * __log2f(z / middle) : z - z; };  // NaN stays
    apart += of(x) + of(y);
  }
  apart = block.sum(apart) * (kLn2 / 2);
  const bool by_means = sqrtf(apart > 0.f ? apart : apart - apart) < p.tau && p.gamma < 1.f;
  if (tid == 0) p.by_means[blockIdx.x] = by_means;
  for (int line = 0; line < 2; ++line) {
    const float* of = of_blocks + line * columns;
    int* chosen = p.lines + (static_cast<int64>(blockIdx.x) * 2 + line) * columns;
    const auto rank = [&](int c) { return rank_of(of[c], c == 0); };
    __syncthreads();
    const Largest largest = Largest::find(rank, columns, by_means ? fewest : count[line], shared.largest);
    for_largest(largest, rank, columns, shared.largest, [&](int c, bool mine, int) { chosen[c] = mine; });
  }
}

constexpr int kRowThreads = 128, kRowWarps = kRowThreads / 32;

struct RowShared {
  ReductionShared<kRowWarps> reduction;
};

// Block: a row of a head.
__device__ __forceinline__ void row_weights(const FlexPrefillParams& p, RowShared& shared) {
  const int rows = p.grid.rows(), row = blockIdx.x % rows, visible = p.grid.visible(row);
  if (!p.by_means[blockIdx.x / rows]) return;
  float* of = p.scores + static_cast<int64>(blockIdx.x) * p.pitch;
  BlockReduction<kRowWarps> block{shared.reduction};
  float most = -infinity(), sum = 0.f;
  for (int c = threadIdx.x; c < visible; c += kRowThreads) most = fmaxf(most, of[c]);
  most = block.most(most);
  for (int c = threadIdx.x; c < visible; c += kRowThreads) sum += exp2_approx(of[c] - most);
  sum = block.sum(sum);
  for (int c = threadIdx.x; c < p.pitch; c += kRowThreads) of[c] = c < visible ? exp2_approx(of[c] - most) / sum : 0.f;
}

// Block: a head.
__device__ __forceinline__ void flex_bound(const FlexPrefillParams& p, LargestShared& shared) {
  if (!p.by_means[blockIdx.x]) return;
  const int rows = p.grid.rows(), columns = p.grid.columns();
  const float* weights = p.scores + static_cast<int64>(blockIdx.x) * rows * p.pitch;
  BlockReduction<kLargestWarps> block{shared.reduction};
  const auto for_each = [&](const auto& use) {  // what is not visible is 0, which adds nothing
#pragma unroll 8
    for (int64 i = threadIdx.x; i < static_cast<int64>(rows) * p.pitch / 4; i += kLargestThreads) {
      const float4 x = reinterpret_cast<const float4*>(weights)[i];
      use(x.x);
      use(x.y);
      use(x.z);
      use(x.w);
    }
  };
  const Prefix prefix = Prefix::find(p.gamma * rows, block, for_each);
  int64 last = -1, tied = 0;  // the last of those equal to the bound that is chosen; of zeros all are
  for (int row = 0; row < rows && tied < prefix.equal && prefix.bound != 0; ++row) {
    const int visible = p.grid.visible(row);
    for (int first = 0; first < visible; first += kLargestThreads) {
      const int c = first + threadIdx.x;
      const bool tie = c < visible && __float_as_uint(weights[static_cast<int64>(row) * p.pitch + c]) == prefix.bound;
      const int2 ties = block.count(tie);
      if (tie && tied + ties.x == prefix.equal - 1) last = static_cast<int64>(row) * columns + c;
      tied += ties.y;
    }
  }
  int64* bound = p.bound + blockIdx.x * 2;
  if (threadIdx.x == 0) {
    bound[0] = prefix.bound;
    bound[1] = prefix.bound == 0 ? static_cast<int64>(rows) * columns : -1;
  }
  __syncthreads();
  if (last >= 0 && prefix.bound != 0) bound[1] = last;  // one thread has it
}

// Block: a row of a head.
__device__ __forceinline__ void flex_lists(const FlexPrefillParams& p, RowShared& shared) {
  const BlockGrid& g = p.grid;
  const int rows = g.rows(), row = blockIdx.x % rows, in_round = blockIdx.x / rows, columns = g.columns();
  const int64 flat = p.first_head + in_round;
  const int listed = g.listed(row), own = (row * g.block_q + g.offset()) / g.block_k;
  const int* lines = p.lines + static_cast<int64>(in_round) * 2 * columns;
  const float* weights = p.scores + static_cast<int64>(blockIdx.x) * p.pitch;
  const bool by_means = p.by_means[in_round];
  const int64 last = by_means ? p.bound[in_round * 2 + 1] : -1;
  const uint32 bound = by_means ? static_cast<uint32>(p.bound[in_round * 2]) : 0;
  const int64 begin = flat * p.list_entries + g.begin(row);
  int* list = p.entries + begin;
  BlockReduction<kRowWarps> block{shared.reduction};
  int chosen = 0;
  for (int first = 0; first < listed; first += kRowThreads) {
    const int c = first + threadIdx.x;
    bool mine = false;
    if (c < listed) {
      mine = lines[c] || lines[columns + own - c];
      if (by_means) {
        const uint32 x = __float_as_uint(weights[c]) & 0x7fffffffu;  // NaN is above all
        mine |= x > bound || (x == bound && static_cast<int64>(row) * columns + c <= last);
      }
    }
    const int2 place = block.count(mine);
    if (mine) list[chosen + place.x] = c;
    chosen += place.y;
  }
  if (threadIdx.x == 0) {
    p.begins[flat * rows + row] = begin;
    p.keys[flat * rows + row] = chosen * g.block_k;  // a short column is never listed
  }
}

}  // namespace s2o
