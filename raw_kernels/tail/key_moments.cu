// What unvisited keys have in common: means and covariances of leading values and keys, from at most kMomentKeys of
// them at equal distances.
//
//   k, v [batch, kv_heads, seqlen_k, head_dim] or pages
//     -> mean_values [batch * kv_heads, groups, kHeadDim], float32; NaN in each of kMomentSlice values of which a
//        moment is not finite
//     -> covariances [batch * kv_heads, groups, kHeadDim of values, kHeadDim of keys], bfloat16
//
// moment_groups.cuh says how many keys a group has.
#include "common/pages.cuh"
#include "tail/moment_groups.cuh"

namespace s2o {

constexpr int kMomentKeys = spec::kMomentKeys;
constexpr int kMomentSlice = 64;      // dimensions of values that a block takes
constexpr int kMomentStep = 64;       // keys of a step
constexpr int kMomentThreads = 256;

struct KeyMomentsParams {
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  Tensor<const uint16> v;  // like k
  float* mean_values;      // [batch * kv_heads, groups, kHeadDim]
  uint16* covariances;     // [batch * kv_heads, groups, kHeadDim (values), kHeadDim (keys)]
  Geometry geometry;
  int kv_heads;
  int groups, first_group;
  int aligned;             // every row of k and v starts on 16 bytes
  Pages pages;             // of a paged cache
};

template <class Element_, int kHeadDim_, bool kPaged_>
struct MomentTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kParts = kHeadDim == 64 ? 2 : 1;              // of a slice, by warps
  static constexpr int kDims = kHeadDim / (kMomentThreads / 32 / kParts);  // of keys, that a warp takes
  static constexpr int kRowTiles = kMomentSlice / 16 / kParts, kColumnTiles = kDims / 8;
  // Rows lie 16 bytes further apart than they are long, so that ldmatrix meets no two in a bank.
  static constexpr int kKeyPitch = kHeadDim + 8, kValuePitch = kMomentSlice + 8;
  struct Shared {
    uint16 keys[2][kMomentStep * kKeyPitch];
    uint16 values[2][kMomentStep * kValuePitch];
    float mean_values[kMomentSlice];
    int nonfinite;
  };
};

template <class Traits>
struct KeyMoments {
  using Element = typename Traits::Element;
  static constexpr int kRowTiles = Traits::kRowTiles, kColumnTiles = Traits::kColumnTiles;

  const KeyMomentsParams& p;
  typename Traits::Shared& shared;
  int slice, group, kv_head, keys, samples, lane, row0, column0;
  float products[kRowTiles][kColumnTiles][4];  // sums of value * key
  float key_sums[kColumnTiles][4];             // every row alike
  float value_sums[kRowTiles][4];              // every column alike

  __device__ __forceinline__ KeyMoments(const KeyMomentsParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), lane(threadIdx.x % 32), products{}, key_sums{}, value_sums{} {
    constexpr int kSlices = Traits::kHeadDim / kMomentSlice;
    slice = blockIdx.x % kSlices;
    group = blockIdx.x / kSlices % p.groups;
    kv_head = blockIdx.x / kSlices / p.groups;
    keys = moment_keys(p.first_group + group);
    samples = min(keys, kMomentKeys);
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    row0 = warp % Traits::kParts * (kMomentSlice / Traits::kParts);
    column0 = warp / Traits::kParts * Traits::kDims;
  }

  // 16 bytes of a row, zeros where there is no such sample.
  __device__ __forceinline__ void copy(uint16* to, const Tensor<const uint16>& x, int sample, int first) const {
    const int batch = kv_head / p.kv_heads, head_dim = p.geometry.head_dim;
    const bool present = sample < samples && first < head_dim;
    // The middle of the sample's share of the keys.
    const int64 key = present ? (2ll * sample + 1) * keys / (2 * samples) : 0;
    const uint16* row = head_rows<Traits::kPaged>(x, batch, kv_head % p.kv_heads);
    if constexpr (Traits::kPaged) {
      row += present ? PagedRows{x, p.pages, batch, 0}.offset(static_cast<int>(key)) : 0;
    } else {
      row += key * x.row;
    }
    if (p.aligned && first + 8 <= head_dim) {
      cp_async_16_or_zeros(shared_address(to), row + first, present);
    } else {
      *reinterpret_cast<uint4*>(to) = present ? load_unaligned(row, first, head_dim) : make_uint4(0, 0, 0, 0);
    }
  }
  __device__ __forceinline__ void load(int step) const {
    if (step * kMomentStep < samples) {
      for (int i = threadIdx.x; i < kMomentStep * Traits::kHeadDim / 8; i += kMomentThreads) {
        const int r = i / (Traits::kHeadDim / 8), first = i % (Traits::kHeadDim / 8) * 8;
        copy(shared.keys[step % 2] + r * Traits::kKeyPitch + first, p.k, step * kMomentStep + r, first);
      }
      for (int i = threadIdx.x; i < kMomentStep * kMomentSlice / 8; i += kMomentThreads) {
        const int r = i / (kMomentSlice / 8), first = i % (kMomentSlice / 8) * 8;
        copy(shared.values[step % 2] + r * Traits::kValuePitch + first, p.v, step * kMomentStep + r,
             slice * kMomentSlice + first);
      }
    }
    cp_async_commit();
  }

  // products += values^T keys, and the sums of both as products with ones.
  __device__ __forceinline__ void add(int step) {
    const uint32 key_rows = shared_address(shared.keys[step % 2]), value_rows = shared_address(shared.values[step % 2]);
    const uint32 one = Element::pack(1.f, 1.f), ones[4] = {one, one, one, one};
#pragma unroll
    for (int c = 0; c < kMomentStep; c += 16) {
      uint32 a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
        ldmatrix_x4_transposed(a[i], value_rows + ((c + lane % 8 + lane / 16 * 8) * Traits::kValuePitch + row0 +
                                                   i * 16 + lane / 8 % 2 * 8) * 2);
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        uint32 b[4];
        const int at = (c + lane % 16) * Traits::kKeyPitch + column0 + j * 8 + lane / 16 * 8;
        ldmatrix_x4_transposed(b, key_rows + at * 2);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Element::mma(products[i][j], a[i], b[0], b[1]);
          Element::mma(products[i][j + 1], a[i], b[2], b[3]);
        }
        Element::mma(key_sums[j], ones, b[0], b[1]);
        Element::mma(key_sums[j + 1], ones, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) Element::mma(value_sums[i], a[i], one, one);
    }
  }

  __device__ __forceinline__ void store() {
    const float share = samples ? 1.f / samples : 0.f;
    const int64 row = static_cast<int64>(kv_head) * p.groups + group;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int of_slice = row0 + i * 16 + lane / 4 + h * 8, d = slice * kMomentSlice + of_slice;
        const float mean_value = value_sums[i][2 * h] * share;
        if (column0 == 0 && lane % 4 == 0) shared.mean_values[of_slice] = mean_value;
        uint16* target = p.covariances + (row * Traits::kHeadDim + d) * Traits::kHeadDim + column0 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j) {
          float x[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            x[e] = products[i][j][2 * h + e] * share - mean_value * (key_sums[j][e] * share);
            finite &= fabsf(x[e]) < infinity();
          }
          *reinterpret_cast<uint32*>(target + j * 8) = Bfloat16::pack(x[0], x[1]);
        }
      }
    if (!finite) shared.nonfinite = 1;
    __syncthreads();
    if (threadIdx.x < kMomentSlice)
      p.mean_values[row * Traits::kHeadDim + slice * kMomentSlice + threadIdx.x] =
          shared.nonfinite ? __int_as_float(0x7fffffff) : shared.mean_values[threadIdx.x];
  }
};

// Block: a KV head, a group and a slice of the values.
template <class Traits>
__device__ __forceinline__ void key_moments(const KeyMomentsParams& p, typename Traits::Shared& shared) {
  if (threadIdx.x == 0) shared.nonfinite = 0;
  KeyMoments<Traits> moments(p, shared);
  const int steps = (moments.samples + kMomentStep - 1) / kMomentStep;
  moments.load(0);
  for (int step = 0; step < steps; ++step) {
    moments.load(step + 1);
    cp_async_wait<1>();
    __syncthreads();
    moments.add(step);
    __syncthreads();  // every warp is done with this buffer
  }
  cp_async_wait<0>();
  __syncthreads();
  moments.store();
}

}  // namespace s2o
