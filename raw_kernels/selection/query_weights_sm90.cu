// Scores of units of keys by the weight that any single query of a segment gives them, of segments of up to 128 queries.
//
//   scores[row, unit] = max over queries r and the unit's groups of keys c of
//                       scale_log2 * r . mean(c) + log2(share(c)) - norm(r), in float16
//
//   rows are (head, segment) pairs of the chunk; Chunk::place says where their scores are
//
// Products are of 8-bit floats, e4m3, of which keys have two of every four, and their sums float16: four times as many at a
// time as of 16-bit numbers, and pairs of sums are what instructions of float16 take. A product has 64 rows of unit_rows
// (unit_rows.cu), the groups of a few units, and 256 columns, the queries of two neighbouring segments: a thread has two
// groups of a unit and 64 queries, so that the largest is found without leaving the thread but for the last two to four
// steps. Keys come from registers, as queries take up the bandwidth of shared memory.
//
// Four blocks of one warpgroup share a multiprocessor, or three, as shared memory has room: while one finds maxima,
// another's products run. A thread of it has the copy engine bring tiles: a warp for that would take a block's registers.
#include "selection/segment_block.cuh"
#include "selection/unit_tile.cuh"
#include "sm90/hopper.cuh"

namespace s2o {

// This is where a block's first tile lies in memory: its rows and their shares. The next tiles follow.
struct TileSource {
  const unsigned char* rows;
  const uint16* shares;
};

template <class Element_, int kHeadDim_, int kClusters_>
struct QueryWeightTraits {
  using Element = Element_;
  static constexpr int kClusters = kClusters_;  // groups of keys of a unit
  static constexpr int kHeadDim = kHeadDim_, kThreads = 128;
  static constexpr int kSegments = 2, kQueries = 128;  // of a block; of a segment
  static constexpr int kQuad = 4, kStages = 2 * kQuad;  // a quad: four tiles, copied together; two quads
  // Under the product of this tile of a quad the other half is filled anew. It must be the second: where no branch is
  // between, ptxas (12.3 to 13.5) takes a product out whose maxima LaneMaxima adds to the next one's. This branch keeps
  // the first product, the wait for the next quad the third (tests/test_machine_code.py).
  static constexpr int kRefill = 1;
  using Tile = KeyTile<kHeadDim>;
  // Where a segment's scores go, and how products become these.
  struct Segment {
    uint16* scores;
    int end;      // of its units
    float back;   // from products to scores
    uint32 onto;  // from log2 of a share to products, twice
  };
  struct alignas(1024) Shared {
    unsigned char queries[kSegments * kQueries * kHeadDim];
    unsigned char not_finite[kSegments * kQueries];  // whether a query has an element that is not
    unsigned char units[kStages][Tile::kBytes];
    uint16 shares[kStages][kTileRows];
    uint64 full[2], empty[2];     // barriers of each half: its tiles have landed, all threads are done with them
    Segment segments[kSegments];  // registers have no room for what is needed once in a few tiles
    TileSource source;
  };
  static_assert(UnitRow<kClusters>::kTiles % kQuad == 0);
};

// The number of 32-bit registers that hold the products of a thread, two float16 each.
constexpr int kProducts = 64;

// d[64, 256] (+)= a[64, 64] b[64, 256], of e4m3 with float16 sums. Of a, `kept` has two of every four columns, and `choices`
// says which. b is the lower half of a descriptor, kHigh its upper.
template <uint32 kHigh>
__device__ __forceinline__ void multiply_kept(uint32 (&d)[kProducts], const uint4& kept, uint32 choices, uint32 b,
                                              int accumulate) {
  asm volatile(
      "{\n.reg .pred p;\n.reg .b64 db;\nsetp.ne.b32 p, %65, 0;\nmov.b64 db, {%64, %66};\n"
      "wgmma.mma_async.sp.sync.aligned.m64n256k64.f16.e4m3.e4m3 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, "
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%67, %68, %69, %70}, db, %71, 0, p, 1, 1;\n}"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3]), "+r"(d[4]), "+r"(d[5]), "+r"(d[6]), "+r"(d[7]), "+r"(d[8]),
        "+r"(d[9]), "+r"(d[10]), "+r"(d[11]), "+r"(d[12]), "+r"(d[13]), "+r"(d[14]), "+r"(d[15]), "+r"(d[16]),
        "+r"(d[17]), "+r"(d[18]), "+r"(d[19]), "+r"(d[20]), "+r"(d[21]), "+r"(d[22]), "+r"(d[23]), "+r"(d[24]),
        "+r"(d[25]), "+r"(d[26]), "+r"(d[27]), "+r"(d[28]), "+r"(d[29]), "+r"(d[30]), "+r"(d[31]), "+r"(d[32]),
        "+r"(d[33]), "+r"(d[34]), "+r"(d[35]), "+r"(d[36]), "+r"(d[37]), "+r"(d[38]), "+r"(d[39]), "+r"(d[40]),
        "+r"(d[41]), "+r"(d[42]), "+r"(d[43]), "+r"(d[44]), "+r"(d[45]), "+r"(d[46]), "+r"(d[47]), "+r"(d[48]),
        "+r"(d[49]), "+r"(d[50]), "+r"(d[51]), "+r"(d[52]), "+r"(d[53]), "+r"(d[54]), "+r"(d[55]), "+r"(d[56]),
        "+r"(d[57]), "+r"(d[58]), "+r"(d[59]), "+r"(d[60]), "+r"(d[61]), "+r"(d[62]), "+r"(d[63])
      : "r"(b), "r"(accumulate), "n"(kHigh), "r"(kept.x), "r"(kept.y), "r"(kept.z), "r"(kept.w), "r"(choices));
}

// Starts the copy of `bytes` neighbouring bytes to shared memory, which `barrier` is told of.
__device__ __forceinline__ void copy_bytes(void* to, const void* from, uint32 bytes, uint64& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

__device__ __forceinline__ uint32 product_of_pairs(uint32 a, uint32 b) {
  uint32 y;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

__device__ __forceinline__ uint32 sum_of_pairs(uint32 a, uint32 b) {
  uint32 y;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
  return y;
}

// The places of tiles in shared memory: two halves, each of which a quad of tiles comes to in turn.
template <class Traits>
struct TileStages {
  using Shared = typename Traits::Shared;
  static constexpr int kQuad = Traits::kQuad;
  static constexpr int kBytes = kQuad * Traits::Tile::kBytes, kShareBytes = kQuad * kTileRows * 2;

  // Has the copy engine bring a quad of tiles; for one thread to call.
  static __device__ __forceinline__ void bring(Shared& shared, int half, int quad, bool with_shares) {
    uint64& full = shared.full[half];
    barrier_expect(full, kBytes + (with_shares ? kShareBytes : 0));
    copy_bytes(shared.units[half * kQuad], shared.source.rows + static_cast<int64>(quad) * kBytes, kBytes, full);
    if (with_shares)
      copy_bytes(shared.shares[half * kQuad], shared.source.shares + quad * (kQuad * kTileRows), kShareBytes, full);
  }
  static __device__ __forceinline__ void wait_for(Shared& shared, int half, int quad) {
    barrier_wait(shared.full[half], quad / 2 & 1);
  }
  // This thread is done with a quad of tiles, no sooner than they have been multiplied: the copy engine overtakes reads
  // that are merely on their way, as products that read shared memory at its full rate hold them up. Each thread arrives for
  // its own reads, which racecheck follows; it does not see that __syncwarp would do for one of a warp.
  static __device__ __forceinline__ void leave(Shared& shared, int half) { barrier_arrive(shared.empty[half]); }
  static __device__ __forceinline__ void wait_until_left(Shared& shared, int half, int quad) {
    barrier_wait(shared.empty[half], quad / 2 & 1);
  }
};

// What a thread has of a tile of keys.
template <class Traits>
struct TileKeys {
  using Tile = typename Traits::Tile;
  using Shared = typename Traits::Shared;
  uint4 kept[Tile::kParts];
  uint32 choices[Tile::kParts];
  uint32 shares;  // of row lane / 4 of the warp, above it that of the row 8 further

  // Reads a tile that has landed.
  __device__ __forceinline__ void take(const Shared& shared, int stage, bool with_shares) {
    const unsigned char* units = shared.units[stage];
#pragma unroll
    for (int c = 0; c < Tile::kParts; ++c) {
      kept[c] = *reinterpret_cast<const uint4*>(units + Tile::kept_of(threadIdx.x, c));
      choices[c] = *reinterpret_cast<const uint32*>(units + Tile::choices_of(threadIdx.x) + c * 4);
    }
    if (with_shares) {
      const uint16* of_rows = shared.shares[stage] + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;
      shares = of_rows[0] | static_cast<uint32>(of_rows[8]) << 16;
    }
  }
};

// The largest of the lanes that have columns, and groups, of the same units, tile after tile: of two tiles half of the
// lanes go on with one each, of four a quarter each, and so on: at the end each lane has the units of one tile (UnitRow).
template <int kClusters>
struct LaneMaxima {
  static_assert(UnitRow<kClusters>::kTiles == 2 * kClusters, "a tile for each of the lanes");
  uint32 of_one, of_two, of_four, of_eight;  // waiting for as many tiles more
  uint32 last;

  // Tile `of_quad` of a quad. Whether that was the last tile of its units; then `last` is the lane's.
  __device__ __forceinline__ bool add(int quad, int of_quad, uint32 x) {
    if (of_quad % 2 == 0) {
      of_one = x;
      return false;
    }
    x = shared_out<1>(of_one, x);
    if (of_quad / 2 == 0) {
      of_two = x;
      return false;
    }
    x = shared_out<2>(of_two, x);
    if constexpr (kClusters >= 4) {
      if (quad % 2 == 0) {
        of_four = x;
        return false;
      }
      x = shared_out<4>(of_four, x);
    }
    if constexpr (kClusters >= 8) {
      if (quad / 2 % 2 == 0) {
        of_eight = x;
        return false;
      }
      x = shared_out<8>(of_eight, x);
    }
    last = x;
    return true;
  }
  // Of two lanes that differ in kBit the one without it goes on with the first, the other with the second.
  template <int kBit>
  static __device__ __forceinline__ uint32 shared_out(uint32 first, uint32 second) {
    const bool has_it = threadIdx.x & kBit;
    const uint32 other = __shfl_xor_sync(kFullWarp, has_it ? first : second, kBit);
    return Float16::larger_or_nan(has_it ? second : first, other);
  }
};

// Takes the block's queries to 8 bits in shared memory, and returns what their products are less: -norm of the thread's
// columns, in pairs. Past a segment's last query, and where there is no second segment, the first stands in.
template <class Traits>
struct BlockQueries {
  using Element = typename Traits::Element;
  static constexpr int kHeadDim = Traits::kHeadDim, kLanes = kHeadDim / 8;
  static constexpr int kAtOnce = Traits::kThreads / kLanes;
  using Columns = Spread<kHeadDim>;

  static constexpr uint32 kFourNan = 0x7f7f7f7f;  // of e4m3
  // A bit for each number of four that is NaN.
  static __device__ __forceinline__ uint32 nan_bits(uint32 four) {
    return (four & kFourNan) + 0x01010101u & 0x80808080u;
  }

  template <class Block>
  static __device__ __forceinline__ void load(const RankKeysParams& p, const Block& block,
                                              typename Traits::Shared& shared) {
    const Geometry& g = p.geometry;
    const int lane = threadIdx.x % kLanes, slot = threadIdx.x / kLanes;
    const uint16* of_head = p.q.at(block.head / p.heads, block.head % p.heads);
#pragma unroll 1
    for (int s = 0; s < Traits::kSegments; ++s) {
      const int n = block.segment(s), count = g.query_count(n);
      const float factor = p.query_scales[static_cast<int64>(block.head) * g.segments() + n].x;
      const uint16* rows = of_head + static_cast<int64>(g.query_begin(n)) * p.q.row;
#pragma unroll 8
      for (int r = slot; r < Traits::kQueries; r += kAtOnce) {
        float x[8];
        Columns::template unpack<Element>(
            x, Columns::load(rows + static_cast<int64>(r < count ? r : 0) * p.q.row, lane, g.head_dim));
        const uint2 packed = make_uint2(pack_e4m3(x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor),
                                        pack_e4m3(x[4] * factor, x[5] * factor, x[6] * factor, x[7] * factor));
        if (nan_bits(packed.x) | nan_bits(packed.y)) shared.not_finite[s * Traits::kQueries + r] = 1;
        *reinterpret_cast<uint2*>(shared.queries + byte_of_row<kHeadDim>(s * Traits::kQueries + r, lane * 8)) = packed;
      }
    }
  }
  // What a key leaves out is not multiplied: of a query that is not finite all is NaN, so that every product is.
  static __device__ __forceinline__ void spread_nan(typename Traits::Shared& shared) {
    for (int r = threadIdx.x; r < Traits::kSegments * Traits::kQueries; r += Traits::kThreads)
      if (shared.not_finite[r])
        for (int byte = 0; byte < kHeadDim; byte += 16)
          *reinterpret_cast<uint4*>(shared.queries + r * kHeadDim + byte) =
              make_uint4(kFourNan, kFourNan, kFourNan, kFourNan);
  }

  // less[16 * s + j]: of queries 8 * j + lane % 4 * 2 and the next of segment s.
  template <class Block>
  static __device__ __forceinline__ void norms(const RankKeysParams& p, const Block& block,
                                               uint32 (&less)[kProducts / 2]) {
    const Geometry& g = p.geometry;
#pragma unroll
    for (int s = 0; s < Traits::kSegments; ++s) {
      const int n = block.segment(s), count = g.query_count(n);
      const float factor = p.query_scales[static_cast<int64>(block.head) * g.segments() + n].y;
      const float* norms = p.norms + static_cast<int64>(block.head) * g.seqlen_q + g.query_begin(n);
      const auto of = [&](int r) { return -norms[r < count ? r : 0] * factor; };
#pragma unroll
      for (int j = 0; j < kProducts / 4; ++j) {
        const int r = 8 * j + threadIdx.x % 4 * 2;
        less[s * (kProducts / 4) + j] = Float16::pack(of(r), of(r + 1));
      }
    }
  }
};

// The largest of a thread's products of a tile: the first segment's in the lower half, the second's in the upper.
//
// d      d[2 j + h]: row lane / 4 of the warp and, h = 1, the one 8 further; columns 8 j + lane % 4 * 2 and the next
// less   less[j]: what is added to products of these columns
// share  share(s, h): what is added to those of segment s and row h; with kEachKey the same for both rows
template <bool kEachKey, class Share>
__device__ __forceinline__ uint32 largest_of_tile(const uint32 (&d)[kProducts], const uint32 (&less)[kProducts / 2],
                                                  const Share& share) {
  constexpr int kOfSegment = kProducts / 4;
  uint32 best[2];
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    uint32 of[2];
#pragma unroll
    for (int h = 0; h < (kEachKey ? 1 : 2); ++h)
#pragma unroll
      for (int j = s * kOfSegment; j < (s + 1) * kOfSegment; ++j) {
        // Of rows with one share the larger one comes first, to the same bits: norms are taken off half as many.
        const uint32 larger = Float16::larger_or_nan(d[2 * j], d[2 * j + 1]);
        const uint32 x = sum_of_pairs(kEachKey ? larger : d[2 * j + h], less[j]);
        of[h] = j == s * kOfSegment ? x : Float16::larger_or_nan(of[h], x);
      }
    best[s] = sum_of_pairs(of[0], share(s, 0));
    if constexpr (!kEachKey) best[s] = Float16::larger_or_nan(best[s], sum_of_pairs(of[1], share(s, 1)));
  }
  // Both columns of a pair.
  return Float16::larger_or_nan(__byte_perm(best[0], best[1], 0x5410), __byte_perm(best[0], best[1], 0x7632));
}

// The scores of `quads` quads of tiles from first_super on. kEachKey: each key of a unit is a group of its own, so that
// all have one share.
template <class Traits, bool kEachKey, class Block>
__device__ __forceinline__ void weigh_tiles(const RankKeysParams& p, const Block& block, typename Traits::Shared& shared,
                                            int first_super, int quads) {
  constexpr int kQuad = Traits::kQuad, kHeadDim = Traits::kHeadDim;
  using Row = UnitRow<Traits::kClusters>;
  using Tile = typename Traits::Tile;
  using Keys = TileKeys<Traits>;
  using Stages = TileStages<Traits>;
  // Descriptors: eight rows to the next eight, and the swizzle of a row's length.
  constexpr uint32 kHigh = (kHeadDim == 128 ? 0x40000000u : 0x80000000u) | 8 * kHeadDim >> 4;
  const uint32 b = tile_descriptor(shared_address(shared.queries), 0);
  constexpr float kShare = Traits::kClusters == 8 ? -3.f : Traits::kClusters == 4 ? -2.f : -1.f;  // log2 of a key's
  uint32 key_share[Traits::kSegments];  // as products are
#pragma unroll
  for (int s = 0; s < Traits::kSegments; ++s)
    key_share[s] = product_of_pairs(Float16::pack(kShare, kShare), shared.segments[s].onto);

  uint32 d[kProducts], less[kProducts / 2];
  BlockQueries<Traits>::norms(p, block, less);
  Keys keys;
  LaneMaxima<Traits::kClusters> maxima = {};
  Stages::wait_for(shared, 0, 0);
  keys.take(shared, 0, !kEachKey);
#pragma unroll 1
  for (int quad = 0; quad < quads; ++quad) {
    const int half = quad % 2;
    const bool last = quad + 1 == quads;
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      wgmma_fence();
#pragma unroll
      for (int c = 0; c < Tile::kParts; ++c)
        multiply_kept<kHigh>(d, keys.kept[c], keys.choices[c], descriptor_at(b, c * 64), c > 0);
      wgmma_commit();
      if (i == Traits::kRefill) {
        if (threadIdx.x == 0 && quad > 0 && !last) {
          Stages::wait_until_left(shared, half ^ 1, quad - 1);
          Stages::bring(shared, half ^ 1, quad + 1, !kEachKey);
        }
        __syncwarp();
      }
      const bool ends = i + 1 == kQuad;
      if (ends && !last) Stages::wait_for(shared, half ^ 1, quad + 1);
      wgmma_wait<0>();
      const uint32 of_rows = keys.shares;
      const auto share = [&](int s, int h) {
        if constexpr (kEachKey) return key_share[s];
        return product_of_pairs(__byte_perm(of_rows, 0, h ? 0x3232 : 0x1010), shared.segments[s].onto);
      };
      if (ends) Stages::leave(shared, half);
      // Under the maxima, as the next product need not wait for them; after the last tile the quad's first.
      keys.take(shared, ends ? (last ? half : half ^ 1) * kQuad : half * kQuad + i + 1, !kEachKey);
#pragma unroll
      for (int j = 0; j < kProducts; ++j) asm volatile("" : "+r"(d[j])::"memory");  // nothing is read before

      if (maxima.add(quad, i, largest_of_tile<kEachKey>(d, less, share))) {
        const int unit = (first_super + quad / (Row::kTiles / kQuad)) * kSuperUnits + threadIdx.x / 32 * 32 +
                         Row::kept_unit(threadIdx.x % 32);
#pragma unroll
        for (int s = 0; s < Traits::kSegments; ++s) {
          const auto& to = shared.segments[s];
          const float x = s == 0 ? Float16::low(maxima.last) : Float16::high(maxima.last);
          const bool near = is_near(p, block.segment(s), unit);
          if (unit < to.end) to.scores[unit] = static_cast<uint16>(Float16::pack(near ? infinity() : x * to.back, 0.f));
        }
        __syncwarp();
      }
    }
  }
}

// Block: two neighbouring segments of a head, and a part of their units.
template <class Traits>
__device__ __forceinline__ void query_weights_sm90(const RankKeysParams& p, typename Traits::Shared& shared) {
  const Geometry& g = p.geometry;
  using Row = UnitRow<Traits::kClusters>;
  using Tile = typename Traits::Tile;
  const SegmentBlock<Traits::kSegments, Traits::kHeadDim> block(p, p.unit_parts);
  // The part's units, by kSuperUnits. All parts but a segment's last are as long as one of the chunk's longest segment.
  const auto supers_of = [](int units) { return (units + kSuperUnits - 1) / kSuperUnits; };
  const int longest = supers_of(block.units_of(p.chunk.first_segment + p.chunk.segments - 1));
  const int first_super = block.part * ((longest + p.unit_parts - 1) / p.unit_parts);
  const int supers = min(supers_of(block.end) - first_super, (longest + p.unit_parts - 1) / p.unit_parts);
  if (supers <= 0) return;
  const int quads = supers * (Row::kTiles / Traits::kQuad);
  const bool each_key = 1 << g.unit_shift == Traits::kClusters;
  if (threadIdx.x == 0) {
    for (int half = 0; half < 2; ++half) {
      barrier_init(shared.full[half], 1);
      barrier_init(shared.empty[half], Traits::kThreads);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    const int64 first = (block.kv_head() * supers_of(g.units()) + first_super) * Row::kTiles;
    shared.source = {reinterpret_cast<const unsigned char*>(p.unit_rows) + first * Tile::kBytes,
                     p.row_shares + first * kTileRows};
    for (int half = 0; half < min(2, quads); ++half) TileStages<Traits>::bring(shared, half, half, !each_key);
  }
  for (int r = threadIdx.x; r < Traits::kSegments * Traits::kQueries; r += Traits::kThreads) shared.not_finite[r] = 0;
  __syncthreads();
  BlockQueries<Traits>::load(p, block, shared);
  __syncthreads();
  BlockQueries<Traits>::spread_nan(shared);
  if (threadIdx.x < Traits::kSegments) {
    const int s = threadIdx.x, n = block.segment(s);
    const float factor = p.query_scales[static_cast<int64>(block.head) * g.segments() + n].y;
    const float normal = fmaxf(factor, 6.1035156e-5f);  // times minus infinity it stays that
    shared.segments[s] = {p.scores + p.chunk.place(block.head, n), block.there(s) ? block.units_of(n) : 0, 1.f / factor,
                          Float16::pack(normal, normal)};
  }
  fence_for_wgmma();
  __syncthreads();

  if (each_key)
    weigh_tiles<Traits, true>(p, block, shared, first_super, quads);
  else
    weigh_tiles<Traits, false>(p, block, shared, first_super, quads);
}

}  // namespace s2o
