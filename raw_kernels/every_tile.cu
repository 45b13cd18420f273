// What a dense call visits: every key tile, as if it stopped nowhere. -> visited [batch * heads, segments, tiles]
#include "common/geometry.cuh"

namespace s2o {

struct EveryTileParams {
  int* visited;       // [batch * heads, segments, tiles]: key tiles of a q tile, 0 past the end of the last segment
  Geometry geometry;
  int count;          // of elements
  int tiles;          // q tiles of a segment
  int block_m, block_n;
};

// Thread: an element.
__device__ __forceinline__ void every_tile(const EveryTileParams& p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.count) return;
  const int n = i / p.tiles % p.geometry.segments(), first_row = i % p.tiles * p.block_m;
  const int key_tiles = (p.geometry.candidates(n) + p.block_n - 1) / p.block_n;
  p.visited[i] = first_row < p.geometry.query_count(n) ? key_tiles : 0;
}

}  // namespace s2o
