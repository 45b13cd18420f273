// What kernels are given that score keys or units, or put them in order.
#pragma once
#include "common/pages.cuh"

namespace s2o {

struct RankKeysParams {
  Tensor<const uint16> q;  // [batch, heads, seqlen_q, head_dim], of rank="query"
  Tensor<const uint16> k;  // [batch, kv_heads, seqlen_k, head_dim], or [pages, kv_heads, page_size, head_dim]
  const uint16* means;     // [batch * heads, segments, pooled queries, kHeadDim]
  const uint16* unit_keys;  // [batch * kv_heads, units, 2, kHeadDim], of unit_weights: mean, outlier; of query_weights
                            // [batch * kv_heads, units, clusters, kHeadDim] (unit_clusters.cu)
  const uint16* cluster_shares;  // [batch * kv_heads, units, clusters], of query_weights
  const uint32* unit_rows;    // [batch * kv_heads, tiles, bytes of a tile / 4], of rank="query" in 8 bits (unit_rows.cu)
  const uint16* row_shares;   // [batch * kv_heads, tiles, 64], likewise
  const float* unit_scales;   // [batch * kv_heads, tiles, units of a tile], of integers: what a step of their elements is
  const float* norms;         // [batch * heads, seqlen_q], of rank="query" (query_norms.cu)
  const float2* query_scales; // [batch * heads, segments], of e4m3: of queries, of products
  uint16* scores;          // rows of the chunk (Chunk::place) by unit: float16, in log2 of a softmax weight
  int* k_order;            // rows of the chunk: units
  uint16* order_head_scores;  // [chunk rows, kOrderHead]: of the first that key_strata or key_middle leaves in k_order
  int* middle;             // [chunk rows, kMiddle]: the first of key_strata's order, of rows of more than kMiddleFrom
  uint16* middle_scores;   // [chunk rows, kMiddle]
  const float* taus;       // [batch * heads] of each head, or null: tau is of all
  int* least_keys;         // [batch * heads, segments]: keys of units that weigh tau / kLeastParts or more; null: not wanted
  Geometry geometry;
  Chunk chunk;
  int heads, kv_heads;
  int pooled_queries, run;
  int near_keys;           // of query_weights: right before a segment, whose units come first; 0 without causality
  int unit_parts;          // blocks of query_weights_sm90 among which a pair of segments parts its units; else 1
  int row_blocks;          // blocks of key_scores that cover the rows of one KV head
  int key_blocks;          // and the keys
  int strata_blocks;       // blocks of key_strata that cover a long and a short row
  int aligned;             // every row of q starts on 16 bytes
  float scale_log2;        // |scale| * log2(e); of rank="query" with the sign of the scale
  float tau;
  Pages pages;             // of a paged cache
};

}  // namespace s2o
