// The order of a row's candidates on Hopper, in one kernel that reads each score once (rank_keys.cu has the portable
// three, which define no other order): the row lies in the shared memory of a cluster.
//
// A block sorts its part of the row by bucket (part_order.cuh). Blocks then read each other's numbers of candidates in
// each bucket, which gives their places in the row.
#include "part_order.cuh"

namespace s2o {

template <int kBlocks_>
struct KeyOrderTraits {
  using Sort = PartTraits<512>;
  static constexpr int kBlocks = kBlocks_;  // of a cluster
  struct Shared {
    Sort::Shared sort;
    uint16 run[spec::kKeyBuckets][2];  // begin and end of a bucket's candidates in the sorted part
    uint32 base[spec::kKeyBuckets];    // from a candidate's place in the part to its place in the row
    uint32 of_warp[Sort::kWarps];
  };
};

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Eight bytes of another block's shared memory, from where they lie in this one's.
__device__ __forceinline__ uint2 load_of_block(const void* mine, int block) {
  uint2 x;
  asm volatile(
      "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %2, %3;\n"
      "ld.shared::cluster.v2.u32 {%0, %1}, [there];\n}"
      : "=r"(x.x), "=r"(x.y)
      : "r"(shared_address(mine)), "r"(block)
      : "memory");
  return x;
}

template <class Traits>
__device__ __forceinline__ void key_order_sm90(const RankKeysParams& p, typename Traits::Shared& shared) {
  using Sort = typename Traits::Sort;
  static_assert(Sort::kPart == spec::kClusterPart && spec::kKeyBuckets == 2 * Sort::kThreads, "a block's, a thread's share");
  const RowPart where(p, Sort::kPart, Traits::kBlocks);
  if (where.count <= 0) return;  // barriers of a cluster do not wait for who has ended
  PartOrder<Sort> part(shared.sort);
  part.load(p.scores + where.row * p.stride, where);
  uint32* runs = reinterpret_cast<uint32*>(shared.run);
  reinterpret_cast<uint2*>(runs)[threadIdx.x] = make_uint2(0, 0);
  part.sort(ScoreBuckets(p.range[where.row]));

#pragma unroll 4
  for (int i = threadIdx.x; i < where.count; i += Sort::kThreads) {
    const uint32 bucket = bucket_of(shared.sort.items[i]);
    const uint32 before = i == 0 ? kBucketMask + 1 : bucket_of(shared.sort.items[i - 1]);
    if (bucket != before) {
      shared.run[bucket][0] = static_cast<uint16>(i);
      if (i > 0) shared.run[before][1] = static_cast<uint16>(i);
    }
    if (i == where.count - 1) shared.run[bucket][1] = static_cast<uint16>(where.count);
  }
  cluster_arrive();
  cluster_wait();
  uint32 in_row[2] = {}, earlier[2] = {};  // of this thread's two buckets: all; in parts before this one
#pragma unroll
  for (int b = 0; b < Traits::kBlocks; ++b) {
    if (b >= where.parts) break;
    const uint2 x = load_of_block(runs + 2 * threadIdx.x, b);
    const uint32 n[2] = {(x.x >> 16) - (x.x & 0xffffu), (x.y >> 16) - (x.y & 0xffffu)};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      in_row[i] += n[i];
      if (b < where.part) earlier[i] += n[i];
    }
  }
  cluster_arrive();
  const uint32 place = thread_sum_before(in_row[0] + in_row[1], shared.of_warp);
  const uint2 mine = reinterpret_cast<const uint2*>(runs)[threadIdx.x];
  reinterpret_cast<uint2*>(shared.base)[threadIdx.x] =
      make_uint2(place + earlier[0] - (mine.x & 0xffffu), place + in_row[0] + earlier[1] - (mine.y & 0xffffu));
  __syncthreads();
  write_order<Sort>(p.k_order + where.row * p.stride, shared.sort, shared.base, where);
  cluster_wait();  // nobody still reads this block's memory
}

}  // namespace s2o
