"""Sizes, limits and defaults that the reference, the plan and the kernels share, each written once."""

from __future__ import annotations

import math
from collections.abc import Mapping

# How keys are ordered (reference.key_order is the definition). Up to ORDER_WHOLE candidates by KEY_BUCKETS parts of the
# range of their scores; float16 tells integers from 1024 to 2047 apart, so its arithmetic rounds to a bucket by itself.
ORDER_WHOLE = 16384
KEY_BUCKETS = 1024
# More are dealt to strata of STRATUM, and each is sorted by KEY_LEVELS parts of its own range: as many levels times
# indices as there are finite float16 that are not negative. The first ORDER_HEAD of that order are sorted by buckets.
ORDER_HEAD = 8192
STRATUM = 256
KEY_LEVELS = 124
LAYER_MIX = 0x61C88647  # spreads the squares of small numbers over 32 bits
# Of more than MIDDLE_FROM the first MIDDLE are dealt again: the head of the order would hold too few of so many strata.
MIDDLE_FROM = 1 << 18
MIDDLE = 1 << 16

# Key tiles a kernel still visits after the tile whose gain is too small for every row, by path. Hopper's pipeline has
# the next tile's products in flight when it learns of the stop; waiting would cost more than using them.
STOP_LAG: Mapping[str, int] = {"portable": 0, "hopper": 1}
# Rows that leave out a block of values together (Schedule.value_skip): those that are multiplied at a time. On the
# portable path half as many with head_dim above 128 or block_m 64. And keys of such a
# block; half as many there where rows of a head_dim from 65 to 128 do not start on 16 bytes.
VALUE_ROWS: Mapping[str, int] = {"portable": 32, "hopper": 64}
VALUE_KEYS = 64
PATHS = ("auto", "portable", "hopper")
TAILS = ("none", "first_order")

MAX_HEAD_DIM = 256
MAX_SEGMENT = 8192  # a query's offset is 13 bits of the 32 by which a segment's queries are sorted
MOST_WEIGHED = 256  # pooled queries of a segment of rank="weight"
UNITS = (1, 2, 4, 8, 16, 32, 64, 128)  # neighbouring keys that may be ordered together
DENSE_LAST = 256  # queries at the end of a call that attend to all their keys
DENSE_LAST_PART = 28  # where they are at most one in so many
# An outlier counts for its part of the unit, and of that for 2 ** -OUTLIER_SHIFT: it decides where it outweighs its
# neighbours by far, as a sequence's first key does. Choosing every unit by its largest key would bias what is visited.
OUTLIER_SHIFT = 4
BLOCK_UNITS = 64  # neighbouring units whose mean key stands for them in a query's norm
SAMPLED_OF_BLOCK, SAMPLED_KEYS = 4, 64  # keys that are sampled of a block; so many of them at most tell how scores vary
MOST_EXCESS = 2  # log2 of the largest factor by which blocks count more than their mean keys say
CLUSTERS = (2, 4, 8)  # groups of keys of a unit that rank="query" may tell apart
CENTRE_KEYS = 128  # first keys at most, of which the mean is taken off all keys before they are rounded to 8 bits
CENTRE_PART = 16  # keys are scaled as if one of the first were at least such a part of that mean away from it
# Powers of two by which rows are scaled to e4m3 (raw_kernels/selection/unit_tile.cuh).
KEY_EXPONENT, QUERY_EXPONENT, MOST_EXPONENT = 4, 7, 9
DEFAULT_TAU = 0.02  # of segments with up to LONG_FROM candidates
DEFAULT_TAU_WITH_TAIL = 0.1  # the same with rank="query", where the tail counts what is left
LEAST_PART = 0.5  # of tau, likewise: a q tile waits for keys that weigh so much of any of its segment's queries
NEAR_KEYS = 64  # right before a segment, likewise: they come first in its order and q tiles wait for them
# A q tile waits no longer after PATIENCE key tiles in a row that add too little, and those that NEAR_KEYS fill, or as
# many as a PATIENCE_PARTS-th of its keys fills if that is more: what keys weigh is an estimate.
PATIENCE, PATIENCE_PARTS = 4, 16
LONG_FROM = 1 << 15
# How an error finds its taus (reference.error_taus is the definition).
FIRST_LADDER = (0.6, 0.15, 0.0375, 0.0094, 0.0023, 0.0006, 0.00015, 0.0)  # the last one's walk ends with the keys
ERROR_SEGMENTS = 32  # that are sampled, all if there are no more
DRAW_STEP = 0x61C88647  # of 2^32, by the golden ratio: where in its run of neighbours each sampled segment stands
WEIGHT_RUN = 8  # queries behind a pooled query of rank="weight", where nobody says how many there are
TAIL_SAMPLES = 256  # unvisited candidates that say how much all of them weigh, and what their values are
TAIL_FEW = 8192  # unvisited candidates: fewer of them have half as many samples
TAIL_DOUBT = 4  # so many of them that share the weight evenly are believed by half
TAIL_ROWS = 16  # of a q tile in turn that say together how far their samples' values count: a warp's
TAIL_EVIDENCE = 32  # elements of values that tell how far the samples' are to be believed
TAIL_TRIFLE = 1 / 64  # of what a row has found: where no more than this is added, values are the regression's
TAIL_LIGHT = 1 / 512  # of the samples' weight: where one of both halves has no more than this, it says nothing
TAIL_REACH = 100  # log2 of how many times all that a row has found one of them may weigh
MOMENT_KEYS = 2048  # keys between a power of two and the next that means and covariances are taken from, at most
GRAIN_KEYS = 256  # at most, of which the numbers of keys that moments are taken of are multiples
LOG2E = math.log2(math.e)
LN2 = math.log(2.0)

# Rendered into every kernel as `constexpr int` in namespace s2o::spec.
KERNEL_CONSTANTS: Mapping[str, int] = {
    "kMaxSegment": MAX_SEGMENT,
    "kStratum": STRATUM,
    "kKeyLevels": KEY_LEVELS,
    "kLayerMix": LAYER_MIX,
    "kMiddleFrom": MIDDLE_FROM,
    "kMiddle": MIDDLE,
    "kOrderHead": ORDER_HEAD,
    "kOrderWhole": ORDER_WHOLE,
    "kKeyBuckets": KEY_BUCKETS,
    "kMostPooled": MOST_WEIGHED,
    "kNearKeys": NEAR_KEYS,
    "kTailSamples": TAIL_SAMPLES,
    "kTailFew": TAIL_FEW,
    "kMomentKeys": MOMENT_KEYS,
    "kTailDoubt": TAIL_DOUBT,
    "kTailReach": TAIL_REACH,
    "kTailEvidence": TAIL_EVIDENCE,
    "kTailTrifleParts": round(1 / TAIL_TRIFLE),
    "kTailLightParts": round(1 / TAIL_LIGHT),
    "kOutlierShift": OUTLIER_SHIFT,
    "kBlockUnits": BLOCK_UNITS,
    "kSampledOfBlock": SAMPLED_OF_BLOCK,
    "kSampledKeys": SAMPLED_KEYS,
    "kMostExcess": MOST_EXCESS,
    "kCentrePart": CENTRE_PART,
    "kKeyExponent": KEY_EXPONENT,
    "kQueryExponent": QUERY_EXPONENT,
    "kMostExponent": MOST_EXPONENT,
    "kLeastParts": round(1 / LEAST_PART),
    "kPatience": PATIENCE,
    "kPatienceParts": PATIENCE_PARTS,
    "kLadder": len(FIRST_LADDER),
    "kErrorSegments": ERROR_SEGMENTS,
    "kDrawStep": DRAW_STEP,
}
