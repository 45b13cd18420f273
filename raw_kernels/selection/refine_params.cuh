// What the kernels of rank="auto" are given (refine.cu, selection/refined_scores_sm90.cu).
#pragma once
#include "common/pages.cuh"

namespace s2o {

struct RefineParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  float* deficits;         // [batch * heads, probes]
  int* refined;            // [batch * heads, segments]: 1 if so
  float* norms;            // [batch * heads, segments, pooled queries], in units of a dot product
  uint16* scores;          // by key position, see RankKeysParams
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int pooled_queries, run;  // of a refined segment
  int probe_run;
  int first_ordered;         // the first segment with candidates
  int probes;
  int key_blocks;            // blocks of kRefineBlockSteps steps that cover the keys
  int aligned;               // every row of q and k starts on 16 bytes
  float scale_log2;          // |scale| * log2(e)
  float sign;                // of scale
  Pages pages;               // of a paged cache
};

}  // namespace s2o
