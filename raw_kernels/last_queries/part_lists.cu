// The keys of the last queries as lists of parts (common/listed_rows.cuh): a multiprocessor for each part of a q tile.
//
//   -> part_entries [units of keys]: 0, 1, 2, ...; part_begins, part_keys of each part of a segment's candidates; counters: 0
#include "last_queries/parts.cuh"

namespace s2o {

struct PartListsParams {
  int* part_entries;   // [units]
  int64* part_begins;  // [pieces of segments_each segments][parts, segments of the piece]: first units
  int* part_keys;      // likewise: how many
  int* part_counters;  // [launches]: each one's next q tile
  Geometry geometry;
  int first_segment, segments, segments_each;
  int units, unit_shift;  // of all keys; a unit has 1 << unit_shift, and parts begin with one
  int parts, launches;
  int most_parts;      // of a segment, see KeyPart
};

// Thread: an entry, a list and a counter.
__device__ __forceinline__ void part_lists(const PartListsParams& p) {
  const int64 i = static_cast<int64>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < p.units) p.part_entries[i] = static_cast<int>(i);
  if (i < p.launches) p.part_counters[i] = 0;
  if (i >= static_cast<int64>(p.parts) * p.segments) return;
  const int part = i % p.parts, n = i / p.parts, of_piece = n % p.segments_each, before = n - of_piece;
  const int piece_segments = min(p.segments_each, p.segments - before);
  const int64 place = static_cast<int64>(before) * p.parts + part * piece_segments + of_piece;
  const KeyPart found(p.geometry, p.first_segment + n, part, p.parts, p.most_parts);
  p.part_begins[place] = found.begin >> p.unit_shift;
  p.part_keys[place] = found.keys;
}

}  // namespace s2o
