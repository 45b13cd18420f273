// What the kernels of rank="auto" are given (rank_fine.cu, fine_scores_sm90.cu).
#pragma once
#include "pages.cuh"

namespace s2o {

struct RankFineParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim]
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  float* deficits;         // [batch * heads, surveys]
  int* fine;               // [batch * heads, segments]: 1 if fine
  float* norms;            // [batch * heads, segments, representatives], in units of a dot product
  uint16* scores;          // by key position, see RankKeysParams
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int representatives, run;  // of a fine segment
  int survey_run;
  int first_ordered;         // the first segment with candidates
  int surveys;
  int key_blocks;            // blocks of kFineBlockSteps steps that cover the keys
  int aligned;               // every row of q and k starts on 16 bytes
  float scale_log2;          // |scale| * log2(e)
  float sign;                // of scale
  Pages pages;               // of a paged cache
};

}  // namespace s2o
