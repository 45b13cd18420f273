// One order of tokens for all heads, from a table: tokens [seqlen] -> q_order [heads, seqlen], k_order [seqlen].
#include "common/ptx.cuh"

namespace s2o {

struct TokenOrderParams {
  const int* tokens;
  int* q_order;
  int* k_order;
  int seqlen;
  int heads;  // of all sequences
};

// Thread: a token.
__device__ __forceinline__ void token_order(const TokenOrderParams& p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= p.seqlen) return;
  const int token = p.tokens[i];
  p.k_order[i] = token;
  for (int h = 0; h < p.heads; ++h) p.q_order[static_cast<int64>(h) * p.seqlen + i] = token;
}

}  // namespace s2o
