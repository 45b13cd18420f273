// The portable attention tile (sm_80 and newer): 4 or 8 warps hold kBlockM query rows and walk a list of keys,
// kStep at a time, with cp.async, ldmatrix and mma.sync. Pass 1 walks a contiguous range, pass 2 an index array;
// everything else is the same, so it is written once.
#pragma once
#include "common/attention_params.cuh"
#include "common/keep_finite.cuh"
#include "common/tau_ladder.cuh"
#include "common/value_skip.cuh"
#include "sm80/keys.cuh"

namespace s2o {

// Query rows of a tile and their online-softmax state. A thread's rows are lane / 4 + 8 * i of its warp's.
template <class Traits>
struct AttentionTile {
  using Element = typename Traits::Element;
  using Shared = typename Traits::Shared;
  static constexpr int kRowTiles = Traits::kRowTiles, kThreads = Traits::kThreads, kStep = Traits::kStep;

  float acc[kRowTiles][Traits::kDimTiles][4];
  float m[kRowTiles][2];     // running maximum of scale_log2 * score
  float l[kRowTiles][2];     // sum up to the last stop check, the same in a quad
  float mass[kRowTiles][2];  // this thread's part of the sum since then

  Shared& shared;
  const AttentionParams& params;
  int lane, warp_row;        // the warp's first row of the tile
  ValueGroup<kSkipsValues<Traits>> values;  // the warp's rows
  LadderWalk<Traits, kRowTiles * Traits::kDimTiles * 2, kThreads> ladder;

  __device__ __forceinline__ AttentionTile(Shared& shared_, const AttentionParams& params_)
      : shared(shared_), params(params_), lane(threadIdx.x % 32), warp_row(threadIdx.x / 32 * (16 * kRowTiles)) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        m[i][h] = -infinity();
        l[i][h] = mass[i][h] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d)
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][d][e] = 0.f;
    }
  }

  __device__ __forceinline__ int row(int i, int h) const { return warp_row + i * 16 + h * 8 + lane / 4; }
  static __device__ __forceinline__ bool is_large(float x) { return fabsf(x) > 4194304.f; }  // 2^22, see softmax

  // Gathers the queries of a tile that has some. A thread's positions are all on their way at once, and then its rows:
  // one after the other they took longer than hundreds of keys.
  template <class Query>
  __device__ __forceinline__ void load_queries(const Query& query) {
    constexpr int kChunks = Traits::kHeadDim / 8, kApart = kThreads / kChunks;
    constexpr int kRows = Traits::kBlockM / kApart, kTogether = Traits::kAligned ? kRows : 1;
    const int head_dim = params.geometry.head_dim, chunk = threadIdx.x % kChunks;
    const uint16* q = params.q.at(query.batch(params.heads), query.head_in_batch(params.heads));
    if (chunk * 8 < head_dim) q += chunk * 8;
    const uint32 tile = shared_address(shared.q);
#pragma unroll 1
    for (int first = threadIdx.x / kChunks; first < Traits::kBlockM; first += kTogether * kApart) {
      int position[kTogether];
      uint4 x[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) position[i] = query.nearest(first + i * kApart);
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint16* row = q + position[i] * params.q.row;
        x[i] = Traits::kAligned ? *reinterpret_cast<const uint4*>(row) : load_unaligned(row, 0, head_dim - chunk * 8);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const uint32 s = params.sign_mask;
        const bool there = query.has(first + i * kApart) && chunk * 8 < head_dim;
        store_shared_16(chunk_address<Traits>(tile, first + i * kApart, chunk),
                        there ? make_uint4(x[i].x ^ s, x[i].y ^ s, x[i].z ^ s, x[i].w ^ s) : make_uint4(s, s, s, s));
      }
    }
  }

  // Takes up the state that pass 1 left: acc = out * l. That of 16 rows of the warp is on its way at once.
  template <class Query>
  __device__ __forceinline__ void resume(const Query& query) {
    const int columns = params.geometry.head_dim - lane % 4 * 2;  // of a row from the thread's first on
    const uint16* out = params.out.at(query.batch(params.heads), query.head_in_batch(params.heads)) + lane % 4 * 2;
    const float2* state = params.state + static_cast<int64>(query.head) * params.geometry.seqlen_q;
    int position[kRowTiles][2];
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) position[i][h] = query.nearest(row(i, h));
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      uint32 pairs[2][Traits::kDimTiles];  // of outputs
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 ml = state[position[i][h]];
        const uint16* source = out + position[i][h] * params.out.row;
        const bool there = query.has(row(i, h));
        m[i][h] = there ? ml.x : -infinity();
        l[i][h] = there ? ml.y : 0.f;
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d) {
          pairs[h][d] = 0;
          if constexpr (Traits::kAligned) {
            if (columns > d * 8) pairs[h][d] = *reinterpret_cast<const uint32*>(source + d * 8);
          } else {
            if (columns > d * 8) pairs[h][d] = source[d * 8];
            if (columns > d * 8 + 1) pairs[h][d] |= static_cast<uint32>(source[d * 8 + 1]) << 16;
          }
        }
      }
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; ++d)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          acc[i][d][2 * h] = Element::low(pairs[h][d]) * l[i][h];
          acc[i][d][2 * h + 1] = Element::high(pairs[h][d]) * l[i][h];
        }
      asm volatile("" ::: "memory");  // or the next rows' loads would take more registers than there are
    }
  }

  // Says where the block's keys and values lie; seen by all threads after the first barrier of walk(). `limit`: walk's.
  template <class Query>
  __device__ __forceinline__ void point_to_keys(const Query& query, int first_key, const int* order, int limit) {
    if (threadIdx.x != 0) return;
    const int batch = query.batch(params.heads), kv_head = query.kv_head(params.heads, params.kv_heads);
    shared.k_rows = head_rows<Traits::kPaged>(params.k, batch, kv_head);
    shared.v_rows = head_rows<Traits::kPaged>(params.v, batch, kv_head);
    if (Traits::kPaged) shared.pages = params.pages.of(query.table_row(params.heads));
    shared.first_key = first_key;
    shared.limit = limit;
    shared.order = order;
  }

  // s[row, key] = q k^T of one step, or tanh(cap_scale * q k^T); times scale() it is what exp2 is taken of
  __device__ __forceinline__ void scores(float (&s)[kRowTiles][Traits::kKeyTiles][4], uint32 k_tile) const {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[i][j][e] = 0.f;
    const uint32 q_chunk = chunk_address<Traits>(shared_address(shared.q), warp_row + lane % 16, lane / 16);
    const uint32 k_chunk = chunk_address<Traits>(k_tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int c = 0; c < Traits::kHeadDim / 16; ++c) {
      uint32 a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) ldmatrix_x4(a[i], chunk_beside<Traits>(q_chunk, i * 16, c * 2));
#pragma unroll
      for (int j = 0; j < Traits::kKeyTiles; j += 2) {
        uint32 b[4];
        ldmatrix_x4(b, chunk_beside<Traits>(k_chunk, j * 8, c * 2));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Element::mma(s[i][j], a[i], b[0], b[1]);
          Element::mma(s[i][j + 1], a[i], b[2], b[3]);
        }
      }
    }
    const auto each = [&](auto change) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] = change(s[i][j][e]);
    };
    if constexpr (spec::kSoftcap) each([&](float x) { return tanh_approx(x * params.cap_scale); });
    if (Traits::kAnyScale && !(params.scale_log2 > 0.f)) each([&](float x) { return x * params.scale_log2; });
  }
  // What scores are still to be multiplied with: times 0 masked ones, minus infinity, would be NaN.
  __device__ __forceinline__ float scale() const {
    return Traits::kAnyScale && !(params.scale_log2 > 0.f) ? 1.f : params.scale_log2;
  }

  // Turns scores into weights, moves the state to the new maximum and packs the weights for the next product. With
  // kSkipsValues, true if the warp leaves that product out; `rows`: of the tile.
  __device__ __forceinline__ bool softmax(float (&s)[kRowTiles][Traits::kKeyTiles][4],
                                          uint32 (&p)[kRowTiles][Traits::kKeyTiles][2], int rows = 0) {
    // Rows that are taken together, so that one's shuffles run beside another's: as many as leave no kernel to spill. Over
    // pages and in ladders that are fewest before 9.0.
#if __CUDA_ARCH__ < 900
    constexpr int kFewest = 1;
#else
    constexpr int kFewest = 2;
#endif
    constexpr int kRows = 2 * kRowTiles;
    constexpr int kTogether = kSkipsValues<Traits> || !Traits::kAligned ? 2 : kCopiesRuns<Traits> ? kRows : kFewest;
    bool slight = kSkipsValues<Traits>;
#pragma unroll
    for (int i = 0; i < kRows; i += kTogether) slight &= softmax<kTogether>(i, s, p, rows);
    return kSkipsValues<Traits> && __all_sync(kFullWarp, slight);
  }
  // The same for kRows rows of the thread, from its row `first` on.
  template <int kRows>
  __device__ __forceinline__ bool softmax(int first, float (&s)[kRowTiles][Traits::kKeyTiles][4],
                                          uint32 (&p)[kRowTiles][Traits::kKeyTiles][2], int rows) {
    float top[kRows], rescale_by[kRows];
    const auto each_row = [&](auto change) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) change((first + i) / 2, (first + i) % 2, top[i], rescale_by[i]);
    };
    each_row([&](int i, int h, float& top, float&) {
      top = fmaxf(s[i][0][2 * h], s[i][0][2 * h + 1]);
#pragma unroll
      for (int j = 1; j < Traits::kKeyTiles; ++j) top = fmaxf(top, fmaxf(s[i][j][2 * h], s[i][j][2 * h + 1]));
    });
    each_row([&](int, int, float& top, float&) { top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 1)); });
    each_row([&](int, int, float& top, float&) { top = fmaxf(top, __shfl_xor_sync(kFullWarp, top, 2)); });
    bool slight = kSkipsValues<Traits>, large = false, moved = false;
    each_row([&](int i, int h, float& top, float& rescale_by) {
      float x = top * scale();
      if constexpr (kSkipsValues<Traits>) slight &= row(i, h) >= rows || values.is_slight(x, m[i][h]);
      x = fmaxf(x, m[i][h]);
      top = x == -infinity() ? 0.f : x;
      rescale_by = exp2_approx(m[i][h] - top);
      m[i][h] = x;
      mass[i][h] *= rescale_by;
      moved |= rescale_by != 1.f;
      large |= is_large(top);
    });
    // Keys come in descending importance: most steps leave every maximum of the warp where it was.
    if (__any_sync(kFullWarp, moved)) {
      each_row([&](int i, int h, float&, float& rescale_by) {
        if (!__any_sync(kFullWarp, rescale_by != 1.f)) return;
        l[i][h] *= rescale_by;
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d) {
          acc[i][d][2 * h] *= rescale_by;
          acc[i][d][2 * h + 1] *= rescale_by;
        }
      });
    }
    const auto weigh = [&](auto by) {  // what the scores of a row are still to be multiplied with, by its maximum
      each_row([&](int i, int h, float& top, float&) {
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j) {
          const float x = exp2_approx(fmaf(s[i][j][2 * h], by(top), -top));
          const float y = exp2_approx(fmaf(s[i][j][2 * h + 1], by(top), -top));
          mass[i][h] += x + y;
          p[i][j][h] = Element::pack(x, y);
        }
      });
    };
    // exp2(s * scale - top) in one instruction is off by the rounding of top; where that is more than half a unit the
    // product is rounded first, so that the weight of the maximum is exactly 1. The warp's other rows keep their bits.
    if (__any_sync(kFullWarp, large)) {
      each_row([&](int i, int h, float& top, float&) {
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e)
            if (is_large(top)) s[i][j][e] = __fmul_rn(s[i][j][e], scale());
      });
      weigh([&](float top) { return is_large(top) ? 1.f : scale(); });
    } else {
      weigh([&](float) { return scale(); });
    }
    return slight;
  }

  // acc += p v of one step
  __device__ __forceinline__ void accumulate(const uint32 (&p)[kRowTiles][Traits::kKeyTiles][2], uint32 v_tile) {
    const uint32 v_chunk = chunk_address<Traits>(v_tile, lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j < Traits::kKeyTiles; j += 2) {
      uint32 a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        a[i][0] = p[i][j][0];
        a[i][1] = p[i][j][1];
        a[i][2] = p[i][j + 1][0];
        a[i][3] = p[i][j + 1][1];
      }
#pragma unroll
      for (int d = 0; d < Traits::kDimTiles; d += 2) {
        uint32 b[4];
        ldmatrix_x4_transposed(b, chunk_beside<Traits>(v_chunk, j * 8, d));
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          Element::mma(acc[i][d], a[i], b[0], b[1]);
          Element::mma(acc[i][d + 1], a[i], b[2], b[3]);
        }
      }
    }
  }

  // A masked key has weight 0, but 0 * NaN and 0 * Inf are NaN: where a step that is masked row by row holds values
  // that are not finite, those keys leave the matrix product and are added to just the rows that see them.
  __device__ __forceinline__ void add_nonfinite(const uint32 (&p)[kRowTiles][Traits::kKeyTiles][2], uint32 v_tile,
                                             int first_limit) {
    constexpr int kChunks = Traits::kHeadDim / 8;
    const uint64 keys = shared.nonfinite;
    for (int key = 0; key < kStep; ++key) {
      if (!(keys >> key & 1)) continue;
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h)
          {
            uint32 pair = p[i][j][h];
            asm volatile("" : "+r"(pair));  // or the compiler indexes p by key, which puts it into local memory
            if (j == key / 8 && lane % 4 == key % 8 / 2)
              shared.p_column[row(i, h)] = key % 2 ? Element::high(pair) : Element::low(pair);
          }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          if (key >= first_limit + row(i, h)) continue;
          const float weight = shared.p_column[row(i, h)];
#pragma unroll
          for (int d = 0; d < Traits::kDimTiles; ++d) {
            const uint32 x = load_shared_4(chunk_address<Traits>(v_tile, key, d) + lane % 4 * 4);
            acc[i][d][2 * h] += weight * Element::low(x);
            acc[i][d][2 * h + 1] += weight * Element::high(x);
          }
        }
      __syncthreads();
      if (threadIdx.x < kChunks)
        store_shared_16(chunk_address<Traits>(v_tile, key, threadIdx.x), make_uint4(0, 0, 0, 0));
    }
    __syncthreads();
  }

  __device__ __forceinline__ bool find_nonfinite(uint32 v_tile) {
    constexpr int kChunks = Traits::kHeadDim / 8;
    if (threadIdx.x == 0) shared.nonfinite = 0;
    __syncthreads();
    bool found = false;
    for (int r = threadIdx.x / kChunks; r < kStep; r += kThreads / kChunks) {
      const uint4 x = load_shared_16(chunk_address<Traits>(v_tile, r, threadIdx.x % kChunks));
      if (has_nonfinite<Element>(x.x) || has_nonfinite<Element>(x.y) || has_nonfinite<Element>(x.z) ||
          has_nonfinite<Element>(x.w)) {
        found = true;
        atomicOr(&shared.nonfinite, 1ull << r);
      }
    }
    return __syncthreads_or(found);
  }

  // Adds the mass since the last stop check to l; true if it is less than tau of l in every row that counts.
  __device__ __forceinline__ bool stop_check(int rows, float tau = 0.f) {
    bool small = true;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = mass[i][h];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        small &= row(i, h) >= rows || sum < tau * l[i][h];
        l[i][h] += sum;
        mass[i][h] = 0.f;
      }
    return small;
  }

  // Whether so many key tiles of block_n have all keys that the tile waits for.
  __device__ __forceinline__ bool has_least(int visited) const {
    return visited * params.steps_per_tile * kStep >= shared.least_keys;
  }
  // Whether a warp whose rows all gained too little, `small`, votes to stop after so many key tiles: before the least keys
  // have been visited after so many in a row, which are counted in shared memory, as registers are few.
  __device__ __forceinline__ bool waited_enough(bool small, int visited) const {
    small = __all_sync(kFullWarp, small);
    float& counter = shared.p_column[threadIdx.x / 32];
    const float in_a_row = small ? counter + 1.f : 0.f;
    __syncwarp();  // all lanes have read
    counter = in_a_row;
    return in_a_row >= shared.patience || (small && has_least(visited));
  }
  // Of a ladder: the largest share of l that the mass since the last stop check is.
  __device__ __forceinline__ float largest_gain(int rows) const {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float sum = mass[i][h];
        sum += __shfl_xor_sync(kFullWarp, sum, 1);
        sum += __shfl_xor_sync(kFullWarp, sum, 2);
        if (row(i, h) < rows) largest = fmaxf(largest, ladder_gain(sum, l[i][h]));
      }
    return largest;
  }
  // The outputs as they are: this thread's pair i of them.
  __device__ __forceinline__ uint32 pair_of_output(int i) const {
    constexpr int kPairs = Traits::kDimTiles * 2;
    const int tile = i / kPairs, d = i % kPairs / 2, h = i % 2;
    const float inverse = l[tile][h] == 0.f ? 0.f : 1.f / l[tile][h];
    return pack_finite<Element>(acc[tile][d][2 * h] * inverse, acc[tile][d][2 * h + 1] * inverse);
  }
  __device__ __forceinline__ void finish_ladder(int q_tile, int rows) const {
    constexpr int kPairs = Traits::kDimTiles * 2;
    ladder.finish(static_cast<const LadderAttentionParams&>(params), q_tile, threadIdx.x,
                  [&](int i) { return pair_of_output(i); }, [&](int i) { return row(i / kPairs, i % 2) < rows; });
  }
  // The taus of the ladder, of those that every warp votes for, at which the block stops now.
  __device__ __forceinline__ uint32 ladder_stops(uint32 votes) const {
    uint32 stops = 0;
    for (int b = kLadder - 1; b >= 0; --b) {  // a larger tau stops no later
      if (ladder.has_stopped(b)) continue;
      if (!__syncthreads_and(votes >> b & 1)) break;
      stops |= 1u << b;
    }
    return stops;
  }

  // Walks `keys`. Row r sees the first `given_limit` of them, which point_to_keys was told too, or r more with kCausal.
  // With kStops, ends after the first key tile that adds too little to each of the first `rows` rows. Returns the number
  // of key tiles visited. `begin` loads what the rows begin with, while the first keys are on their way.
  template <bool kCausal, bool kStops, class Keys, class Begin>
  __device__ __forceinline__ int walk(const Keys& keys, int given_limit, int rows, const Begin& begin) {
    constexpr int kStages = Traits::kStages;
    // Read back from shared memory where ptxas lacks a register to keep it; with one stage reading it is what spills.
    constexpr bool kReadsLimit = Traits::kPaged || (kCausal && kStages > 1);
    const int head_dim = params.geometry.head_dim;
    const int steps = (keys.count + kStep - 1) / kStep;
    const auto k_tile = [&](int step) { return shared_address(shared.k[step % kStages]); };
    const auto v_tile = [&](int step) { return shared_address(shared.v[step % kStages]); };
    const auto load_k = [&](int step) {
      if (step < steps) load_step<Traits>(k_tile(step), shared.k_rows, params.k, head_dim, keys, step);
      keys.prefetch(step + kStages);
      cp_async_commit();
    };
    const auto load_v = [&](int step) {
      if (step < steps) load_step<Traits>(v_tile(step), shared.v_rows, params.v, head_dim, keys, step);
      cp_async_commit();
    };

    __syncthreads();
#pragma unroll
    for (int step = 0; step < kStages; ++step) keys.prefetch(step);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    // Copies are committed in the order K0 V0 K1 V1 ...; the one that is needed is always followed by 2 (kStages - 1).
#pragma unroll
    for (int step = 0; step < kStages; ++step) {
      load_k(step);
      if (step < kStages - 1) load_v(step);
    }
    begin();
    __syncthreads();  // where there is no step, too: the outputs take the place of the queries

    int visited = 0;
    for (int step = 0; step < steps; ++step) {
      float s[kRowTiles][Traits::kKeyTiles][4];     // [rows, keys] of this thread
      uint32 p[kRowTiles][Traits::kKeyTiles][2];    // the weights, packed in pairs of keys

      cp_async_wait<2 * (kStages - 1)>();
      __syncthreads();  // K of this step is there, and every warp is done with V of the step before
      load_v(step + kStages - 1);
      asm volatile("" : "+r"(warp_row), "+r"(lane));  // hidden as in load_step
      if constexpr (kSkipsValues<Traits> && Traits::kPaged) asm volatile("" : "+r"(values.place));
      scores(s, k_tile(step));
      const int limit = kReadsLimit ? shared.limit : given_limit;
      const bool masked = (step + 1) * kStep > limit;
      const bool causal = kCausal && params.geometry.is_causal;
      if (masked) {
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int j = 0; j < Traits::kKeyTiles; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int key = step * kStep + j * 8 + lane % 4 * 2 + e % 2;
              if (key >= limit + (causal ? row(i, e / 2) : 0)) s[i][j][e] = -infinity();
            }
      }
      const bool skips = softmax(s, p, rows);
      if constexpr (kSkipsValues<Traits>) {
        if (lane == 0)
          values.template count<16 * kRowTiles>(threadIdx.x / 32, kThreads / 32, rows, step,
                                                min(kStep, limit - step * kStep), skips);
      }

      bool stop = false;
      uint32 stops = 0;  // of a ladder
      if (step + 1 == steps || (kStops && step + 1 == (visited + 1) * params.steps_per_tile)) {
        ++visited;
        if constexpr (kWalksLadder<Traits>) {
          stops = ladder.votes(largest_gain(rows), shared.p_column[lane % kLadder]);
          stop_check(rows);
        } else if constexpr (kSkipsValues<Traits>) {  // of lists, which have no least keys
          stop = stop_check(rows, shared.tau) && kStops;
        } else if constexpr (kStops) {
          stop = waited_enough(stop_check(rows, shared.tau), visited);
        } else {
          stop_check(rows);
        }
      }
      cp_async_wait<2 * (kStages - 1)>();
      if constexpr (kWalksLadder<Traits>) {
        stops = ladder_stops(stops);
        stop = stops & 1;
      } else if constexpr (kStops) {
        stop = __syncthreads_and(stop);  // V is there, and every warp is done with K of this step
      } else {
        __syncthreads();
      }
      if (!stop) load_k(step + kStages);
      if (causal && masked && find_nonfinite(v_tile(step)))
        add_nonfinite(p, v_tile(step), limit - step * kStep);
      if (!skips) accumulate(p, v_tile(step));
      if (stop) break;
      if constexpr (kWalksLadder<Traits>)
        ladder.keep(static_cast<const LadderAttentionParams&>(params), stops, threadIdx.x,
                    [&](int i) { return pair_of_output(i); });
    }
    cp_async_wait<0>();
    return visited;
  }

  // Leaves (m, l) for a launch that resumes it. After store().
  template <class Query>
  __device__ __forceinline__ void keep_state(const Query& query, float2* kept) const {
    kept += static_cast<int64>(query.head) * params.geometry.seqlen_q;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int position = query(row(i, h));
        if (position >= 0 && lane % 4 == 0) kept[position] = make_float2(m[i][h], l[i][h]);
      }
  }

  // out = acc / l and lse, scattered to the rows' own positions; kKeepState keeps (m, l) for pass 2.
  template <bool kKeepState, class Query>
  __device__ __forceinline__ void store(const Query& query) {
    constexpr int kChunks = Traits::kHeadDim / 8;
    const int head_dim = params.geometry.head_dim;
    const int64 state_row = static_cast<int64>(query.head) * params.geometry.seqlen_q;
    uint16* out = params.out.at(query.batch(params.heads), query.head_in_batch(params.heads));
    const uint32 tile = shared_address(shared.q);  // a warp reads and writes only its own rows of it
    constexpr int kApart = 32 / kChunks, kRows = 16 * kRowTiles / kApart;
    const int chunk = lane % kChunks, first = warp_row + lane / kChunks;
    int of_state[kRowTiles][2], of_output[kRows];  // positions, all on their way before one is waited for
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) of_state[i][h] = query.nearest(row(i, h));
#pragma unroll
    for (int i = 0; i < kRows; ++i)
      if constexpr (Traits::kAligned) of_output[i] = query.nearest(first + i * kApart);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = row(i, h), position = of_state[i][h];
        keep_finite<Element, Traits::kDimTiles * 2>(
            [&](int e) -> float& { return acc[i][e / 2][2 * h + e % 2]; }, l[i][h]);
        const float inverse = l[i][h] == 0.f ? 0.f : 1.f / l[i][h];
        if (query.has(r) && lane % 4 == 0) {
          if (kKeepState) params.state[state_row + position] = make_float2(m[i][h], l[i][h]);
          if (params.lse)
            params.lse[state_row + position] =
                l[i][h] == 0.f ? -infinity() : (m[i][h] + __log2f(l[i][h])) * 0.69314718055994531f;
        }
#pragma unroll
        for (int d = 0; d < Traits::kDimTiles; ++d)
          store_shared_4(chunk_address<Traits>(tile, r, d) + lane % 4 * 4,
                         Element::pack(acc[i][d][2 * h] * inverse, acc[i][d][2 * h + 1] * inverse));
      }
    __syncwarp();
#pragma unroll(Traits::kAligned ? kRows : 1)
    for (int i = 0; i < kRows; ++i) {
      if (!query.has(first + i * kApart)) continue;
      const uint4 x = load_shared_16(chunk_address<Traits>(tile, first + i * kApart, chunk));
      const int position = Traits::kAligned ? of_output[i] : query.nearest(first + i * kApart);
      uint16* target = out + position * params.out.row + chunk * 8;
      if constexpr (Traits::kAligned) {
        if (chunk * 8 < head_dim) store_global_16(target, x.x, x.y, x.z, x.w);
      } else {
        const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 8; ++e)
          if (chunk * 8 + e < head_dim) target[e] = static_cast<uint16>(pairs[e / 2] >> (e % 2 * 16));
      }
    }
  }
};

}  // namespace s2o
