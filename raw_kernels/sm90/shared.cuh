// What producer and consumers of the Hopper tile share: sizes, shared memory, barriers and votes.
#pragma once
#include "common/tau_ladder.cuh"
#include "common/value_skip.cuh"
#include "sm90/hopper.cuh"
#include "sm90/wgmma_tile.cuh"
#include "tail/with_tail.cuh"

namespace s2o {

// Pass 1's parameters on Hopper: the arrays once more, as the copy engine reads them.
template <class Params>
struct Mapped {
  TensorMap q, k, v;
  Params attention;
};
using MappedAttentionParams = Mapped<AttentionParams>;
using MappedPackedAttentionParams = Mapped<PackedAttentionParams>;

// Pass 2's, where the copy engine brings units of keys. out: with head_dim 128; covariances: with a tail.
template <class Params>
struct MappedUnits {
  TensorMap q, k, v, out, covariances;
  Params attention;
};
using MappedUnitsParams = MappedUnits<AttentionParams>;
using MappedUnitsTailParams = MappedUnits<TailAttentionParams>;
using MappedUnitsListedParams = MappedUnits<ListedAttentionParams>;
using MappedUnitsSkippingParams = MappedUnits<SkippingAttentionParams>;

namespace sm90 {

constexpr int kStopCheckKeys = 128;  // block_n
constexpr int kValueKeys = 64;       // whose values are left out together
constexpr int kWarpgroup = 128;
constexpr int kPlaces = 4;     // of q tiles that the block knows of
// A producer of 128 threads and consumers share what the block was launched with: 384 x 168 registers, or where q tiles
// have 64 rows and a multiprocessor holds two blocks, 256 x 128. Of TwoBlockTraits each thread keeps its 96.
constexpr int kCopierRegisters = 40, kFirstConsumerRegisters = 232;  // pass 1, by the copy engine
// Where rows are gathered. With page numbers as well, or a tail to bring and no boxes, 72 would leave too few to have several
// addresses under way; outputs of head_dim 256 leave no more.
template <class Traits>
constexpr bool kProducesMore =
    Traits::kHeadDim <= 128 && !kSkipsValues<Traits> &&
    (Traits::kPaged || kWalksLadder<Traits> || (kAddsTail<Traits> && !Traits::kByBoxes));
template <class Traits>
constexpr int kProducerRegisters = kProducesMore<Traits> ? 88 : 72;
template <class Traits>
constexpr int kConsumerRegisters = Traits::kConsumers == 1 ? 256 - kProducerRegisters<Traits>
                                   : kProducesMore<Traits> ? 208 : 216;
template <class Traits, int kProducer, int kConsumer>
constexpr bool kFitsRegisters = kProducer + Traits::kConsumers * kConsumer <=
                                (1 + Traits::kConsumers) * (Traits::kConsumers == 1 ? 128 : 168);  // or one waits forever
constexpr int kVoteSlots = 4;  // a warpgroup is never more than 3 stop checks ahead of a reader of its votes
// kTurn and kSkip have one for either warpgroup.
enum NamedBarrier { kTurn = 1, kTake = 3, kNext = 4, kSkip = 5 };

// What a consumer has to know of its q tile. In pass 1, of short tiles, one thread works it out for all.
struct QTile {
  int head, batch, head_in_batch;   // head: flattened
  int first;                        // pass 1: the query of row 0
  int rows;
  int limit, key_tiles;             // see Rows
  int visited;                      // pass 2: where to say how many stop checks it took
  int kv_head, first_key;           // pass 1: where its keys begin
  int table_row, sequence_keys;     // pass 1, in pages: the sequence's row of the page table, and its keys
};

// What the gathering producer knows of its next q tile before that is published.
struct NextTile {
  const int *q_order, *k_order;
  int q_tile, begin, rows, keys, least_keys;
  float tau;
  int row[kWarpgroup], unit[kWarpgroup];  // looked up by each thread of the producer
};

template <class Element_, int kHeadDim_, int kStages_, bool kPaged_, int kBlockM_ = 128>
struct Traits {
  using Element = Element_;
  static constexpr int kBlockM = kBlockM_;           // query rows of a q tile
  static constexpr int kConsumers = kBlockM / 64;    // warpgroups
  static constexpr int kConsumerWarps = kConsumers * 4;
  static constexpr int kConsumerThreads = kConsumers * kWarpgroup;
  static constexpr bool kTakesTurns = kConsumers == 2;  // warpgroups issue their products in turn
  static constexpr bool kInHalves = false;  // consumers take a key tile half by half: TwoBlockTraits
  static constexpr int kProducerThreads = kWarpgroup;
  static constexpr int kFirstConsumer = kWarpgroup, kFirstProducer = 0;  // threads of the block
  static constexpr int kHeadDim = kHeadDim_;  // head_dim rounded up; the columns past head_dim are zeros
  static constexpr int kStages = kStages_;    // key and value tiles in shared memory
  static constexpr bool kPaged = kPaged_;     // k and v are a paged cache
  // Pass 2: whether keys and values come by the copy engine, and neighbouring keys of a box of these: 2 KiB or more, as
  // smaller ones take it as long.
  static constexpr bool kByBoxes = false;
  static constexpr int kBoxKeys = kHeadDim == 64 ? 16 : 8;
  static constexpr bool kBringsOutputs = false;  // whether so do outputs that pass 1 has left, like a tile of values
  static constexpr int kDimTiles = kHeadDim / 8;
  static_assert(kHeadDim == 64 || kHeadDim == 128 || kHeadDim == 256, "head_dim is padded to 64, 128 or 256");
  static_assert(kBlockM == 128 || (kBlockM == 64 && kHeadDim <= 128), "two warpgroups, or one, with head_dim up to 128");
  // Of head_dim 256 registers and shared memory have room for key tiles of 64, and for the queries of one q tile; two
  // blocks on a multiprocessor have room for key tiles of 64.
  static constexpr int kBlockN = kHeadDim > 128 || kConsumers == 1 ? 64 : 128;
  static constexpr int kQueryPlaces = kHeadDim > 128 ? 1 : 2;
  static constexpr int kScoreKeys = kBlockN;        // whose scores a consumer has at a time
  static constexpr int kKeyTiles = kScoreKeys / 8;  // of 8 keys, the columns of a wgmma tile that a quad shares
  static constexpr int kTilesPerStopCheck = kStopCheckKeys / kBlockN;  // key tiles
  static constexpr int kQueryAtom = kBlockM * 128, kKeyAtom = kBlockN * 128;  // bytes of 64 columns of a tile
  // In a tile of k or v: bytes from 8 rows to the next 8, and from 64 columns to the next 64.
  static constexpr int kRowsStride = kEightRows, kColumnsStride = kKeyAtom;

  struct Shared {
    uint16 q[kQueryPlaces][kBlockM * kHeadDim];
    uint16 k[kStages][kBlockN * kHeadDim];
    uint16 v[kStages][kBlockN * kHeadDim];
    int rows[2][kBlockM];            // pass 2: query positions of this q tile and the next, -1 past the segment
    int q_tile[kPlaces];             // this q tile and others; -1 at the end
    QTile described[kPlaces];        // pass 1: the same, worked out
    float tau[kPlaces];              // pass 2: of their heads
    int least_keys[kPlaces];         // pass 2: until these are visited only stop checks in a row end the tile,
    int patience[kPlaces];           // so many of them
    NextTile next;                   // pass 2
    uint32 v_nonfinite[2];           // pass 1, of a masked value tile: a byte a checking warp, 1 if it found any
    uint64 votes[kVoteSlots];        // a byte a consumer warp: 1 to stop; of a ladder a bit for each tau
    int in_a_row[kConsumerWarps];    // pass 2: stop checks, up to this one, at which a warp's rows gained little
    // Barriers: full = copies have landed, empty = all readers are done.
    uint64 q_full[2], q_empty[2];
    uint64 k_full[kStages], k_empty[kStages], v_full[kStages], v_empty[kStages];
    uint64 v_sent[2], v_checked[2];  // of a masked value tile: its copy has begun, it has been checked
    uint64 voted[kVoteSlots];
    uint64 q_tile_full[kPlaces], q_tile_empty[kPlaces];
  };
  // wgmma swizzles by bits of the address, so tiles, which come first, begin at multiples of 1,024
  // bytes, as the block's memory does.
  static_assert(sizeof(Shared::q[0]) % 1024 == 0 && sizeof(Shared::k[0]) % 1024 == 0);
};

// The same where all columns of 8 rows of k or v follow each other, then those of the next 8: so a box of a tensor map
// brings whole rows of a page.
template <class Element, int kHeadDim, int kStages, bool kPaged, int kBlockM = 128>
struct WholeRowTraits : Traits<Element, kHeadDim, kStages, kPaged, kBlockM> {
  static constexpr int kRowsStride = kHeadDim / 64 * kEightRows, kColumnsStride = kEightRows;
};

// The same for pass 2 by boxes of neighbouring keys of a unit, of q tiles whose rows are neighbours.
template <class Element, int kHeadDim, int kStages, bool kPaged, int kBlockM = 128>
struct BoxTraits : WholeRowTraits<Element, kHeadDim, kStages, kPaged, kBlockM> {
  static constexpr bool kByBoxes = true;
  static constexpr bool kBringsOutputs = kHeadDim == 128;
};

// The same for pass 1 by tensor maps. Products of head_dim 64 are so short that waiting for a turn costs more than it
// brings; in pass 2 with one block it does not, and pass 1 that gathers has not been measured without.
template <class Traits>
struct FirstTraits : Traits {
  static constexpr bool kTakesTurns = Traits::kTakesTurns && Traits::kHeadDim > 64;
};

// Traits of pass 2 with head_dim 64 and two blocks on a multiprocessor, so that four warpgroups fill each other's
// waits: their products are short. For that a block has a producer of two warps, behind the consumers, no thread more
// than 96 registers, and a consumer the scores of half a key tile at a time.
template <class Of>
struct TwoBlockTraits : Of {
  static constexpr int kHeadDim = Of::kHeadDim;
  static_assert(kHeadDim == 64, "96 registers hold outputs of 64 dims and scores of 64 keys");
  static_assert(Of::kConsumers == 2 && Of::kBlockN == 128, "eight warps vote, and a key tile is two halves");
  static constexpr bool kInHalves = true, kTakesTurns = false;
  static constexpr int kProducerThreads = 64, kFirstConsumer = 0, kFirstProducer = Of::kConsumerThreads;
  static constexpr int kScoreKeys = 64, kKeyTiles = kScoreKeys / 8;
};

// Where the 16-byte chunk `c` of row `row` of a tile of k or v stands.
template <class Traits>
__device__ __forceinline__ uint32 key_chunk(uint32 tile, int row, int c) {
  constexpr bool kRowsFollow = Traits::kRowsStride == kEightRows;
  const int before = kRowsFollow ? row * 128 : row / 8 * Traits::kRowsStride + row % 8 * 128;
  return tile + c / 8 * Traits::kColumnsStride + before + ((c % 8 ^ (row & 7)) << 4);
}

// A position in a ring of kSlots barriers: which slot, and the parity of its phase.
template <int kSlots>
struct Ring {
  uint32 slot = 0, parity = 0;
  __device__ __forceinline__ void advance() {
    if (++slot == kSlots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

// The votes of the block's warps at stop check `n` (counted over all q tiles of the block).
template <class Shared>
__device__ __forceinline__ uint64 votes_at(Shared& shared, uint32 n) {
  barrier_wait(shared.voted[n % kVoteSlots], n / kVoteSlots & 1);
  return *static_cast<volatile uint64*>(&shared.votes[n % kVoteSlots]);
}
// The decision: did every warp vote to stop there? Consumers (walk.cuh) and the producer read it, each for itself.
template <class Traits>
__device__ __forceinline__ bool all_voted_to_stop(typename Traits::Shared& shared, uint32 n) {
  constexpr bool kAllBytes = Traits::kConsumers == 2;  // eight warps write a byte each; one consumer has but four
  constexpr uint64 kOnes = kAllBytes ? 0x0101010101010101ull : 0x01010101ull;
  const uint64 votes = votes_at(shared, n);
  return kWalksLadder<Traits> || !kAllBytes ? (votes & kOnes) == kOnes : votes == kOnes;
}
// The same for a warp of consumers that take no turns, read by the lane that votes for it: its own arrivals put the
// read before later votes, as race detectors see it too.
template <class Shared>
__device__ __forceinline__ bool first_lane_sees_stop(Shared& shared, uint32 n, int lane) {
  barrier_wait(shared.voted[n % kVoteSlots], n / kVoteSlots & 1);
  const volatile uint64* votes = &shared.votes[n % kVoteSlots];
  return __any_sync(kFullWarp, lane == 0 && *votes == 0x0101010101010101ull);
}
// Of a ladder: the taus at which every row stops there.
template <class Traits>
__device__ __forceinline__ uint32 ladder_stops(typename Traits::Shared& shared, uint32 n) {
  const uint64 votes = votes_at(shared, n);
  uint32 common = static_cast<uint32>(votes);
  if (Traits::kConsumers == 2) common &= static_cast<uint32>(votes >> 32);
  common &= common >> 16;
  return (common & common >> 8) & 0xff;
}

// The producer's warps that look for NaN in pass 1: all but one that copies and, where the copy engine does that, one
// that schedules.
template <bool kGathers>
constexpr int kCheckers = kGathers ? 3 : 2;

// kGathers: all threads of the producer copy, or two warps have the copy engine do it.
template <class Traits, bool kGathers>
__device__ __forceinline__ void initialise(typename Traits::Shared& shared) {
  if (threadIdx.x == 0) {
    constexpr int kCopiers = kGathers ? Traits::kProducerThreads : 1;
    for (int s = 0; s < 2; ++s) {
      // Each gathering thread arrives for the positions it wrote, and for its copies of queries.
      barrier_init(shared.q_full[s], Traits::kByBoxes ? kCopiers : kGathers ? 2 * kCopiers : 1);
      barrier_init(shared.q_empty[s], Traits::kConsumerWarps);
      barrier_init(shared.v_sent[s], 1);
      barrier_init(shared.v_checked[s], kGathers ? kCheckers<true> * 32 : kCheckers<false>);
      shared.v_nonfinite[s] = 0;
    }
    for (int s = 0; s < kPlaces; ++s) {
      barrier_init(shared.q_tile_full[s], 1);
      // Every thread that reads arrives: once a q tile that costs nothing, and race detectors follow it.
      constexpr int kProducers =
          kGathers ? Traits::kProducerThreads : 32 * kCheckers<false> + (Traits::kPaged ? 32 : 1);
      barrier_init(shared.q_tile_empty[s], 32 * Traits::kConsumerWarps + kProducers);
    }
    for (int s = 0; s < Traits::kStages; ++s) {
      // By boxes each warp arrives, also those that copy nothing: none of them may fall behind the votes.
      constexpr int kOfKeys = Traits::kByBoxes ? Traits::kProducerThreads / 32 : kCopiers;
      barrier_init(shared.k_full[s], kOfKeys);
      barrier_init(shared.v_full[s], kOfKeys);
      barrier_init(shared.k_empty[s], Traits::kConsumerWarps);
      barrier_init(shared.v_empty[s], Traits::kConsumerWarps);
    }
    for (int s = 0; s < kVoteSlots; ++s) barrier_init(shared.voted[s], Traits::kConsumerWarps);
    if constexpr (kAddsTail<Traits>) barrier_init(shared.outputs_read, Traits::kConsumerThreads);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
}

}  // namespace sm90
}  // namespace s2o
