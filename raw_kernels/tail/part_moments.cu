// Sums over parts of the keys, of which moments are made (key_moments.cu): each key is read once, whatever the number of
// groups that it leads.
//
//   k, v [batch, kv_heads, seqlen_k, head_dim] or pages
//     -> part_products [batch * kv_heads, parts, kHeadDim of values, kHeadDim of keys], float32: of value * key
//     -> part_sums [batch * kv_heads, parts, 2, kHeadDim], float32: of values, and of keys
//
// A sample counts as often as its share has keys. moment_groups.cuh says which keys are samples and where parts end.
#include "common/pages.cuh"
#include "tail/moment_groups.cuh"

namespace s2o {

constexpr int kMomentStep = 64;  // keys of a step
constexpr int kMomentThreads = 256;

struct PartMomentsParams {
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  Tensor<const uint16> v;  // like k
  float* part_products;    // [batch * kv_heads, parts, kHeadDim (rows), kHeadDim (columns)]
  float* part_sums;        // [batch * kv_heads, parts, 2, kHeadDim]
  Geometry geometry;
  int kv_heads;
  int parts, grain_shift;
  int aligned;             // every row of k and v starts on 16 bytes
  Pages pages;             // of a paged cache
};

template <class Element_, int kHeadDim_, bool kPaged_>
struct MomentTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_;
  static constexpr bool kPaged = kPaged_;
  static constexpr int kRows = kHeadDim == 128 ? 128 : 64;  // of a covariance, that a block finds
  static constexpr int kRowTiles = kRows / 2 / 16, kColumnTiles = kHeadDim / 4 / 8;  // of a warp: one of two by four
  // Rows lie 16 bytes further apart than they are long, so that ldmatrix meets no two in a bank.
  static constexpr int kColumnPitch = kHeadDim + 8, kRowPitch = kRows + 8;
  struct Shared {
    uint16 columns[2][kMomentStep * kColumnPitch];  // keys
    uint16 rows[2][kMomentStep * kRowPitch];        // values, a slice of them
  };
};

template <class Traits>
struct PartMoments {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kRows = Traits::kRows;
  static constexpr int kRowTiles = Traits::kRowTiles, kColumnTiles = Traits::kColumnTiles;

  const PartMomentsParams& p;
  typename Traits::Shared& shared;
  int slice, part, kv_head, first, samples, lane;  // `first` of the part's samples
  int row_part, column_part, row0, column0;    // the warp's
  float products[kRowTiles][kColumnTiles][4];  // sums of row * column
  // Of warps with the first rows those of their columns, every row alike; of two others those of rows, the second half
  // and the first, every column alike.
  float sums[kRowTiles > kColumnTiles ? kRowTiles : kColumnTiles][4];

  __device__ __forceinline__ PartMoments(const PartMomentsParams& p_, typename Traits::Shared& shared_)
      : p(p_), shared(shared_), lane(threadIdx.x % 32), products{}, sums{} {
    constexpr int kSlices = kHeadDim / kRows;
    const uint32 of_slices = blockIdx.x / kSlices;
    slice = blockIdx.x % kSlices;
    part = of_slices % p.parts;
    kv_head = of_slices / p.parts;
    first = moment_samples(part_end(part, p.grain_shift));
    samples = moment_samples(part_end(part + 1, p.grain_shift)) - first;
    const int warp = __shfl_sync(kFullWarp, threadIdx.x / 32, 0);
    row_part = warp % 2;
    column_part = warp / 2;
    row0 = row_part * (kRows / 2);
    column0 = column_part * (kHeadDim / 4);
  }

  // Starts the copy of kDims dimensions of a step's rows from `first_dim` on, zeros where there is no such sample.
  template <int kDims>
  __device__ __forceinline__ void copy(uint16* to, const Tensor<const uint16>& x, int step, int first_dim) const {
    constexpr int kChunks = kDims / 8, kAtOnce = kMomentThreads / kChunks, kPitch = kDims + 8;
    const int batch = kv_head / p.kv_heads, chunk = threadIdx.x % kChunks * 8;
    const int dims = p.geometry.head_dim - first_dim - chunk;  // from this thread's first on
    const uint16* rows = head_rows<Traits::kPaged>(x, batch, kv_head % p.kv_heads) + first_dim + chunk;
    to += threadIdx.x / kChunks * kPitch + chunk;
    const auto copy_chunk = [&](int r) {
      const int sample = step * kMomentStep + r + static_cast<int>(threadIdx.x) / kChunks;
      const bool present = sample < samples && dims > 0;
      const int at = moment_place(first + min(sample, samples - 1));
      const uint16* row = rows;
      if constexpr (Traits::kPaged) {
        row += PagedRows{x, p.pages, batch, 0}.offset(at);
      } else {
        row += at * x.row;
      }
      if (p.aligned) {
        cp_async_16_or_zeros(shared_address(to + r * kPitch), row, present);
      } else {
        *reinterpret_cast<uint4*>(to + r * kPitch) = load_unaligned(row, 0, present ? dims : 0);
      }
    };
    if (p.aligned) {
#pragma unroll
      for (int r = 0; r < kMomentStep; r += kAtOnce) copy_chunk(r);
    } else {
#pragma unroll 1
      for (int r = 0; r < kMomentStep; r += kAtOnce) copy_chunk(r);
    }
  }
  __device__ __forceinline__ void load(int step) const {
    if (step * kMomentStep < samples) {
      copy<kHeadDim>(shared.columns[step % 2], p.k, step, 0);
      copy<kRows>(shared.rows[step % 2], p.v, step, slice * kRows);
    }
    cp_async_commit();
  }

  __device__ __forceinline__ void load_rows(uint32 (&a)[4], uint32 rows, int key, int row) const {
    ldmatrix_x4_transposed(
        a, rows + ((key + lane % 8 + lane / 16 * 8) * Traits::kRowPitch + row + lane / 8 % 2 * 8) * 2);
  }
  // products += rows^T columns, and the sums of both as products with ones.
  __device__ __forceinline__ void add(int step) {
    const uint32 columns = shared_address(shared.columns[step % 2]), rows = shared_address(shared.rows[step % 2]);
    const uint32 one = Element::pack(1.f, 1.f), ones[4] = {one, one, one, one};
#pragma unroll
    for (int c = 0; c < kMomentStep; c += 16) {
      uint32 a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) load_rows(a[i], rows, c, row0 + i * 16);
#pragma unroll
      for (int j = 0; j < kColumnTiles; j += 2) {
        uint32 b[4];
        ldmatrix_x4_transposed(
            b, columns + ((c + lane % 16) * Traits::kColumnPitch + column0 + j * 8 + lane / 16 * 8) * 2);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Element::mma(products[i][j], a[i], b[0], b[1]);
          Element::mma(products[i][j + 1], a[i], b[2], b[3]);
        }
        if (row_part == 0) {
          Element::mma(sums[j], ones, b[0], b[1]);
          Element::mma(sums[j + 1], ones, b[2], b[3]);
        }
      }
      if (row_part == 1 && column_part < 2) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          uint32 other[4];
          load_rows(other, rows, c, (1 - column_part) * (kRows / 2) + i * 16);
          Element::mma(sums[i], other, one, one);
        }
      }
    }
  }

  // What a sample counts for is a power of two, the same for all of a part.
  __device__ __forceinline__ void store() const {
    const float share = static_cast<float>(1 << share_shift(first));
    const int64 at = static_cast<int64>(kv_head) * p.parts + part;
    float* of_values = p.part_sums + at * (2 * kHeadDim) + slice * kRows;
    float* of_keys = p.part_sums + at * (2 * kHeadDim) + kHeadDim;
    if (slice == 0 && row_part == 0 && lane < 4) {
#pragma unroll
      for (int j = 0; j < kColumnTiles; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e) of_keys[column0 + j * 8 + lane * 2 + e] = sums[j][e] * share;
    }
    if (row_part == 1 && column_part < 2 && lane % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          of_values[(1 - column_part) * (kRows / 2) + i * 16 + lane / 4 + h * 8] = sums[i][2 * h] * share;
    }
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = slice * kRows + row0 + i * 16 + lane / 4 + h * 8;
        float* target = p.part_products + (at * kHeadDim + row) * kHeadDim + column0 + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < kColumnTiles; ++j)
          *reinterpret_cast<float2*>(target + j * 8) =
              make_float2(products[i][j][2 * h] * share, products[i][j][2 * h + 1] * share);
      }
  }
};

// Block: a KV head, a part and a slice of the products' rows.
template <class Traits>
__device__ __forceinline__ void part_moments(const PartMomentsParams& p, typename Traits::Shared& shared) {
  PartMoments<Traits> moments(p, shared);
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
  moments.store();
}

}  // namespace s2o
