// add_tail on Hopper (add_tail.cu says what it does, and has the portable one): by wgmma.
//
// A warpgroup has 64 queries in registers and multiplies them with all samples, then with all rows of the covariance,
// kTailSlice at a time.
#include "sm90/wgmma_tile.cuh"
#include "tail/tail_rows.cuh"

namespace s2o {

template <class Element_, int kHeadDim_, bool kPaged_>
struct TailSm90Traits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kChunks = kHeadDim / 8, kThreads = 256;
  static constexpr bool kAligned = true, kPaged = kPaged_;
  static_assert(kThreads / 128 * 64 == kTailSamples, "as many queries as samples");
  struct Shared {
    uint16 samples[kTailSamples * kHeadDim];
    uint16 covariance[kHeadDim * kHeadDim];
    TailRowsShared<kHeadDim> at;
  };
};

// Lane t of four gets word t of each of their four words.
__device__ __forceinline__ void transpose_of_quad(uint32 (&x)[4]) {
  const bool upper = threadIdx.x & 2, odd = threadIdx.x & 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32 other = __shfl_xor_sync(kFullWarp, upper ? x[i] : x[i + 2], 2);
    x[i] = upper ? other : x[i];
    x[i + 2] = upper ? x[i + 2] : other;
  }
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32 other = __shfl_xor_sync(kFullWarp, odd ? x[i] : x[i + 1], 1);
    x[i] = odd ? other : x[i];
    x[i + 1] = odd ? x[i + 1] : other;
  }
}

template <class Traits>
struct TailTileSm90 : TailRows<Traits> {
  using Rows = TailRows<Traits>;
  using Element = typename Traits::Element;
  using Rows::at, Rows::lane, Rows::p;
  static constexpr int kHeadDim = Traits::kHeadDim, kChunks = Traits::kChunks, kSteps = kHeadDim / 16;
  static constexpr int kRowsAtOnce = Traits::kThreads / kChunks;  // that the block copies
  static constexpr int kMeet = 1;  // the first of the named barriers, one a warpgroup

  typename Traits::Shared& shared;
  uint32 q[kSteps][4];       // as wgmma has them: of 16 dimensions, both rows' first half, then the second
  float x[kTailSlice / 2];   // products

  __device__ __forceinline__ TailTileSm90(const AddTailParams& p_, typename Traits::Shared& shared_)
      : Rows(p_, shared_.at), shared(shared_) {}

  __device__ __forceinline__ void load_samples() const {
    const int first = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint32 to = atom_chunk<kTailSamples>(shared_address(shared.samples), first, chunk);
#pragma unroll
    for (int r = 0; r < kTailSamples; r += kRowsAtOnce)
      cp_async_16_or_zeros(to + r * 128, at.samples[first + r] + chunk * 8, chunk * 8 < p.geometry.head_dim);
    cp_async_commit();
  }
  __device__ __forceinline__ void load_covariance() const {
    const int row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    const uint16* from = at.work.covariance + threadIdx.x * 8;
#pragma unroll
    for (int i = 0; i < 32; i += kRowsAtOnce) {  // each 32 rows stand alike
      const uint32 to = atom_chunk<kHeadDim>(shared_address(shared.covariance), covariance_place(row + i), chunk);
#pragma unroll
      for (int r = 0; r < kHeadDim; r += 32) cp_async_16(to + r * 128, from + (r + i) * kHeadDim);
    }
    cp_async_commit();
  }
  // 16 bytes at a time, as they lie.
  __device__ __forceinline__ void load_queries() {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint16* row = at.queries[Rows::row_of_tile() + h * 8];
#pragma unroll
      for (int c = 0; c < kSteps; c += 2) {
        const int first = c * 16 + lane % 4 * 8;
        const uint4 loaded = load_16_or_zeros(row + first, row != nullptr && first < p.geometry.head_dim);
        q[c][h] = loaded.x;
        q[c][h + 2] = loaded.y;
        q[c + 1][h] = loaded.z;
        q[c + 1][h + 2] = loaded.w;
      }
    }
  }
  __device__ __forceinline__ void order_queries() {
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int c = 0; c < kSteps; c += 2) {
        uint32 words[4] = {q[c][h], q[c][h + 2], q[c + 1][h], q[c + 1][h + 2]};
        transpose_of_quad(words);
        q[c][h] = words[0];
        q[c][h + 2] = words[1];
        q[c + 1][h] = words[2];
        q[c + 1][h + 2] = words[3];
      }
  }
  __device__ __forceinline__ void to_bfloat16() {
#pragma unroll
    for (int c = 0; c < kSteps; ++c)
#pragma unroll
      for (int i = 0; i < 4; ++i) q[c][i] = Rows::as_bfloat16(q[c][i]);
  }

  // x[64, kTailSlice] = queries times as many rows of a tile of kRows, in flight; `rows` describes the first.
  template <class Type, int kRows>
  __device__ __forceinline__ void issue(uint32 rows) {
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < kSteps; ++c) Wgmma<Type>::rs_rows(x, q[c], descriptor_at(rows, atom_columns<kRows>(c)), c > 0);
    wgmma_commit();
  }
  __device__ __forceinline__ void finish() {
    wgmma_wait<0>();
    finished(x);
  }

  __device__ __forceinline__ void add() {
    if (threadIdx.x < 32) Rows::describe();
    __syncthreads();
    if (at.work.left <= 0) return;
    Rows::load_mean();
    load_covariance();
    Rows::find_rows();
    __syncthreads();
    load_samples();
    load_queries();
    float lse[2];
    Rows::load_lse(lse);
    Rows::prefetch_outputs();
    order_queries();
    cp_async_wait<0>();
    fence_for_wgmma();
    __syncthreads();

    const int group = __shfl_sync(kFullWarp, threadIdx.x / 128, 0);
    if (group * 64 >= at.work.count) return;
    const auto any = [&](bool mine) { return named_count(kMeet + group, 128, mine) > 0; };
    const auto product = [&](int j, int h, int e) { return x[j * 4 + 2 * h + e]; };
    const uint32 samples = tile_descriptor(shared_address(shared.samples), 0);
    float mass[2], tilt[2];
    Rows::find_mass(lse, mass, tilt, [&](int first) {
      issue<Element, kTailSamples>(descriptor_at(samples, first * 128));
      finish();
    }, product, any);
    if (!any(mass[0] > 0.f || mass[1] > 0.f)) return;
    to_bfloat16();
    Rows::begin_outputs(mass, tilt);
    const uint32 covariance = tile_descriptor(shared_address(shared.covariance), 0);
#pragma unroll 1
    for (int d = 0; d < p.geometry.head_dim; d += kTailSlice) {
      __syncwarp();  // not all lanes have written
      issue<Bfloat16, kHeadDim>(descriptor_at(covariance, d * 128));
      uint4 before[2];
      Rows::load_outputs(before, d);
      finish();
      Rows::add_to_outputs(d, before, product);
    }
  }
};

// Block: a q tile.
template <class Traits>
__device__ __forceinline__ void add_tail_sm90(const AddTailParams& p, typename Traits::Shared& shared) {
  TailTileSm90<Traits>(p, shared).add();
}

}  // namespace s2o
