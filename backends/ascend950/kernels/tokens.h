// The token of a row: the best sum of score and Gumbel among what its cut keeps, or the draft that it judges.
#pragma once

#include "filters.h"

constexpr uint32_t kAcceptPurpose = 2, kResidualPurpose = 3;  // after TARGET, which is 0

__simd_vf__ inline void best_value(__ubuf__ float* x, uint32_t count, int32_t first, __ubuf__ float* state) {
  vector_f32 best, value;
  vector_s32 best_id, id;
  begin_best(best, best_id);
  if (first > 0) load_best(best, best_id, state);
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left);
    asc_loadalign(value, x + at);
    asc_arange(id, first + (int32_t)at);
    keep_best(best, best_id, value, id, mask);
  }
  store_best(state, best, best_id);
}

__simd_callee__ inline void draw_lanes(vector_f32& best, vector_s32& best_id, __ubuf__ float* x, int32_t first,
                                       uint32_t& left, vector_u32& word, float divisor, uint32_t cut_key,
                                       int32_t cut_limit) {
  vector_bool mask = asc_update_mask_b32(left), kept;
  vector_f32 value, noise;
  vector_s32 id;
  load_scores(value, x, divisor, mask);
  asc_arange(id, first);
  kept_scores(kept, value, id, cut_key, cut_limit, mask);
  gumbel(noise, word, kept);
  asc_add(value, value, noise, kept);
  keep_best(best, best_id, value, id, kept);
}

// Best sum of score and Gumbel.
__simd_vf__ inline void best_sum(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, uint32_t cut_key,
                                 int32_t cut_limit, uint32_t seed_low, uint32_t seed_high, uint32_t index,
                                 uint32_t purpose, uint32_t anchor, __ubuf__ float* state) {
  vector_f32 best;
  vector_s32 best_id;
  begin_best(best, best_id);
  if (first > 0) load_best(best, best_id, state);
  uint32_t left = count;
  for (uint32_t at = 0; at < count; at += kQuads) {
    vector_u32 w0, w1, w2, w3;
    words_of_ids(w0, w1, w2, w3, first + (int32_t)at, seed_low, seed_high, index, purpose, anchor);
    for (uint32_t part = 0; part < 4; ++part) {
      vector_u32& word = part < 2 ? (part ? w1 : w0) : (part == 2 ? w2 : w3);
      const uint32_t place = at + part * kLanes;
      draw_lanes(best, best_id, x + place, first + (int32_t)place, left, word, divisor, cut_key, cut_limit);
    }
  }
  store_best(state, best, best_id);
}

// The same over a list that holds all ids that are kept.
__simd_vf__ inline void best_listed_sum(__ubuf__ uint32_t* keys, __ubuf__ int32_t* ids, uint32_t entries,
                                        uint32_t cut_key, int32_t cut_limit, uint32_t seed_low, uint32_t seed_high,
                                        uint32_t index, uint32_t purpose, uint32_t anchor, __ubuf__ float* state) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), kept;
  vector_f32 best, value, noise;
  vector_s32 best_id, id;
  vector_u32 key, word;
  begin_best(best, best_id);
  for (uint32_t at = 0; at < entries; at += kLanes) {
    asc_loadalign(key, keys + at);
    asc_loadalign(id, ids + at);
    kept_keys(kept, key, id, cut_key, cut_limit, all);
    score_of(value, key, kept);
    words_of_listed(word, id, seed_low, seed_high, index, purpose, anchor);
    gumbel(noise, word, kept);
    asc_add(value, value, noise, kept);
    keep_best(best, best_id, value, id, kept);
  }
  store_best(state, best, best_id);
}

__aicore__ inline int32_t draw(const Row& row, const Cut& cut, const Stream& stream, bool listed) {
  if (listed) {
    asc_vf_call<best_listed_sum>(ub_at<uint32_t>(kKeys), ub_at<int32_t>(kIds), cut.listed, cut.key, cut.limit,
                                 stream.seed_low, stream.seed_high, stream.index, stream.purpose, stream.anchor,
                                 ub_at<float>(kBest));
  } else {
    over_row<best_sum>(row, row.divisor, cut.key, cut.limit, stream.seed_low, stream.seed_high, stream.index,
                       stream.purpose, stream.anchor, ub_at<float>(kBest));
  }
  wait_for_vector();
  return found<int32_t>(kBest + 2 * kRegister);
}

// ---- Rejection: a draft is kept with min(1, p / q); what replaces it is drawn from what p has more than q.

__simd_callee__ inline void kept_probability(vector_f32& p, vector_bool& kept, vector_f32& score, vector_s32& id,
                                             uint32_t cut_key, int32_t cut_limit, float top, float total,
                                             vector_bool& mask) {
  kept_scores(kept, score, id, cut_key, cut_limit, mask);
  probability(p, score, top, total, kept);  // 0 where nothing is kept
}

// Whether u * q < p for one id, whose values are `own` and `other`: 1 or 0.
__simd_vf__ inline void judge(float own, float other, int32_t draft, float divisor, uint32_t cut_key, int32_t cut_limit,
                              float top, float total, uint32_t other_key, int32_t other_limit, float other_top,
                              float other_total, uint32_t seed_low, uint32_t seed_high, uint32_t index,
                              uint32_t purpose, __ubuf__ int32_t* accepted) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), kept;
  vector_f32 score, by, p, q, u;
  vector_s32 id, yes, no;
  vector_u32 c0, c1, c2, c3;
  asc_duplicate_scalar(id, draft, all);
  asc_duplicate_scalar(by, divisor, all);
  asc_duplicate_scalar(score, own, all);
  asc_div(score, score, by, all);
  kept_probability(p, kept, score, id, cut_key, cut_limit, top, total, all);
  asc_duplicate_scalar(score, other, all);
  asc_div(score, score, by, all);
  kept_probability(q, kept, score, id, other_key, other_limit, other_top, other_total, all);
  asc_duplicate_scalar(c0, 0u, all);
  philox(c0, c1, c2, c3, seed_low, seed_high, index, purpose, 0);
  uniform(u, c0, all);
  asc_mul(q, u, q, all);
  asc_lt(kept, q, p, all);
  asc_duplicate_scalar(yes, 1, all);
  asc_duplicate_scalar(no, 0, all);
  asc_select(yes, yes, no, kept);
  asc_storealign(accepted, yes, all);
}

// Best of ln(p - q) + Gumbel where p > q; and of score + Gumbel, should p exceed q nowhere.
__simd_callee__ inline void replace_lanes(vector_f32& best, vector_s32& best_id, vector_f32& fallback,
                                          vector_s32& fallback_id, __ubuf__ float* x, __ubuf__ float* y, int32_t first,
                                          uint32_t& left, vector_u32& word, float divisor, uint32_t cut_key,
                                          int32_t cut_limit, float top, float total, uint32_t other_key,
                                          int32_t other_limit, float other_top, float other_total) {
  vector_bool mask = asc_update_mask_b32(left), kept, other_kept, more;
  vector_f32 value, other, p, q, noise;
  vector_s32 id;
  asc_arange(id, first);
  load_scores(value, x, divisor, mask);
  kept_probability(p, kept, value, id, cut_key, cut_limit, top, total, mask);
  load_scores(other, y, divisor, mask);
  kept_probability(q, other_kept, other, id, other_key, other_limit, other_top, other_total, mask);
  gumbel(noise, word, mask);
  asc_add(value, value, noise, kept);
  keep_best(fallback, fallback_id, value, id, kept);
  asc_gt(more, p, q, mask);
  asc_sub(p, p, q, more);
  asc_ln(p, p, more);
  asc_add(p, p, noise, more);
  keep_best(best, best_id, p, id, more);
}

__simd_vf__ inline void best_residual(__ubuf__ float* x, __ubuf__ float* y, uint32_t count, int32_t first,
                                      float divisor, uint32_t cut_key, int32_t cut_limit, float top, float total,
                                      uint32_t other_key, int32_t other_limit, float other_top, float other_total,
                                      uint32_t seed_low, uint32_t seed_high, uint32_t index, uint32_t purpose,
                                      __ubuf__ float* state, __ubuf__ float* fallback_state) {
  vector_f32 best, fallback;
  vector_s32 best_id, fallback_id;
  begin_best(best, best_id);
  begin_best(fallback, fallback_id);
  if (first > 0) {
    load_best(best, best_id, state);
    load_best(fallback, fallback_id, fallback_state);
  }
  uint32_t left = count;
  for (uint32_t at = 0; at < count; at += kQuads) {
    vector_u32 w0, w1, w2, w3;
    words_of_ids(w0, w1, w2, w3, first + (int32_t)at, seed_low, seed_high, index, purpose, 0);
    for (uint32_t part = 0; part < 4; ++part) {
      vector_u32& word = part < 2 ? (part ? w1 : w0) : (part == 2 ? w2 : w3);
      const uint32_t place = at + part * kLanes;
      replace_lanes(best, best_id, fallback, fallback_id, x + place, y + place, first + (int32_t)place, left, word,
                    divisor, cut_key, cut_limit, top, total, other_key, other_limit, other_top, other_total);
    }
  }
  store_best(state, best, best_id);
  store_best(fallback_state, fallback, fallback_id);
}

__aicore__ inline void load_stretches(const Row& row, const Row& other, int64_t first, int32_t slot) {
  asc_sync_wait(PIPE_V, PIPE_MTE2, slot);
  load_row(ub_at<float>(kRow + slot * kStretchBytes), row.values + first, stretch_at(row, first));
  load_row(ub_at<float>(kSecond + slot * kStretchBytes), other.values + first, stretch_at(row, first));
  asc_sync_notify(PIPE_MTE2, PIPE_V, slot);
}

__aicore__ inline int32_t replace(const Row& row, const Cut& cut, const Row& other, const Cut& other_cut,
                                  const Stream& stream) {
  int32_t slot = 0;
  load_stretches(row, other, 0, slot);
  for (int64_t first = 0; first < row.ids; first += kStretch) {
    if (first + kStretch < row.ids) load_stretches(row, other, first + kStretch, 1 - slot);
    asc_sync_wait(PIPE_MTE2, PIPE_V, slot);
    asc_vf_call<best_residual>(ub_at<float>(kRow + slot * kStretchBytes), ub_at<float>(kSecond + slot * kStretchBytes),
                               stretch_at(row, first), (int32_t)first, row.divisor, cut.key, cut.limit, cut.top,
                               cut.total, other_cut.key, other_cut.limit, other_cut.top, other_cut.total,
                               stream.seed_low, stream.seed_high, stream.index, stream.purpose + kResidualPurpose,
                               ub_at<float>(kBest), ub_at<float>(kFallback));
    asc_sync_notify(PIPE_V, PIPE_MTE2, slot);
    slot = 1 - slot;
  }
  wait_for_vector();
  const int32_t token = found<int32_t>(kBest + 2 * kRegister);
  return token < row.ids ? token : found<int32_t>(kFallback + 2 * kRegister);
}

__aicore__ inline bool accepts(const Row& row, const Cut& cut, const Row& other, const Cut& other_cut,
                               const Stream& stream, int32_t draft) {
  if (draft >= row.ids) return false;
  asc_vf_call<judge>(row.values[draft], other.values[draft], draft, row.divisor, cut.key, cut.limit, cut.top, cut.total,
                     other_cut.key, other_cut.limit, other_cut.top, other_cut.total, stream.seed_low, stream.seed_high,
                     stream.index, stream.purpose + kAcceptPurpose, ub_at<int32_t>(kEach));
  wait_for_vector();
  return found<int32_t>(kEach) != 0;
}

__aicore__ inline int32_t token_of(const Row& row, const Row& other, const Filters& filters, const Stream& stream,
                                   bool drawn, int32_t draft) {
  const bool judged = drawn && draft >= 0 && other.values != nullptr;
  const Cut cut = drawn ? find_cut(row, filters, judged) : look_at(row);
  if (!cut.usable) return -1;
  if (!drawn) {
    over_row<best_value>(row, ub_at<float>(kBest));
    wait_for_vector();
    return found<int32_t>(kBest + 2 * kRegister);
  }
  if (judged) {
    const Cut other_cut = find_cut(other, filters, true);
    if (other_cut.usable) {
      if (accepts(row, cut, other, other_cut, stream, draft)) return draft;
      return replace(row, cut, other, other_cut, stream);
    }
  }
  return draw(row, cut, stream, cut.listed > 0 && !judged);  // the list of a judged row is the draft's
}
