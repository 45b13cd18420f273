// The order of 128 compressed keys in shared memory.
#pragma once

namespace s2o {

// Compressed key number x of a step, 32 * t + y with y < 32, stands in row 8 * (y / 2) + 2 * t + y % 2: the columns that
// thread t of four has of the product are then 32 neighbours.
__device__ __forceinline__ int key_of_row(int row) { return row % 8 / 2 * 32 + row / 8 * 2 + row % 2; }

}  // namespace s2o
