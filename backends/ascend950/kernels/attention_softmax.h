// Softmax of the heads of one vector core, and their sums of values.
//
// Scores arrive as [2][64 keys][16 heads]: a register holds four keys of 16 heads, so maxima and sums over keys are
// element by element and the four keys of a register meet once a group. Scores are float32 throughout; probabilities
// are rounded to bfloat16 for the Cube, and their sums keep them unrounded.
#pragma once

#include "attention.h"

constexpr int32_t kHeads = 16;  // of one of the two registers

__simd_callee__ inline void lost_score(vector_f32& x) {
  asc_duplicate_scalar((vector_u32&)x, 0xFF800000u, asc_create_mask_b32(PAT_ALL));  // minus infinity
}

__simd_callee__ inline void scale_register(__ubuf__ float* scores, vector_f32& best, vector_f32& factor,
                                           vector_f32& mark) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 score;
  asc_loadalign(score, scores);
  asc_madd(score, factor, mark, all);
  asc_max(best, best, score, all);
  asc_storealign(scores, score, all);
}

// Scaled and marked scores, in place, and the largest of each head so far.
__simd_vf__ inline void scale_scores(__ubuf__ float* scores, __ubuf__ float* holes, __ubuf__ float* top, float scale,
                                     int32_t first) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 factor, best, best_after;
  asc_duplicate_scalar(factor, scale, all);
  if (first) {
    lost_score(best);
    lost_score(best_after);
  } else {
    asc_loadalign(best, top);
    asc_loadalign(best_after, top + kLanes);
  }
  for (int32_t i = 0; i < kTile / 4; ++i) {
    vector_f32 mark;
    asc_loadalign_brc_elem2datablock(mark, holes + i * 8);
    scale_register(scores + i * kLanes, best, factor, mark);
    scale_register(scores + kTile * kHeads + i * kLanes, best_after, factor, mark);
  }
  asc_storealign(top, best, all);
  asc_storealign(top + kLanes, best_after, all);
}

// The other three keys' values of each head.
__simd_callee__ inline void turn_keys(vector_f32& second, vector_f32& third, vector_f32& fourth, const vector_f32& x,
                                      __ubuf__ float* scratch) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL);
  asc_storealign(scratch, x, all);
  asc_storealign(scratch + kLanes, x, all);
  asc_mem_bar(VST_VLD);
  asc_loadalign(second, scratch + kHeads);
  asc_loadalign(third, scratch + 2 * kHeads);
  asc_loadalign(fourth, scratch + 3 * kHeads);
}

// The maximum after a group, and what it makes of earlier sums. `opens`: there are none.
__simd_vf__ inline void renew_maximum(__ubuf__ float* top, __ubuf__ float* best, __ubuf__ float* shift,
                                      __ubuf__ float* shrink, __ubuf__ float* head_shrink, __ubuf__ float* scratch,
                                      int32_t opens) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 zero;
  asc_duplicate_scalar(zero, 0.0f, all);
  for (int32_t g = 0; g < 2; ++g) {
    vector_f32 most, second, third, fourth, before, base, factor, lost;
    vector_bool none;
    asc_loadalign(most, top + g * kLanes);
    turn_keys(second, third, fourth, most, scratch);
    asc_max(most, most, second, all);
    asc_max(third, third, fourth, all);
    asc_max(most, most, third, all);
    if (!opens) {
      asc_loadalign(before, best + g * kLanes);
      asc_max(most, most, before, all);
    }
    asc_storealign(best + g * kLanes, most, all);
    lost_score(lost);
    asc_eq(none, most, lost, all);  // no key yet: exp(-inf - 0) is 0, exp(-inf + inf) would be NaN
    asc_select(base, zero, most, none);
    asc_storealign(shift + g * kLanes, base, all);
    if (opens) continue;
    asc_exp_sub(factor, before, base, all);
    asc_storealign(shrink + g * kLanes, factor, all);
    asc_storealign(head_shrink + g * kHeads, factor, asc_create_mask_b32(PAT_VL16));
  }
}

enum Start : int32_t { kFromZero = 0, kShrunk = 1, kGoesOn = 2 };

// Probabilities of a tile, as the Cube reads them, and their sums.
__simd_vf__ inline void weigh_scores(__ubuf__ bfloat16_t* weights, __ubuf__ float* scores, __ubuf__ float* shift,
                                     __ubuf__ float* shrink, __ubuf__ float* totals, int32_t start) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  for (int32_t g = 0; g < 2; ++g) {
    vector_f32 base, total, factor;
    asc_loadalign(base, shift + g * kLanes);
    if (start == kFromZero) {
      asc_duplicate_scalar(total, 0.0f, all);
    } else {
      asc_loadalign(total, totals + g * kLanes);
    }
    if (start == kShrunk) {
      asc_loadalign(factor, shrink + g * kLanes);
      asc_mul(total, total, factor, all);
    }
    for (int32_t i = 0; i < kTile / 4; ++i) {
      vector_f32 weight;
      const int32_t at = g * kTile * kHeads + i * kLanes;
      asc_loadalign(weight, scores + at);
      asc_exp_sub(weight, weight, base, all);
      asc_add(total, total, weight, all);
      store_floats(weights + at, weight, all);
    }
    asc_storealign(totals + g * kLanes, total, all);
  }
}

// What ends a unit: the inverse of the denominator, whether there is anything to divide, and the log of the sum. A row
// without keys has none, even where its query is NaN.
__simd_vf__ inline void settle_heads(__ubuf__ float* totals, __ubuf__ float* shift, __ubuf__ float* sink,
                                     __ubuf__ float* any, __ubuf__ float* inverse, __ubuf__ float* keep,
                                     __ubuf__ float* lse, __ubuf__ float* scratch) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL), heads = asc_create_mask_b32(PAT_VL16);
  vector_f32 zero, one, mark;
  vector_bool found;
  asc_duplicate_scalar(zero, 0.0f, all);
  asc_duplicate_scalar(one, 1.0f, all);
  asc_loadalign(mark, any);
  asc_reduce_max(mark, mark, all);
  asc_duplicate(mark, mark, all);
  asc_ge(found, mark, zero, all);
  for (int32_t g = 0; g < 2; ++g) {
    vector_f32 total, second, third, fourth, base, below, result, log, lost;
    vector_bool some;
    asc_loadalign(total, totals + g * kLanes);
    turn_keys(second, third, fourth, total, scratch);
    // (1 + 3) + (2 + 4), whose bits are the same in the lanes of all four keys
    asc_add(total, total, third, all);
    asc_add(second, second, fourth, all);
    asc_add(total, total, second, all);
    asc_loadalign(base, shift + g * kLanes);
    asc_ne(some, total, zero, found);
    asc_loadalign(below, sink + g * kHeads);
    asc_exp_sub(below, below, base, all);
    asc_add(below, below, total, all);
    asc_div(below, one, below, all);
    asc_storealign(inverse + g * kHeads, below, heads);
    asc_select(result, one, zero, some);
    asc_storealign(keep + g * kHeads, result, heads);
    asc_ln(log, total, all);
    asc_add(log, log, base, all);
    lost_score(lost);
    asc_select(log, log, lost, some);
    asc_storealign(lse + g * kHeads, log, heads);
  }
}

// Sums of a group onto those of the groups before.
__simd_vf__ inline void add_sums(__ubuf__ float* sums, __ubuf__ float* added, __ubuf__ float* head_shrink,
                                 int32_t dim) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL);
  for (int32_t h = 0; h < kHalf; ++h) {
    vector_f32 factor;
    asc_loadalign_brc_elem(factor, head_shrink + h);
    for (int32_t at = 0; at < dim; at += kLanes) {
      vector_f32 sum, more;
      asc_loadalign(sum, sums + h * dim + at);
      asc_loadalign(more, added + h * dim + at);
      asc_madd(sum, factor, more, all);
      asc_storealign(sums + h * dim + at, sum, all);
    }
  }
}

// Results of a unit, over its sums: what is stored lies below what is still to be read.
template <bool Added>
__simd_vf__ inline void divide_sums(__ubuf__ bfloat16_t* out, __ubuf__ float* sums, __ubuf__ float* added,
                                    __ubuf__ float* head_shrink, __ubuf__ float* inverse, __ubuf__ float* keep,
                                    int32_t dim) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 zero;
  asc_duplicate_scalar(zero, 0.0f, all);
  for (int32_t h = 0; h < kHalf; ++h) {
    vector_f32 factor, divisor, kept;
    vector_bool some;
    asc_loadalign_brc_elem(divisor, inverse + h);
    asc_loadalign_brc_elem(kept, keep + h);
    asc_gt(some, kept, zero, all);
    if constexpr (Added) asc_loadalign_brc_elem(factor, head_shrink + h);
    for (int32_t at = 0; at < dim; at += kLanes) {
      vector_f32 sum, more;
      asc_loadalign(sum, sums + h * dim + at);
      if constexpr (Added) {
        asc_loadalign(more, added + h * dim + at);
        asc_madd(sum, factor, more, all);
      }
      asc_mul(sum, sum, divisor, some);  // zero where nothing is kept
      vector_bf16 narrow;
      asc_float2bfloat16_rn(narrow, sum, all);
      asc_storealign_pack((__ubuf__ uint32_t*)(out + h * dim + at), (vector_u32&)narrow, all);
    }
  }
}
