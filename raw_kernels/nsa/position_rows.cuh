// The rows of a tile of the window branch: positions, so that tiles, and warps with them, begin where blocks of keys do.
#pragma once
#include "nsa/params.cuh"

namespace s2o {

// Row r is the query at position first + r. p.tiles of each of p.q_tiles heads, the latest first.
template <int kRows_>
struct PositionRows : QueryTile {
  static constexpr int kRows = kRows_;
  int first, offset, seqlen_q;
  __device__ __forceinline__ PositionRows(const NsaParams& p, uint32 block)
      : offset(p.geometry.offset()), seqlen_q(p.geometry.seqlen_q) {
    head = block % p.q_tiles;
    tile = p.tiles - 1 - block / p.q_tiles;
    segment = 0;
    first = (offset / kRows + tile) * kRows;
  }
  __device__ __forceinline__ int operator()(int r) const {
    const int i = first + r - offset;
    return i >= 0 && i < seqlen_q ? i : -1;
  }
  __device__ __forceinline__ bool has(int r) const { return (*this)(r) >= 0; }
  __device__ __forceinline__ int nearest(int r) const { return min(max(first + r - offset, 0), seqlen_q - 1); }
};

// The keys that a tile walks, in steps of kWindowStep: those of the band from the last, then those of the sinks before it.
constexpr int kWindowStep = 64;

struct WindowSteps {
  int last_step, band, sink_end, count;
  template <int kRows>
  __device__ __forceinline__ WindowSteps(const NsaParams& p, const PositionRows<kRows>& rows) {
    const int lowest = max(rows.first, rows.offset), highest = min(rows.first + kRows, p.geometry.seqlen_k) - 1;
    const int band_begin = max(0, lowest - p.window + 1) / kWindowStep;
    last_step = highest / kWindowStep;
    band = last_step - band_begin + 1;
    sink_end = min((p.sinks + kWindowStep - 1) / kWindowStep, band_begin);
    count = band + sink_end;
  }
  __device__ __forceinline__ int first_key(int step) const {
    return (step < band ? last_step - step : sink_end - 1 - (step - band)) * kWindowStep;
  }
};

// A window without sinks, as NSA has it, known to the compiler. In what follows Window is this, or the parameters.
struct PlainWindow {
  int window;
  static constexpr int sinks = 0;
};

// Whether the query at a position sees a key.
template <class Window>
__device__ __forceinline__ bool window_sees(const Window& p, int position, int key) {
  const int back = position - key;
  return (static_cast<uint32>(back) < static_cast<uint32>(p.window)) | ((back >= 0) & (key < p.sinks));
}

// Of the rows from `first` to `last`: whether one sees a key of a step, and whether one does not see all of them.
template <class Window>
__device__ __forceinline__ bool window_reaches(const Window& p, int first, int last, int first_key) {
  return first_key <= last && (first_key + kWindowStep - 1 > first - p.window || first_key < p.sinks);
}
template <class Window>
__device__ __forceinline__ bool window_cuts(const Window& p, int first, int last, int first_key) {
  const int end_key = first_key + kWindowStep;
  return end_key - 1 > first || (first_key <= last - p.window && end_key > p.sinks);
}

// The first key of the near blocks of the query at a position: its own and those just before it.
__device__ __forceinline__ int near_begin(const NsaParams& p, int position) {
  return max(0, (position >> p.block_shift) - p.local + 1) << p.block_shift;
}

}  // namespace s2o
