// How much softmax mass each query has, in units of one unit of keys: what the weights of rank="query" are shares of.
//
//   norms[head, query] = the larger of
//     log2( sum over whole blocks of its segment's candidates of kBlockUnits exp2(x(block's mean key))
//           + sum over candidates in no whole block of exp2(x(unit's mean key))
//           + what pass 1 has found / keys of a unit )
//     log2( exp2(largest x(key) of sampled keys of those blocks) / keys of a unit )
//
//   x(key) = scale_log2 * query . key. Both sums over candidates of the first count exp2(excess) times as much:
//   excess = min(kMostExcess, ln 2 / 4 * mean over sampled keys of x(key - mean of its block)^2)
//   is half of what single keys add to what their means weigh, if scores are normal; it is 0 where no block is whole. A
//   norm is less x(centre) where unit_rows has keys less the centre, and 0 where it is not finite. For e4m3 the kernel also
//   finds how the queries of each segment are scaled.
//
// Means of blocks hide a key that a query looks for, so that such a query's norm comes out too small and what it looks
// for too large: it comes first. One that came out too large would come last, hence the bound. Where scores spread so far
// that norms come out too small by a lot, all of such a query's keys would come before those of other queries: a single key
// is a floor that never overstates.
#include "sm80/attention.cuh"
#include "selection/unit_tile.cuh"

namespace s2o {

struct QueryNormsParams {
  Tensor<const uint16> q;    // [batch, heads, seqlen_q, head_dim]
  const uint16* block_keys;  // [batch * kv_heads, 1 + blocks, kHeadDim]
  const uint16* unit_means;  // [batch * kv_heads, units, kHeadDim]
  const uint16* sampled_keys;  // [batch * kv_heads, kSampledOfBlock * blocks, kHeadDim]
  const uint16* deviations;  // like sampled_keys: half of these less their block's mean
  const float2* state;       // [batch * heads, seqlen_q] (m in log2 units, l) of pass 1
  const int* key_exponents;  // [batch * kv_heads]
  float* norms;              // [batch * heads, seqlen_q]
  float2* query_scales;      // [batch * heads, segments]: what queries are multiplied by, and what products are; or null
  Geometry geometry;
  int heads;
  int shared_heads;          // query heads of a KV head
  int tiles;                 // of a full segment's queries
  int head_tiles;            // of a head's
  int aligned;               // every row of q starts on 16 bytes
  int less_centre;           // whether what is multiplied is less the centre
  float scale_log2;          // scale * log2(e), with its sign
};

constexpr float kBlockShift = 6.f;  // log2 of kBlockUnits
static_assert(kBlockUnits == 64 && spec::kSampledKeys == 64, "as many rows as a step has");

// log2 of the factor by which blocks count more than their mean keys say. `of_halves` is the mean square of a query's scores
// of halved deviations.
__device__ __forceinline__ float excess(float of_halves) {
  constexpr float kMost = spec::kMostExcess, kLn2 = 0.69314718f;
  const float half = kLn2 * of_halves;
  return half > kMost ? kMost : half;  // NaN stays
}

template <class Element_, int kHeadDim_>
struct NormTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kStep = kBlockUnits, kThreads = kHeadDim > 128 ? 256 : 128;
  static constexpr int kOfWarp = kHeadDim > 128 ? 1 : 2;  // fragments of 16 queries
  static constexpr int kQueries = 128;                   // of a block
  static constexpr int kBuffers = 3;                     // all but one on their way at once
  struct Shared {
    uint16 rows[kBuffers][kStep * kHeadDim];
    uint16 centre[kHeadDim];
    float longest[kThreads / 32];
    // Of each query: what pass 1 has left; what scores of sampled keys tell; the largest of these.
    float2 own[kQueries];
    int key_exponent;
    float excess[kQueries], largest[kQueries];
  };
};

// Units that are candidates and in no whole block of candidates: some before the segment's own keys; without causality
// also behind these, and at the end of all. Fewer than kBlockUnits each. `begin`: of the own keys, in units.
struct UnitsBetween {
  int first, end;
  // `part`: 0 to 2. Worked out when it is asked for: registers are few.
  __device__ __forceinline__ UnitsBetween(const Geometry& g, int segment, int begin, int part)
      : first(begin & ~(kBlockUnits - 1)), end(begin) {
    if (part == 0) return;
    constexpr int kMask = kBlockUnits - 1;
    const int units = g.units(), behind = begin + (units - g.ranked(segment));
    const int whole = units & ~kMask, next = behind + kMask & ~kMask;
    first = part == 1 ? behind : whole;
    end = part == 1 ? min(next, units) : whole >= next ? units : whole;
  }
};

// Whole blocks of candidates: those before the segment's own keys, and those from `second` up to `end` behind them. They
// are worked out when they are asked for, too.
struct WholeBlocks {
  int before, second, end;
  __device__ __forceinline__ WholeBlocks(const Geometry& g, int segment, int begin)
      : before(begin / kBlockUnits), second(before), end(before) {
    if (g.is_causal) return;
    const int units = g.units();
    second = (begin + (units - g.ranked(segment)) + kBlockUnits - 1) / kBlockUnits;
    end = units / kBlockUnits;
  }
};

template <class Traits>
struct QueryNorms {
  using Element = typename Traits::Element;
  static constexpr int kOfWarp = Traits::kOfWarp, kGroups = Traits::kHeadDim / 32;
  // Rows of a step that are taken at a time, as registers are few.
  static constexpr int kPart = Traits::kStep / (2 * kOfWarp), kRowTiles = kPart / 8;

  const QueryNormsParams& p;
  typename Traits::Shared& shared;
  int lane, warp, head, kv_head, segment;
  int first, count;                // queries of the block
  uint4 a[kOfWarp][kGroups][2];    // of queries lane / 4 and 8 more, dimensions 8 t .. 8 t + 7 of each 32, t = lane % 4
  float s[kOfWarp][kRowTiles][4];  // their products, [2 h + e] those with row_of(e) of each 8 of kPart rows
  float m[kOfWarp][2], l[kOfWarp][2], centre[kOfWarp][2];

  __device__ __forceinline__ QueryNorms(const QueryNormsParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), lane(threadIdx.x % 32), warp(__shfl_sync(kFullWarp, threadIdx.x / 32, 0)) {
    locate();
  }
  // Finds which queries are the block's. It is called again behind all steps, as registers are few through them.
  __device__ __forceinline__ void locate() {
    uint32 block = blockIdx.x;
    asm volatile("" : "+r"(block));
    const uint32 of_head = p.head_tiles;
    head = block / of_head;
    uint32 tile = block % of_head;
    // Of the last head the last segments come first: they have the most rows, and would be alone at the end.
    if (block + of_head >= gridDim.x) tile = of_head - 1 - tile;
    kv_head = head / p.shared_heads;
    segment = tile / p.tiles;
    const int before = tile % p.tiles * Traits::kQueries;  // of the segment's
    first = p.geometry.query_begin(segment) + before;
    count = p.geometry.query_count(segment) - before;
  }
  __device__ __forceinline__ int row(int i, int h) const { return (warp * kOfWarp + i) * 16 + lane / 4 + h * 8; }
  // Which of 8 rows column lane % 4 * 2 + e of a product is with: so that reads of rows meet no two in a bank.
  __device__ __forceinline__ int row_of(int e) const { return lane % 4 + e * 4; }
  // Zeros past head_dim; past the segment's last query that one. `load(from, first, dims)`: elements first .. first + 7 of
  // the dims at `from`.
  template <class Load>
  __device__ __forceinline__ void load_queries(const Load& load) {
    const uint16* queries =
        p.q.at(head / p.heads, head % p.heads) + static_cast<int64>(first) * p.q.row;
    const int column = lane % 4 * 8, dims = p.geometry.head_dim - column;  // from this thread's first on
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint16* from = queries + static_cast<int64>(min(row(i, h), count - 1)) * p.q.row + column;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) a[i][g][h] = load(from, g * 32, dims);
      }
  }
  // d += queries times 32 dimensions of 8 rows, of one of which a thread has 8.
  static __device__ __forceinline__ void add_product(float (&d)[4], const uint4 (&a)[2], const uint4& b) {
    const uint32 low[4] = {a[0].x, a[1].x, a[0].y, a[1].y}, high[4] = {a[0].z, a[1].z, a[0].w, a[1].w};
    Element::mma(d, low, b.x, b.y);
    Element::mma(d, high, b.z, b.w);
  }
  __device__ __forceinline__ void multiply(uint32 rows) {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
    const int first_row = lane / 4 / 2 + lane / 4 % 2 * 4;  // the one of column lane / 4: row_of of another lane
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int j = 0; j < kRowTiles; ++j) {
        // Of row j * 8 + first_row, whose swizzle is that of first_row.
        const uint32 at = chunk_address<Traits>(rows, first_row, g * 4 + lane % 4) + j * (8 * Traits::kHeadDim * 2);
        const uint4 x = load_shared_16(at);
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i) add_product(s[i][j], a[i][g], x);
      }
  }
  // Adds the weights of a step's rows to the sums, of the first `there` of them at most; `counts(row)`: whether a row does;
  // `shift`: log2 of what it stands for.
  template <class Counts>
  __device__ __forceinline__ void add_step(uint32 rows, float shift, int there, bool all, const Counts& counts) {
#pragma unroll 1
    for (int first_row = 0; first_row < min(there, Traits::kStep); first_row += kPart) {
      multiply(rows + first_row * (Traits::kHeadDim * 2));
      add(shift, all, [&](int r) { return counts(first_row + r); });
    }
  }
  template <class Counts>
  __device__ __forceinline__ void add(float shift, bool all, const Counts& counts) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool is_in = all || counts(j * 8 + row_of(e));
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            float& x = s[i][j][2 * h + e];
            x = is_in ? fmaf(x, p.scale_log2, shift) : -infinity();
          }
      }
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float top = m[i][h];
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
        const float base = top == -infinity() ? 0.f : top;
        float sum = 0.f;
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j)
          sum += exp2_approx(s[i][j][2 * h] - base) + exp2_approx(s[i][j][2 * h + 1] - base);
        l[i][h] = l[i][h] * exp2_approx(m[i][h] - base) + sum;
        m[i][h] = top;
      }
  }
  // The largest score of the rows that count. NaN is none: it is in the mean of its block, too.
  template <class Counts>
  __device__ __forceinline__ void find_largest(const Counts& counts) {
#pragma unroll
    for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const bool is_in = counts(j * 8 + row_of(e));
#pragma unroll
        for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float x = s[i][j][2 * h + e] * p.scale_log2;
            m[i][h] = fmaxf(m[i][h], is_in ? x : -infinity());
          }
      }
  }
  // Finds each query's excess by the squares of the scores of deviations, whose step has zeros past the last one. It lies
  // in shared memory, as registers are few.
  __device__ __forceinline__ void find_excess(uint32 rows) {
    float squares[kOfWarp][2] = {};
#pragma unroll 1
    for (int first_row = 0; first_row < sampled_keys(); first_row += kPart) {
      multiply(rows + first_row * (Traits::kHeadDim * 2));
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
        for (int j = 0; j < kRowTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float x = s[i][j][e] * p.scale_log2;
            squares[i][e / 2] = fmaf(x, x, squares[i][e / 2]);
          }
    }
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = squares[i][h];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        if (lane % 4 == 0) shared.excess[row(i, h)] = excess(sum / max(sampled_keys(), 1));
      }
    __syncwarp();
  }
  // Scores of the centre, each column of a product alike.
  __device__ __forceinline__ void find_centre() {
    float d[kOfWarp][4] = {};
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint4 of = reinterpret_cast<const uint4*>(shared.centre)[g * 4 + lane % 4];
#pragma unroll
      for (int i = 0; i < kOfWarp; ++i) add_product(d[i], a[i][g], of);
    }
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) centre[i][h] = d[i][2 * h] * p.scale_log2;
  }
  // Starts the copy of a step's rows, of which row r is number place(r); zeros past the `there` first ones.
  template <class Place>
  static __device__ __forceinline__ void load_rows(uint32 to, const uint16* rows, int there, const Place& place) {
    constexpr int kChunks = Traits::kHeadDim / 8, kRows = Traits::kStep * kChunks / Traits::kThreads;
    const int chunk = threadIdx.x % kChunks, first_row = threadIdx.x / kChunks * kRows;
    rows += chunk * 8;
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      cp_async_16_or_zeros(chunk_address<Traits>(to, first_row + i, chunk),
                           rows + static_cast<int64>(place(first_row + i)) * Traits::kHeadDim, first_row + i < there);
  }
  // What pass 1 has left, the first rows and queries are all on their way before any of them is waited for. Sampled keys
  // come first, as what they tell needs few registers.
  __device__ __forceinline__ void walk() {
    constexpr int kStep = Traits::kStep, kOfBlock = spec::kSampledOfBlock;
    const Geometry& g = p.geometry;
    const int begin = g.dense_begin(segment) >> g.unit_shift, units = g.units(), blocks = units / kBlockUnits;
    const int last = g.is_causal ? begin / kBlockUnits : blocks;  // blocks that may count
    const uint16* of_centre = p.block_keys + static_cast<int64>(kv_head) * (1 + blocks) * Traits::kHeadDim;
    const int samples = 1 + (last * kOfBlock + kStep - 1) / kStep;  // steps of deviations and of sampled keys
    const int steps = samples + (last + kStep - 1) / kStep;
    const int all = steps + (g.is_causal ? begin % kBlockUnits > 0 : 3);
    const auto load = [&](int step) {
      const uint32 to = shared_address(shared.rows[step % Traits::kBuffers]);
      int number = kv_head;
      asm volatile("" : "+r"(number));  // or where arrays begin takes registers through all steps
      const int64 of_head = number;
      if (step == 0) {
        load_deviations(to);
      } else if (step < samples) {
        const int row = (step - 1) * kStep;
        load_rows(to, p.sampled_keys + (of_head * blocks * kOfBlock + row) * Traits::kHeadDim, last * kOfBlock - row,
                  [](int r) { return r; });
      } else if (step < all) {
        const int row = (step - samples) * kStep;
        const uint16* rows = p.block_keys + (of_head * (1 + blocks) + 1 + row) * Traits::kHeadDim;
        int there = last - row;
        if (step >= steps) {
          const UnitsBetween between(g, segment, begin, step - steps);
          rows = p.unit_means + (of_head * units + between.first) * Traits::kHeadDim;
          there = between.end - between.first;
        }
        load_rows(to, rows, there, [](int r) { return r; });
      }
      cp_async_commit();
    };
    constexpr int kAhead = Traits::kBuffers - 1;
    const auto next = [&](int step) {
      cp_async_wait<kAhead - 1>();
      __syncthreads();  // and every warp is done with the step before, whose buffer is free
      load(step + kAhead);
      return shared_address(shared.rows[step % Traits::kBuffers]);
    };
    load_own();
    if (threadIdx.x < Traits::kHeadDim / 8)
      cp_async_16(shared_address(shared.centre + threadIdx.x * 8), of_centre + threadIdx.x * 8);
#pragma unroll 1
    for (int step = 0; step < kAhead; ++step) load(step);
    load_queries([&](const uint16* from, int first, int dims) {
      return load_16_or_zeros(from + first, p.aligned && first < dims);
    });
    if (!p.aligned) load_queries(load_unaligned);  // in a branch of each row loads would wait for one another
    if (p.query_scales) find_longest();
    asm volatile("" : "+r"(lane), "+r"(kv_head), "+r"(segment));  // likewise what follows from these
    find_excess(next(0));
    start();
#pragma unroll 1
    for (int step = 1; step < samples; ++step) {
      const uint32 rows = next(step);
      const WholeBlocks whole(g, segment, begin);
      const int row = (step - 1) * kStep, first_end = whole.before * kOfBlock - row, end = whole.end * kOfBlock - row;
      const int second_first = whole.second * kOfBlock - row;
#pragma unroll 1
      for (int at = 0; at < min(end, kStep); at += kPart) {
        multiply(rows + at * (Traits::kHeadDim * 2));
        if (at + kPart <= first_end) {  // as nearly always; without a branch for each row
          find_largest([](int) { return true; });
        } else {
          find_largest([&](int r) {
            const int there = at + r;
            return there < first_end | (there >= second_first & there < end);
          });
        }
      }
    }
    keep_largest();
    start();
#pragma unroll 1
    for (int step = samples; step < all; ++step) {
      const uint32 rows = next(step);
      if (step < steps) {
        const WholeBlocks whole(g, segment, begin);
        const int row = (step - samples) * kStep, first_end = whole.before - row, end = whole.end - row;
        const int second_first = whole.second - row;
        add_step(rows, kBlockShift, g.is_causal ? first_end : end, first_end >= kStep,
                 [&](int r) { return r < first_end || (r >= second_first && r < end); });
      } else {
        const UnitsBetween between(g, segment, begin, step - steps);
        const int there = between.end - between.first;
        add_step(rows, 0.f, there, false, [&](int r) { return r < there; });
      }
    }
    cp_async_wait<0>();
  }
  // Blocks whose keys are sampled: those before the segment, without causality all.
  __device__ __forceinline__ int sampled_blocks() const {
    const Geometry& g = p.geometry;
    return (g.is_causal ? g.dense_begin(segment) >> g.unit_shift : g.units()) / kBlockUnits;
  }
  __device__ __forceinline__ int sampled_keys() const {
    return min(spec::kSampledKeys, sampled_blocks() * spec::kSampledOfBlock);
  }
  // Where blocks have more keys than are sampled, blocks evenly apart give one each, the next block its next one: keys may
  // repeat with a period.
  __device__ __forceinline__ void load_deviations(uint32 to) const {
    constexpr int kKeys = spec::kSampledKeys, kOfBlock = spec::kSampledOfBlock;
    const int blocks = sampled_blocks(), all_blocks = p.geometry.units() / kBlockUnits;
    const uint16* from = p.deviations + static_cast<int64>(kv_head) * all_blocks * (kOfBlock * Traits::kHeadDim);
    load_rows(to, from, sampled_keys(), [&](int r) {
      return blocks * kOfBlock > kKeys ? r * blocks / kKeys * kOfBlock + r % kOfBlock : r;
    });
  }
  __device__ __forceinline__ int64 of_queries() const {
    return static_cast<int64>(head) * p.geometry.seqlen_q + first;
  }
  __device__ __forceinline__ void load_own() {
    if (threadIdx.x < Traits::kQueries) {
      const float2* state = p.state + of_queries() + min(static_cast<int>(threadIdx.x), count - 1);
      cp_async_4(shared_address(&shared.own[threadIdx.x].x), &state->x);
      cp_async_4(shared_address(&shared.own[threadIdx.x].y), &state->y);
    }
    if (threadIdx.x == 0 && p.query_scales) cp_async_4(shared_address(&shared.key_exponent), p.key_exponents + kv_head);
  }
  static __device__ __forceinline__ float largest_of_quad(float x) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
    return fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
  }
  __device__ __forceinline__ void start() {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) m[i][h] = -infinity(), l[i][h] = 0.f;
  }
  // Leaves each query's largest score in shared memory, too.
  __device__ __forceinline__ void keep_largest() const {
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float largest = largest_of_quad(m[i][h]);
        if (lane % 4 == 0) shared.largest[row(i, h)] = largest;
      }
  }
  __device__ __forceinline__ void store() const {
    const int64 of_head = of_queries();
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float of_row = m[i][h] + shared.excess[row(i, h)], top = largest_of_quad(of_row);
        const int r = row(i, h);
        const float2 own = shared.own[r];
        const float of_own = own.y == 0.f ? -infinity() : own.x - p.geometry.unit_shift;
        const float base_of = fmaxf(top, of_own), base = base_of == -infinity() ? 0.f : base_of;
        float sum = l[i][h] * exp2_approx(of_row - base);
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        sum += own.y * exp2_approx(of_own - base);
        if (r >= count || lane % 4 != 0) continue;
        float norm = max_or_nan(base + __log2f(sum), shared.largest[r] - p.geometry.unit_shift);
        if (p.less_centre) norm -= centre[i][h];
        p.norms[of_head + r] = fabsf(norm) < infinity() ? norm : 0.f;
      }
  }
  // A warp's longest query.
  __device__ __forceinline__ void find_longest() {
    float longest = 0.f;
#pragma unroll
    for (int i = 0; i < kOfWarp; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float length = 0.f;
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const uint4& x = a[i][g][h];
#pragma unroll
          for (const uint32 pair : {x.x, x.y, x.z, x.w}) {
            const float low = Element::low(pair), high = Element::high(pair);
            length = fmaf(low, low, fmaf(high, high, length));
          }
        }
        length += __shfl_xor_sync(kFullWarp, length, 1);
        length += __shfl_xor_sync(kFullWarp, length, 2);
        length = length * p.scale_log2 * p.scale_log2;  // finite for longer, though the square alone may not be
        if (length < infinity()) longest = fmaxf(longest, length);
      }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) longest = fmaxf(longest, __shfl_xor_sync(kFullWarp, longest, step));
    if (lane == 0) shared.longest[warp] = longest;
  }
  // A segment is one block's where queries are taken to e4m3.
  __device__ __forceinline__ void store_scale() const {
    if (threadIdx.x != 0) return;
    float longest = shared.longest[0];
#pragma unroll
    for (int w = 1; w < Traits::kThreads / 32; ++w) longest = fmaxf(longest, shared.longest[w]);
    const int of_keys = shared.key_exponent;
    const int exponent = min(kQueryExponent - half_exponent(longest), kMostExponent - of_keys);
    p.query_scales[static_cast<int64>(head) * p.geometry.segments() + segment] =
        make_float2(p.scale_log2 * power_of_two(exponent), power_of_two(exponent + of_keys));
  }
};

// Block: kQueries of a segment.
template <class Traits>
__device__ __forceinline__ void query_norms(const QueryNormsParams& p, typename Traits::Shared& shared) {
  QueryNorms<Traits> norms(p, shared);
  if (p.geometry.ranked(norms.segment) <= 0 || norms.count <= 0) return;
  norms.walk();
  norms.locate();
  if (p.less_centre) norms.find_centre();  // late: registers are few
  if (p.query_scales) norms.store_scale();
  norms.store();
}

}  // namespace s2o
