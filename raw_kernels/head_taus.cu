// Each head's stop threshold, where pass 2 reads it. -> taus [batch * heads]
#include "common/ptx.cuh"

namespace s2o {

constexpr int kHeadTaus = 512;  // of a launch: parameters end at 4096 bytes

struct HeadTausParams {
  float* taus;               // [batch, heads]
  int heads;
  int first, count;          // the heads of this launch
  float values[kHeadTaus];   // theirs
};

// Block: a sequence.
__device__ __forceinline__ void head_taus(const HeadTausParams& p) {
  float* taus = p.taus + static_cast<int64>(blockIdx.x) * p.heads + p.first;
  for (int i = threadIdx.x; i < p.count; i += blockDim.x) taus[i] = p.values[i];
}

}  // namespace s2o
