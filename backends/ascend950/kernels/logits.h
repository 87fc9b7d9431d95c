// A row of logits as kernels see it: streamed in stretches, as scores, as keys that sort like them, as probabilities.
#pragma once

#include "draws.h"

// A row is longer than the unified buffer, so each pass streams it from the second-level cache in stretches.
constexpr uint32_t kStretch = 12288;
constexpr uint32_t kStretchBytes = kStretch * sizeof(float);
constexpr uint32_t kRow = 0;                            // two stretches
constexpr uint32_t kSecond = kRow + 2 * kStretchBytes;  // two of a second row, or of results
constexpr uint32_t kFound = kSecond + 2 * kStretchBytes;  // what passes leave behind
static_assert(kStretch % kQuads == 0);

constexpr uint32_t kOfMinusInfinity = 0x007FFFFF;  // key of -inf
constexpr float kLargest = 3.4028234663852886e38f;
constexpr float kMassOne = 2147483648.0f;

struct Row {
  __gm__ float* values;
  int64_t ids;
  float divisor;  // 1 leaves the values as they are
};

template <class T>
__aicore__ inline T found(uint32_t place) {
  return *ub_at<T>(place);
}

// The scalar core may read what vector functions stored.
__aicore__ inline void wait_for_vector() {
  asc_sync_notify(PIPE_V, PIPE_S, EVENT_ID0);
  asc_sync_wait(PIPE_V, PIPE_S, EVENT_ID0);
}

__aicore__ inline uint32_t stretch_at(const Row& row, int64_t first) { return min(row.ids - first, (int64_t)kStretch); }

__aicore__ inline void load_stretch(const Row& row, int64_t first, int32_t slot) {
  asc_sync_wait(PIPE_V, PIPE_MTE2, slot);
  load_row(ub_at<float>(kRow + slot * kStretchBytes), row.values + first, stretch_at(row, first));
  asc_sync_notify(PIPE_MTE2, PIPE_V, slot);
}

// Both buffers of a row are free; at the end of a kernel `close_rows` takes these flags back.
__aicore__ inline void open_rows() {
  for (int32_t slot = 0; slot < 2; ++slot) asc_sync_notify(PIPE_V, PIPE_MTE2, slot);
}
__aicore__ inline void close_rows() {
  for (int32_t slot = 0; slot < 2; ++slot) asc_sync_wait(PIPE_V, PIPE_MTE2, slot);
}

// Calls `pass(values, count, first id, arguments...)` for each stretch of a row, while the next one is on its way.
template <auto pass, class... A>
__aicore__ inline void over_row(const Row& row, A... arguments) {
  int32_t slot = 0;
  load_stretch(row, 0, slot);
  for (int64_t first = 0; first < row.ids; first += kStretch) {
    if (first + kStretch < row.ids) load_stretch(row, first + kStretch, 1 - slot);
    asc_sync_wait(PIPE_MTE2, PIPE_V, slot);
    asc_vf_call<pass>(ub_at<float>(kRow + slot * kStretchBytes), stretch_at(row, first), (int32_t)first, arguments...);
    asc_sync_notify(PIPE_V, PIPE_MTE2, slot);
    slot = 1 - slot;
  }
}

__simd_callee__ inline void load_scores(vector_f32& to, __ubuf__ float* from, float divisor, vector_bool& mask) {
  asc_loadalign(to, from);
  if (divisor != 1.0f) {
    vector_f32 by;
    asc_duplicate_scalar(by, divisor, mask);
    asc_div(to, to, by, mask);
  }
}

// Unsigned keys that sort as scores do; both zeros have one key. Not for NaN.
__simd_callee__ inline void order_keys(vector_u32& to, vector_f32& score, vector_bool& mask) {
  vector_f32 value;
  vector_s32 flip, top;
  asc_add_scalar(value, score, 0.0f, mask);  // -0 becomes 0
  asc_shiftright_scalar(flip, (vector_s32&)value, 31, mask);
  asc_duplicate_scalar(top, (int32_t)0x80000000, mask);
  asc_or(flip, flip, top, mask);
  asc_xor(to, (vector_u32&)value, (vector_u32&)flip, mask);
}

__simd_callee__ inline void score_of(vector_f32& to, vector_u32& key, vector_bool& mask) {
  vector_bool positive;
  vector_u32 flip, whole;
  asc_duplicate_scalar(flip, 0x80000000u, mask);
  asc_duplicate_scalar(whole, 0xFFFFFFFFu, mask);
  asc_ge(positive, key, flip, mask);
  asc_select(flip, flip, whole, positive);
  asc_xor((vector_u32&)to, key, flip, mask);
}

__simd_callee__ inline void kept_keys(vector_bool& kept, vector_u32& key, vector_s32& id, uint32_t cut_key,
                                      int32_t cut_limit, vector_bool& mask) {
  vector_bool tie;
  asc_eq_scalar(tie, key, cut_key, mask);
  asc_le_scalar(tie, id, cut_limit, tie);
  asc_gt_scalar(kept, key, cut_key, mask);
  asc_or(kept, kept, tie, mask);
}

__simd_callee__ inline void kept_scores(vector_bool& kept, vector_f32& score, vector_s32& id, uint32_t cut_key,
                                        int32_t cut_limit, vector_bool& mask) {
  vector_u32 key;
  order_keys(key, score, mask);
  kept_keys(kept, key, id, cut_key, cut_limit, mask);
}

__simd_callee__ inline void exp_of(vector_f32& to, vector_f32& score, float top, vector_bool& mask) {
  asc_add_scalar(to, score, -top, mask);
  asc_exp(to, to, mask);
}

// exp(score - top) / total, as every pass computes it.
__simd_callee__ inline void probability(vector_f32& to, vector_f32& score, float top, float total, vector_bool& mask) {
  vector_f32 by;
  exp_of(to, score, top, mask);
  asc_duplicate_scalar(by, total, mask);
  asc_div(to, to, by, mask);
}

// floor(probability * 2^31); probability 1 becomes 2^31 - 1, which no target reaches for.
__simd_callee__ inline void mass_of(vector_u32& to, vector_f32& score, float top, float total, vector_bool& mask) {
  vector_f32 p;
  probability(p, score, top, total, mask);
  asc_mul_scalar(p, p, kMassOne, mask);
  asc_float2int32_rd_sat((vector_s32&)to, p, mask);
}
