// antidiagonal_norms on Hopper for keys as they lie and whole cells: tiles come by tensor maps, and two blocks of a cluster,
// of two heads that share keys, bring each other half of these. L2 could not bring them fast enough otherwise.
//
// A warp copies, two warpgroups multiply, 128 cells of queries each by kTile cells of keys. Neither waits for the other: one's
// sums run beside the other's products.
#include "methods/antidiagonal_sm90.cuh"

namespace s2o {

struct MappedAntidiagonalParams {
  TensorMap q, k;  // [batch, heads, cells, stride, head_dim]
  AntidiagonalParams attention;
};

template <class Element_, int kHeadDim_, int kStride_>
struct MappedAntidiagonalTraits {
  using Element = Element_;
  static constexpr int kHeadDim = kHeadDim_, kStride = kStride_;
  static constexpr int kThreads = 384, kRows = 256, kTile = 192, kStages = 4;
  static constexpr int kColumns = 64;  // of a step
  static constexpr int kSteps = kStride * kHeadDim / kColumns;  // of a tile
  static constexpr int kGroup = 4;     // tiles of rows that take turns
  static constexpr uint32 kBytes = (kRows + kTile) * kColumns * 2;  // of a step
  static constexpr int kConsumerRegisters = 232, kCopierRegisters = 40;  // of a thread of 256 and of 128
  static_assert(256 * kConsumerRegisters + 128 * kCopierRegisters <= kRegistersOfBlock<kThreads>, "one would wait forever");

  struct Shared {
    uint16 q[kStages][kRows * kColumns];
    uint16 k[kStages][kTile * kColumns];
    uint64 full[kStages], empty[kStages];
  };
};

template <bool kValue>
struct Truth {
  static constexpr bool value = kValue;
};

__device__ __forceinline__ uint32 cluster_rank() {
  uint32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive;\nbarrier.cluster.wait;" ::: "memory");
}
// Arrives at the barrier in the same place of a block of the cluster.
__device__ __forceinline__ void barrier_arrive_at(uint64& barrier, uint32 rank) {
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\n"
      "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}" ::"r"(shared_address(&barrier)),
      "r"(rank)
      : "memory");
}
// Waits for what other blocks of the cluster tell of, too.
__device__ __forceinline__ void barrier_wait_for_cluster(uint64& barrier, uint32 parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(&barrier)),
      "r"(parity)
      : "memory");
}
// A box of cells of one row of theirs, to this block or, where kShared, to the same place in both.
template <bool kShared>
__device__ __forceinline__ void copy_cells(uint32 shared, const TensorMap& map, uint64& barrier, int column, int row,
                                           int cell, int head, int batch) {
  if constexpr (kShared) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(shared),
        "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(cell), "r"(head), "r"(batch),
        "h"(static_cast<uint16>(3))
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(shared),
        "l"(&map), "r"(shared_address(&barrier)), "r"(column), "r"(row), "r"(cell), "r"(head), "r"(batch)
        : "memory");
  }
}

template <class Traits>
__device__ __forceinline__ void antidiagonal_norms_mapped(const MappedAntidiagonalParams& mapped,
                                                          typename Traits::Shared& shared) {
  using Element = typename Traits::Element;
  constexpr int kStride = Traits::kStride, kTile = Traits::kTile, kStages = Traits::kStages, kSteps = Traits::kSteps;
  constexpr int kParts = Traits::kHeadDim / 64;  // steps of a row of queries
  const AntidiagonalParams& p = mapped.attention;
  const uint32 rank = cluster_rank();
  const int group = threadIdx.x / 128;  // of threads
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      barrier_init(shared.full[i], 1);
      barrier_init(shared.empty[i], 4);  // two warpgroups of two blocks
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  cluster_sync();
  TileWalk<Traits> walk(p, blockIdx.x / 2, gridDim.x / 2, p.round_heads / 2);  // of pairs of heads
  int step = 0;                                                                // of all tiles
  if (group == 2) {
    registers_shrink<Traits::kCopierRegisters>();
    if (threadIdx.x == 256) {
      for (; !walk.done(); walk.next()) {
        const int head = p.first_head + walk.head * 2 + static_cast<int>(rank), batch = head / p.heads;
        const int of_sequence = head % p.heads, kv_head = of_sequence / (p.heads / p.kv_heads);
#pragma unroll 1
        for (int s = 0; s < kSteps; ++s, ++step) {
          const int stage = step % kStages, r = s / kParts, column = s % kParts * 64;
          barrier_wait_for_cluster(shared.empty[stage], step / kStages % 2 ^ 1);
          barrier_expect(shared.full[stage], Traits::kBytes);
          copy_cells<false>(shared_address(shared.q[stage]), mapped.q, shared.full[stage], column, kStride - 1 - r,
                            walk.first_row, of_sequence, batch);
          copy_cells<true>(shared_address(shared.k[stage]) + rank * (kTile / 2 * 128), mapped.k, shared.full[stage],
                           column, r, walk.first_key + static_cast<int>(rank) * (kTile / 2), kv_head, batch);
        }
      }
    }
  } else {
    registers_grow<Traits::kConsumerRegisters>();
    float d[2][kTile / 2];  // two products of 64 rows
    const auto release = [&](int of) {
      if (threadIdx.x % 128 < 2) barrier_arrive_at(shared.empty[of % kStages], threadIdx.x % 128);
    };
    // The products of both halves of the rows, or of the second one alone.
    const auto multiply = [&](auto second_alone) {
#pragma unroll 1
      for (int s = 0; s < kSteps; ++s, ++step) {
        const int stage = step % kStages;
        barrier_wait_for_cluster(shared.full[stage], step / kStages % 2);
        const uint32 a = tile_descriptor(shared_address(shared.q[stage]) + group * (128 * 128), 0);
        const uint32 b = tile_descriptor(shared_address(shared.k[stage]), 0);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          if constexpr (!second_alone.value)
            Wgmma<Element>::ss(d[0], descriptor_at(a, c * 32), descriptor_at(b, c * 32), s + c > 0);
          Wgmma<Element>::ss(d[1], descriptor_at(a, 64 * 128 + c * 32), descriptor_at(b, c * 32), s + c > 0);
        }
        wgmma_commit();
        wgmma_wait<1>();
        if (s > 0) release(step - 1);
      }
      wgmma_wait<0>();
      finished(d[0]);
      finished(d[1]);
      release(step - 1);
    };
    const auto sees = [&](int first) {  // whether some of the 64 cells from there on see some of the tile
      const int end = min(first + 64, walk.cells.of_queries());
      return first < end && walk.cells.seen(end - 1) > walk.first_key;
    };
    for (; !walk.done(); walk.next()) {
      const int first = walk.first_row + group * 128;
      if (sees(first)) {
        multiply(Truth<false>{});
      } else if (sees(first + 64)) {
        multiply(Truth<true>{});
      } else {
        for (const int end = step + kSteps; step < end; ++step) {
          barrier_wait_for_cluster(shared.full[step % kStages], step / kStages % 2);
          release(step);
        }
        continue;
      }
      write_norms<Traits>(p, walk.head * 2 + rank, first, walk.first_key, d);
    }
  }
  cluster_sync();  // a block that has ended has no barriers that another one could arrive at
}

}  // namespace s2o
