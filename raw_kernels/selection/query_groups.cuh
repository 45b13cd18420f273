// Groups of like queries, which rank="query" multiplies in place of single ones where it multiplies in 8 bits.
//
// Of each kQueryRun neighbouring queries of a segment kQueryGroups groups: the first query is the first centre, each further
// one the query furthest from all centres before it, of equally far ones the first. A query belongs to the centre nearest to
// it, of equally near ones the first. A query unlike its neighbours, which looks for something of its own, is so a group of
// its own; likes share one, whose query is their mean and whose norm is the mean of theirs.
#pragma once
#include "common/rows.cuh"
#include "selection/unit_tile.cuh"

namespace s2o {

constexpr int kQueryRun = spec::kQueryRun, kQueryGroups = spec::kQueryGroups;
static_assert(kQueryRun == 16, "a fragment of mma");

// One run, by a warp. Squared distances are those of products of tensor cores; all but their last four bits count, whose
// place the query's number takes when the furthest is found.
template <class Element, int kHeadDim>
struct QueryRun {
  static constexpr int kLanes = kHeadDim / 8, kParts = 32 / kLanes;  // lanes of a row; groups at a time

  const uint16* rows;  // of the run's first query
  const float* norms;
  int64 stride;        // from a row to the next
  int head_dim, count, lane;  // count: queries that there are; the first stands in for others

  __device__ __forceinline__ const uint16* row(int r) const { return rows + (r < count ? r : 0) * stride; }

  // d[h][i]: squared distance of queries lane / 4 + 8 h and lane % 4 * 2 + i % 2 + i / 2 * 8.
  __device__ __forceinline__ void find_distances(float (&d)[2][4]) const {
    float low[4] = {}, high[4] = {};  // products with queries 0 to 7, and 8 to 15
    const uint16 *first_row = row(lane / 4), *second_row = row(lane / 4 + 8);
#pragma unroll
    for (int c = 0; c < kHeadDim; c += 32) {  // in any order of dimensions, as both sides have the same
      const int at = c + lane % 4 * 8;
      const uint4 x = load_16_or_zeros(first_row + at, at < head_dim), y = load_16_or_zeros(second_row + at, at < head_dim);
      const uint32 a[4] = {x.x, y.x, x.y, y.y}, b[4] = {x.z, y.z, x.w, y.w};
      Element::mma(low, a, x.x, x.y);
      Element::mma(high, a, y.x, y.y);
      Element::mma(low, b, x.z, x.w);
      Element::mma(high, b, y.z, y.w);
    }
    // Squared lengths stand on the diagonal: of rows lane / 4 and 8 further with one lane of each four.
    const int own = (lane & ~3) | lane / 8, column = lane % 4 * 8;
    const bool odd = lane / 4 % 2;
    const float length[2] = {__shfl_sync(kFullWarp, odd ? low[1] : low[0], own),
                             __shfl_sync(kFullWarp, odd ? high[3] : high[2], own)};
    float of_column[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) of_column[i] = __shfl_sync(kFullWarp, length[i / 2], column + i % 2 * 4);
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        d[h][i] = length[h] + of_column[i] - 2.f * (i < 2 ? low[2 * h + i] : high[2 * h + i - 2]);
  }

  // The number of the group of query `lane` % 16.
  __device__ __forceinline__ int group_of_lane() const {
    float d[2][4], nearest[4];
    find_distances(d);
    uint32 groups = 0;  // four bits for each of the thread's columns
    int centre = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) nearest[i] = infinity();
#pragma unroll 1
    for (int g = 0; g < kQueryGroups; ++g) {
      const bool upper = centre >= 8;
      uint32 furthest = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int column = lane % 4 * 2 + i % 2 + i / 2 * 8;
        const float found = __shfl_sync(kFullWarp, upper ? d[1][i] : d[0][i], centre % 8 * 4 + lane % 4);
        const float to_centre = column == centre || found < 0.f ? 0.f : found;
        if (to_centre < nearest[i]) {
          nearest[i] = to_centre;
          groups = (groups & ~(15u << 4 * i)) | g << 4 * i;
        }
        furthest = max(furthest, (__float_as_uint(nearest[i]) & ~15u) | (15 - column));
      }
      furthest = max(furthest, __shfl_xor_sync(kFullWarp, furthest, 1));
      furthest = max(furthest, __shfl_xor_sync(kFullWarp, furthest, 2));
      centre = 15 - static_cast<int>(furthest & 15);
    }
    return __shfl_sync(kFullWarp, groups, lane % 8 / 2) >> (lane % 2 + lane % 16 / 8 * 2) * 4 & 15;
  }

  // Each group's mean query times `factor`, in 8 bits, as rows of `queries` from `column` on, and its norm. A group without
  // a query has no weight.
  __device__ __forceinline__ void store_groups(float factor, unsigned char* queries, float* group_norms, int column) const {
    const int mine = group_of_lane(), part = lane / kLanes, first = lane % kLanes * 8;
#pragma unroll 1
    for (int g = 0; g < kQueryGroups; g += kParts) {
      uint32 members = 0;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        const uint32 those = __ballot_sync(kFullWarp, lane < min(count, kQueryRun) && mine == g + i);
        if (i == part) members = those;
      }
      const int size = __popc(members);
      const float share = size ? 1.f / size : 0.f;  // of each, as a sum of large ones may be too large
      float mean[8] = {}, norm = 0.f;
      for (; members; members &= members - 1) {
        const int r = __ffs(members) - 1;
        const uint4 x = load_16_or_zeros(rows + r * stride + first, first < head_dim);
        const uint32 pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          mean[2 * e] = fmaf(Element::low(pairs[e]), share, mean[2 * e]);
          mean[2 * e + 1] = fmaf(Element::high(pairs[e]), share, mean[2 * e + 1]);
        }
        norm = fmaf(norms[r], share, norm);
      }
      __syncwarp();
#pragma unroll
      for (int e = 0; e < 8; ++e) mean[e] *= factor;
      *reinterpret_cast<uint2*>(queries + byte_of_row<kHeadDim>(column + g + part, first)) = make_uint2(
          pack_e4m3(mean[0], mean[1], mean[2], mean[3]), pack_e4m3(mean[4], mean[5], mean[6], mean[7]));
      if (lane % kLanes == 0) group_norms[column + g + part] = size ? norm : infinity();
    }
  }
};

}  // namespace s2o
