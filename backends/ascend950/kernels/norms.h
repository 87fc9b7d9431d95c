// What RMSNorm shares: its weight in the unified buffer and the factor of a row.
//
// A row's sum of squares is 64 running sums, one per lane, added up at the end: its order depends on the width alone.
#pragma once

#include "rows.h"

enum WeightKind : int32_t { kOnes = 0, kFloats = 1, kHalves = 2 };

// Weights as float32, whatever they are in memory.
template <class W>
__simd_vf__ inline void widen_weight(__ubuf__ float* to, __ubuf__ W* from, uint32_t width) {
  for (uint32_t at = 0; at < width; at += kLanes) {
    uint32_t left = width - at;
    vector_bool mask = asc_update_mask_b32(left);
    vector_f32 w;
    load_floats(w, from + at);
    asc_storealign(to + at, w, mask);
  }
}

__simd_vf__ inline void fill_weight(__ubuf__ float* to, uint32_t width) {
  vector_f32 one;
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  asc_duplicate_scalar(one, 1.0f, all);
  for (uint32_t at = 0; at < width; at += kLanes) asc_storealign(to + at, one, all);
}

// What the lanes hold, added up, in every lane.
__simd_callee__ inline void spread_sum(vector_f32& sum) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  asc_reduce_sum(sum, sum, all);
  asc_duplicate(sum, sum, all);
}

// 1 / sqrt(sum / width + eps)
__simd_callee__ inline void inverse_root(vector_f32& to, vector_f32& sum, uint32_t width, float eps) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value, one;
  asc_duplicate_scalar(value, (float)width, all);
  asc_div(value, sum, value, all);
  asc_add_scalar(value, value, eps, all);
  asc_sqrt(value, value, all);
  asc_duplicate_scalar(one, 1.0f, all);
  asc_div(to, one, value, all);
}

// 1 / sqrt(mean of squares + eps) in every lane.
template <class T>
__simd_callee__ inline void inverse_norm(vector_f32& to, __ubuf__ T* x, uint32_t width, float eps) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 sum, value, square;
  asc_duplicate_scalar(sum, 0.0f, all);
  for (uint32_t at = 0; at < width; at += kLanes) {
    uint32_t left = width - at;
    vector_bool mask = asc_update_mask_b32(left);
    load_floats(value, x + at);
    asc_mul(square, value, value, mask);  // zero past the row
    asc_add(sum, sum, square, all);
  }
  spread_sum(sum);
  inverse_root(to, sum, width, eps);
}

// Once per block: the weight as float32 at `place`, ordered before the rows that use it. `staging` holds it as it is in
// memory; a copy to there must wait until the vector unit is done.
__aicore__ inline void prepare_weight(uint32_t place, uint32_t staging, __gm__ uint8_t* weight, int32_t kind,
                                      uint32_t width) {
  __ubuf__ float* to = ub_at<float>(place);
  if (kind == kOnes) {
    asc_vf_call<fill_weight>(to, width);
    return;
  }
  __ubuf__ float* floats = ub_at<float>(staging);
  __ubuf__ bfloat16_t* halves = ub_at<bfloat16_t>(staging);
  if (kind == kFloats) {
    load_row(floats, (__gm__ float*)weight, width);
  } else {
    load_row(halves, (__gm__ bfloat16_t*)weight, width);
  }
  asc_sync_notify(PIPE_MTE2, PIPE_V, EVENT_ID0);
  asc_sync_wait(PIPE_MTE2, PIPE_V, EVENT_ID0);
  if (kind == kFloats) {
    asc_vf_call<widen_weight<float>>(to, floats, width);
  } else {
    asc_vf_call<widen_weight<bfloat16_t>>(to, halves, width);
  }
}
