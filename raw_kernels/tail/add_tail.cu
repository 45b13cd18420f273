// Adds what candidates weigh that a q tile has not visited, and what their values are. After pass 2, in place.
// reference/tail.py is the definition.
//
//   kTailSamples unvisited candidates, denser where they come earlier in the order, give for each query
//     mass  their sum of exp(score), by the share that each stands for, and less of it the fewer of them carry it
//     alone above 0 where one sample carries the weight and weighs much: as far as that it counts for itself alone
//     tilt  how far their mean score moves once they are weighted by it, over the variance of scores: 1 for scores that
//           are spread like a normal distribution, and kept within [0, 1]
//   regressed = mean_value + tilt * scale * covariance query, values on scores at the weighted mean score
//   value = regressed + max(believed, alone) * (mean of the samples' values by weight - regressed)
//   out, lse <- with the mass at that value; as they are where something of it is not finite
//
// A warp has 16 queries and multiplies them with all samples, half of these at a time, keeping the weights in registers.
// Then it takes kTailSlice dimensions at a time: of the covariance times its queries, and of its weights times the samples'
// values. A thread reads 16 bytes of a row at once, of queries and outputs from global and of what they are multiplied with
// from shared memory: it holds dimensions 8 t .. 8 t + 7 of each 32, t = lane % 4. A product takes dimensions in any order,
// if both sides have the same.
#include "tail/tail_rows.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, bool kAligned_, bool kPaged_>
struct TailTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kThreads = 256;
  static constexpr bool kAligned = kAligned_;  // every row of q, k, v and out starts on 16 bytes
  static constexpr bool kPaged = kPaged_;
  static constexpr int kChunks = kHeadDim / 8;  // 16 bytes each, of a row
  static_assert(kThreads / 32 * 16 == kTailQueries && kThreads == kTailSamples);
  // Elements: of half of the samples' keys; then of a slice of all their values, and of one of the covariance.
  static constexpr int kOfKeys = kTailHalf * kHeadDim, kOfValues = kTailSamples * kTailSlice;
  static constexpr int kOfSlices = kOfValues + kTailSlice * kHeadDim;
  struct Shared {
    uint16 rows[kOfKeys > kOfSlices ? kOfKeys : kOfSlices];
    TailRowsShared<kHeadDim> at;
  };
};

template <class Traits>
struct TailTile : TailRows<Traits> {
  using Rows = TailRows<Traits>;
  using Element = typename Traits::Element;
  using Rows::at, Rows::lane, Rows::p;
  static constexpr int kHeadDim = Traits::kHeadDim, kChunks = Traits::kChunks, kThreads = Traits::kThreads;
  static constexpr int kGroups = kHeadDim / 32, kTiles = Rows::kTiles;
  static constexpr int kRowsAtOnce = kThreads / kChunks;  // that the block copies
  static constexpr int kSlices = kTailHalf / kTailSlice;  // of half of the samples
  static constexpr int kValueRowsAtOnce = kThreads * 8 / kTailSlice, kValueRows = kTailSamples / kValueRowsAtOnce;
  // Groups of 8 rows that are multiplied together: one where registers are few.
#if __CUDA_ARCH__ >= 1000
  static constexpr int kTogether = kHeadDim > 128 ? 1 : 2;
#else
  static constexpr int kTogether = 2;
#endif

  typename Traits::Shared& shared;
  uint4 q[2][kGroups];                      // of both rows
  uint32 weights[2][kSlices * 2][4];        // [halves, 16 samples]: as a product has them, bfloat16

  __device__ __forceinline__ TailTile(const AddTailParams& p_, typename Traits::Shared& shared_)
      : Rows(p_, shared_.at), shared(shared_) {}

  // Where a chunk of a row stands in a buffer, in bytes: odd rows have halves of 8 chunks exchanged, so that reads meet
  // no two in a bank.
  static __device__ __forceinline__ uint32 place(int row, int chunk) {
    return row * (kHeadDim * 2) + (chunk ^ row % 2 * 4) * 16;
  }

  __device__ __forceinline__ void load_samples(int half) const {
    const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint32 to = shared_address(shared.rows) + place(first, chunk);
    const uint16* const* rows = at.samples + half * kTailHalf + first;
    const int dims = p.geometry.head_dim - chunk * 8;  // from this chunk on
    if constexpr (Traits::kAligned) {
#pragma unroll 1  // or its addresses take registers of the weights
      for (int r = 0; r < kTailHalf; r += kRowsAtOnce)
        cp_async_16_or_zeros(to + r * (kHeadDim * 2), rows[r] + chunk * 8, dims > 0);
      cp_async_commit();
    } else {
#pragma unroll 1
      for (int r = 0; r < kTailHalf; r += kRowsAtOnce)
        store_shared_16(to + r * (kHeadDim * 2), load_unaligned(rows[r], chunk * 8, chunk * 8 + dims));
    }
  }
  // Rows d .. d + kTailSlice of it, behind the values.
  __device__ __forceinline__ uint32 covariance() const { return shared_address(shared.rows + Traits::kOfValues); }
  __device__ __forceinline__ void load_covariance(int d) const {
#pragma unroll
    for (int i = threadIdx.x; i < kTailSlice * kChunks; i += kThreads)
      cp_async_16(covariance() + place(covariance_place(i / kChunks), i % kChunks),
                  at.work.covariance + d * kHeadDim + i * 8);
    cp_async_commit();
  }
  // A row has 64 bytes. Pair 4 t + j of them stands as number 4 j + t, so that columns 2 t and 2 t + 1 of four products of 8
  // columns are dimensions 8 t .. 8 t + 7 as covariance_place has them.
  static __device__ __forceinline__ uint32 value_place(int row, int chunk) {
    return row * (kTailSlice * 2) + (chunk ^ row / 2 % 4) * 16;
  }
  // Dimensions d .. d + kTailSlice of all samples' values.
  __device__ __forceinline__ void fetch_values(uint4 (&values)[kValueRows], int d) const {
    const int dims = p.geometry.head_dim - d, first = threadIdx.x % 4 * 8;
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      const uint16* row = at.values[i * kValueRowsAtOnce + threadIdx.x / 4] + d;
      values[i] = Traits::kAligned ? load_16_or_zeros(row + first, first < dims) : load_unaligned(row, first, dims);
    }
  }
  __device__ __forceinline__ void place_values(const uint4 (&values)[kValueRows]) const {
    const uint32 buffer = shared_address(shared.rows) + threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < kValueRows; ++i) {
      const int row = i * kValueRowsAtOnce + threadIdx.x / 4;
      const uint32 pairs[4] = {values[i].x, values[i].y, values[i].z, values[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) store_shared_4(buffer + value_place(row, j), Rows::as_bfloat16(pairs[j]));
    }
  }
  // Of this thread's part of all values; the block's threads look at each.
  __device__ __forceinline__ bool values_are_finite() const {
    constexpr int kOfThread = kTailSamples * kChunks / kThreads, kMost = Traits::kAligned ? 8 : 4;
    constexpr int kAtOnce = kOfThread < kMost ? kOfThread : kMost;
    const int dims = p.geometry.head_dim;
    bool finite = true;
#pragma unroll 1
    for (int begin = threadIdx.x; begin < kTailSamples * kChunks; begin += kAtOnce * kThreads) {
      uint4 values[kAtOnce];  // on their way together
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = begin + j * kThreads, first = i % kChunks * 8;
        const uint16* row = at.values[i / kChunks];
        values[j] = Traits::kAligned ? load_16_or_zeros(row + first, first < dims) : load_unaligned(row, first, dims);
      }
#pragma unroll
      for (const uint4& x : values)
        finite &= !(has_nonfinite<Element>(x.x) || has_nonfinite<Element>(x.y) || has_nonfinite<Element>(x.z) ||
                    has_nonfinite<Element>(x.w));
    }
    return finite;
  }
  // Slice d of the covariance and `values`, those of the slice; then `values` are the next slice's, on their way. Those of
  // unaligned rows, whose fetching takes registers, come when they are needed.
  __device__ __forceinline__ void load_slices(int d, uint4 (&values)[kValueRows], bool has_values) const {
    load_covariance(d);
    if (!Traits::kAligned && has_values) fetch_values(values, d);
    if (has_values) place_values(values);
    if (Traits::kAligned && has_values && d + kTailSlice < p.geometry.head_dim) fetch_values(values, d + kTailSlice);
    cp_async_wait<0>();
    __syncthreads();
  }
  __device__ __forceinline__ void load_queries() {
    if constexpr (Traits::kAligned) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint16* row = at.queries[Rows::row_of_tile() + h * 8];
#pragma unroll
        for (int g = 0; g < kGroups; ++g) {
          const int first = g * 32 + lane % 4 * 8;
          q[h][g] = load_16_or_zeros(row + first, row != nullptr && first < p.geometry.head_dim);
        }
      }
    } else {
      const uint32 buffer = shared_address(shared.rows);
#pragma unroll 1
      for (int i = threadIdx.x; i < kTailQueries * kChunks; i += kThreads) {
        const uint16* row = at.queries[i / kChunks];
        store_shared_16(buffer + place(i / kChunks, i % kChunks),
                        load_unaligned(row, i % kChunks * 8, row == nullptr ? 0 : p.geometry.head_dim));
      }
      __syncthreads();
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int g = 0; g < kGroups; ++g)
          q[h][g] = load_shared_16(buffer + place(Rows::row_of_tile() + h * 8, g * 4 + lane % 4));
      __syncthreads();  // samples take the place
    }
  }

  // acc[16, kTailSlice] = queries times as many rows of a buffer; `rows`: of the first, the byte that this thread reads
  // first but for the exchange of odd rows.
  template <class Type>
  __device__ __forceinline__ void multiply(float (&acc)[kTiles][4], uint32 rows) const {
    const uint32 odd = lane / 4 % 2 * 64, halves[2] = {rows + odd, rows + 64 - odd};
    clear(acc);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint32 low[4] = {q[0][g].x, q[1][g].x, q[0][g].y, q[1][g].y};
      const uint32 high[4] = {q[0][g].z, q[1][g].z, q[0][g].w, q[1][g].w};
#pragma unroll
      for (int j = 0; j < kTiles; j += kTogether) {
        const uint32 from = halves[g % 2] + g / 2 * 128 + j * (8 * kHeadDim * 2);
        uint4 b[kTogether];
#pragma unroll
        for (int i = 0; i < kTogether; ++i) b[i] = load_shared_16(from + i * (8 * kHeadDim * 2));
#pragma unroll
        for (int i = 0; i < kTogether; ++i) Type::mma(acc[j + i], low, b[i].x, b[i].y);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) Type::mma(acc[j + i], high, b[i].z, b[i].w);
      }
    }
  }
  // acc[16, kTailSlice] += weights of half of the samples times their values.
  __device__ __forceinline__ void multiply_values(float (&acc)[kTiles][4], int half) const {
    const uint32 buffer = shared_address(shared.rows) + half * (kTailHalf * kTailSlice * 2);
#pragma unroll
    for (int i = 0; i < kSlices * 2; ++i)
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32 b[4];
        ldmatrix_x4_transposed(b, buffer + value_place(i * 16 + lane % 16, j + lane / 16));
        Bfloat16::mma(acc[j], weights[half][i], b[0], b[1]);
        Bfloat16::mma(acc[j + 1], weights[half][i], b[2], b[3]);
      }
  }
  static __device__ __forceinline__ void clear(float (&acc)[kTiles][4]) {
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[j][e] = 0.f;
  }
  __device__ __forceinline__ uint32 thread_rows(uint32 buffer) const {
    return buffer + lane / 4 * (kHeadDim * 2) + lane % 4 * 16;
  }

  // Brings half of the samples, for which both halves have one place, and waits for it.
  __device__ __forceinline__ void bring(int half, bool is_there) const {
    if (!is_there) {
      __syncthreads();
      load_samples(half);
    }
    cp_async_wait<0>();
    __syncthreads();
  }
  template <int kHalf>
  __device__ __forceinline__ void add_half(SampleSums& sums) {
    const TailScores scores = Rows::scores();
    const int samples = tail_samples(at.work.left);
    float x[kTiles][4], weight[kTiles][4];
    const auto product = [&](int j, int h, int e) { return x[j][2 * h + e]; };
#pragma unroll
    for (int i = kSlices - 1; i >= 0; --i) {
      multiply<Element>(x, thread_rows(shared_address(shared.rows)) + i * (kTailSlice * kHeadDim * 2));
      if (kHalf == 0 && i == kSlices - 1) sums.template find_middle<kTiles>(product);
      sums.one = i * kTailSlice < samples / 2 ? 1.f / static_cast<float>(samples * samples) : 0.f;
      sums.template add<kTiles>(kHalf, i * kTailSlice, scores, product,
                                [&](int j, int h, int e, float x) { weight[j][2 * h + e] = x; });
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          weights[kHalf][i * 2 + j / 2][j % 2 * 2 + h] = Bfloat16::pack(weight[j][2 * h], weight[j][2 * h + 1]);
    }
  }
  __device__ __forceinline__ void find_sums(SampleSums& sums, bool first_is_there) {
    sums.clear();
    bring(0, first_is_there);
    add_half<0>(sums);
    sums.keep_even();
    bring(1, false);
    add_half<1>(sums);
  }
  __device__ __forceinline__ void add() {
    if (threadIdx.x < 32) Rows::describe();
    __syncthreads();
    if (at.work.left <= 0) return;
    Rows::load_mean();
    Rows::find_rows();
    __syncthreads();
    load_queries();
    load_samples(0);
    float lse[2];
    Rows::load_lse(lse);
    Rows::prefetch_outputs();

    SampleSums sums;
    sums.base[0] = lse[0];
    sums.base[1] = lse[1];
    find_sums(sums, true);
    if (__syncthreads_or(sums.overflow())) {  // seldom: sums in units of the largest weight
      sums.raise_base();
      find_sums(sums, false);
    }
    SampleFindings found = sums.finish(at.work.left, tail_samples(at.work.left), p.scale, lse);
    if (!moments_are_finite<kHeadDim>(at.mean_values)) found.mass[0] = found.mass[1] = 0.f;
    if (!__syncthreads_or(found.mass[0] > 0.f || found.mass[1] > 0.f)) return;  // and everybody has read the samples
    to_bfloat16();
    bool samples_count = __syncthreads_or(fmaxf(found.believed[0], found.alone[0]) > 0.f ||
                                          fmaxf(found.believed[1], found.alone[1]) > 0.f);
    if (samples_count) samples_count = __syncthreads_and(values_are_finite());
    uint4 values[kValueRows];
    if (Traits::kAligned && samples_count) fetch_values(values, 0);
    load_slices(0, values, samples_count);
    if (samples_count) believe(found);
    Rows::begin_outputs(found.mass);
    const float per_sample[2] = {__fdividef(1.f, found.weights[0]), __fdividef(1.f, found.weights[1])};
#pragma unroll 1
    for (int d = 0; d < p.geometry.head_dim; d += kTailSlice) {
      uint4 before[2];
      Rows::load_outputs(before, d);
      if (d > 0) load_slices(d, values, samples_count);
      float x[kTiles][4], sampled[kTiles][4];
      multiply<Bfloat16>(x, thread_rows(covariance()));
      clear(sampled);
      if (samples_count) {
        multiply_values(sampled, 0);
        multiply_values(sampled, 1);
      }
      const float* mean = at.mean_values + d + lane % 4 * 8;
      Rows::add_to_outputs(d, before, [&](int j, int h, int e) {
        const float regressed = fmaf(found.tilt[h] * p.scale, x[j][2 * h + e], mean[2 * j + e]);
        if (!samples_count) return regressed;
        const float value = fmaf(found.believed[h], sampled[j][2 * h + e] * per_sample[h] - regressed, regressed);
        return fabsf(value) < infinity() ? value : regressed;  // a sum of finite values may be none
      });
      __syncthreads();  // everybody has read what the next slice takes the place of
    }
  }
  // By how far both halves of the samples agree on the first slice.
  __device__ __forceinline__ void believe(SampleFindings& found) const {
    float x[kTiles][4], even[kTiles][4], odd[kTiles][4];
    multiply<Bfloat16>(x, thread_rows(covariance()));
    clear(even);
    clear(odd);
    multiply_values(even, 0);
    multiply_values(odd, 1);
    const float* mean = at.mean_values + lane % 4 * 8;
    HalvesAgreement agreement;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float per_even = __fdividef(1.f, found.even[h]);
      const float per_odd = __fdividef(1.f, found.weights[h] - found.even[h]);
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float regressed = fmaf(found.tilt[h] * p.scale, x[j][2 * h + e], mean[2 * j + e]);
          agreement.add(fmaf(even[j][2 * h + e], per_even, -regressed), fmaf(odd[j][2 * h + e], per_odd, -regressed));
        }
      agreement.end_row(found.may_bring(h));
    }
    const float believed = agreement.found();
#pragma unroll
    for (int h = 0; h < 2; ++h) found.believed[h] = fmaxf(found.believed[h] * believed, found.alone[h]);
  }
  __device__ __forceinline__ void to_bfloat16() {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        uint4& x = q[h][g];
        x = make_uint4(Rows::as_bfloat16(x.x), Rows::as_bfloat16(x.y), Rows::as_bfloat16(x.z), Rows::as_bfloat16(x.w));
      }
  }
};

// Block: a q tile.
template <class Traits>
__device__ __forceinline__ void add_tail(const AddTailParams& p, typename Traits::Shared& shared) {
  TailTile<Traits>(p, shared).add();
}

}  // namespace s2o
