// Logprobs and ranks of the ids asked for, and the best ids of a row.
#pragma once

#include "filters.h"

constexpr uint32_t kCounted = kFilterEnd;             // better ids; or the next id: its key, then itself
constexpr uint32_t kAsked = kCounted + 2 * kRegister;  // results of a row: numbers, then values
constexpr uint32_t kGroup = 1024;                      // that are collected before they are stored
constexpr uint32_t kValues = kAsked + kGroup * sizeof(int32_t);
static_assert(kValues + kGroup * sizeof(float) <= 248 * 1024);
constexpr int32_t kFewBest = 4;  // that a pass over the row for each finds; more are sought in a list
constexpr uint32_t kNaN = 0x7FC00000;

// How many ids come before `own` in the order of values down and ids up.
__simd_vf__ inline void count_better(__ubuf__ float* x, uint32_t count, int32_t first, float own, int32_t token,
                                     __ubuf__ int32_t* better, __ubuf__ int32_t* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value;
  vector_s32 id, sum, more;
  asc_duplicate_scalar(sum, 0, all);
  if (first > 0) asc_loadalign(sum, lanes);
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), above, equal;
    asc_loadalign(value, x + at);
    asc_arange(id, first + (int32_t)at);
    asc_eq_scalar(equal, value, own, mask);
    asc_lt_scalar(equal, id, token, equal);
    asc_gt_scalar(above, value, own, mask);
    asc_or(above, above, equal, mask);
    asc_duplicate_scalar(more, 1, above);
    asc_add(sum, sum, more, all);
  }
  asc_storealign(lanes, sum, all);
  asc_reduce_sum(sum, sum, all);
  asc_storealign(better, sum, all);
}

// Among lanes behind `before`, in that order, the best so far. Keys, so that -inf has a place too.
__simd_callee__ inline void keep_next(vector_u32& best, vector_s32& best_id, vector_u32& key, vector_s32& id,
                                      uint32_t before, int32_t before_id, vector_bool& mask) {
  vector_bool behind, equal, better;
  asc_eq_scalar(equal, key, before, mask);
  asc_gt_scalar(equal, id, before_id, equal);
  asc_lt_scalar(behind, key, before, mask);
  asc_or(behind, behind, equal, mask);
  asc_gt(better, key, best, behind);
  asc_select(best, key, best, better);
  asc_select(best_id, id, best_id, better);
}

// The best key of all lanes, and the lowest id that has it.
__simd_callee__ inline void store_next(__ubuf__ uint32_t* next, vector_u32& best, vector_s32& best_id) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), equal;
  vector_u32 top;
  vector_s32 winner;
  asc_reduce_max(top, best, all);
  asc_storealign(next, top, all);
  asc_duplicate(top, top, all);
  asc_eq(equal, best, top, all);
  asc_reduce_min(winner, best_id, equal);
  asc_storealign((__ubuf__ int32_t*)next + kLanes, winner, all);
}

__simd_callee__ inline void begin_next(vector_u32& best, vector_s32& best_id) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  asc_duplicate_scalar(best, 0u, all);  // below every key
  asc_duplicate_scalar(best_id, kNobody, all);
}

// The id that comes after `before_id`, whose key is `before`.
__simd_vf__ inline void next_best(__ubuf__ float* x, uint32_t count, int32_t first, uint32_t before, int32_t before_id,
                                  __ubuf__ uint32_t* next, __ubuf__ uint32_t* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value;
  vector_s32 id, best_id;
  vector_u32 key, best;
  begin_next(best, best_id);
  if (first > 0) {
    asc_loadalign(best, lanes);
    asc_loadalign(best_id, (__ubuf__ int32_t*)lanes + kLanes);
  }
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left);
    asc_loadalign(value, x + at);
    asc_arange(id, first + (int32_t)at);
    order_keys(key, value, mask);
    keep_next(best, best_id, key, id, before, before_id, mask);
  }
  asc_storealign(lanes, best, all);
  asc_storealign((__ubuf__ int32_t*)lanes + kLanes, best_id, all);
  store_next(next, best, best_id);
}

// The same within a list.
__simd_vf__ inline void next_listed(__ubuf__ uint32_t* keys, __ubuf__ int32_t* ids, uint32_t entries, uint32_t before,
                                    int32_t before_id, __ubuf__ uint32_t* next) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_s32 id, best_id;
  vector_u32 key, best;
  begin_next(best, best_id);
  for (uint32_t at = 0; at < entries; at += kLanes) {
    asc_loadalign(key, keys + at);
    asc_loadalign(id, ids + at);
    keep_next(best, best_id, key, id, before, before_id, all);
  }
  store_next(next, best, best_id);
}

__aicore__ inline float logprob_of(const Row& row, const Cut& cut, int32_t token) {
  return row.values[token] - cut.top - found<float>(kLogTotal);
}

// Results that were collected, out; their places may then be filled again.
__aicore__ inline void store_group(__gm__ int32_t* numbers, __gm__ float* values, int32_t count) {
  after_scalar_stores();
  store_row(numbers, ub_at<int32_t>(kAsked), count);
  store_row(values, ub_at<float>(kValues), count);
  asc_sync_notify(PIPE_MTE3, PIPE_S, EVENT_ID0);
  asc_sync_wait(PIPE_MTE3, PIPE_S, EVENT_ID0);
}

__aicore__ inline void rank_ids(const Row& row, const Cut& cut, __gm__ int32_t* asked, __gm__ float* logprobs,
                                __gm__ int32_t* ranks, int32_t num_asked) {
  for (int32_t start = 0; start < num_asked; start += kGroup) {
    const int32_t count = min(num_asked - start, (int32_t)kGroup);
    for (int32_t i = 0; i < count; ++i) {
      const int32_t token = asked[start + i];
      int32_t rank = 0;
      if (cut.usable && token >= 0 && token < row.ids) {
        over_row<count_better>(row, row.values[token], token, ub_at<int32_t>(kCounted), ub_at<int32_t>(kLanesOf));
        wait_for_vector();
        rank = found<int32_t>(kCounted) + 1;
        ub_at<float>(kValues)[i] = logprob_of(row, cut, token);
      } else {
        ub_at<uint32_t>(kValues)[i] = kNaN;
      }
      ub_at<int32_t>(kAsked)[i] = rank;
    }
    store_group(ranks + start, logprobs + start, count);
  }
}

__aicore__ inline void best_ids(const Row& row, const Cut& cut, __gm__ int32_t* ids, __gm__ float* logprobs,
                                int32_t num_top) {
  uint32_t before = 0xFFFFFFFF;
  int32_t before_id = kNobody;
  Cut few = cut;
  if (cut.usable && num_top > kFewBest && num_top < row.ids) narrow<false>(few, row, num_top);
  for (int32_t start = 0; start < num_top; start += kGroup) {
    const int32_t count = min(num_top - start, (int32_t)kGroup);
    for (int32_t i = 0; i < count; ++i) {
      if (cut.usable) {
        if (few.listed) {
          asc_vf_call<next_listed>(ub_at<uint32_t>(kKeys), ub_at<int32_t>(kIds), few.listed, before, before_id,
                                   ub_at<uint32_t>(kCounted));
        } else {
          over_row<next_best>(row, before, before_id, ub_at<uint32_t>(kCounted), ub_at<uint32_t>(kLanesOf));
        }
        wait_for_vector();
        before = found<uint32_t>(kCounted);
        before_id = found<int32_t>(kCounted + kRegister);
        ub_at<int32_t>(kAsked)[i] = before_id;
        ub_at<float>(kValues)[i] = logprob_of(row, cut, before_id);
      } else {
        ub_at<int32_t>(kAsked)[i] = -1;
        ub_at<uint32_t>(kValues)[i] = kNaN;
      }
    }
    store_group(ids + start, logprobs + start, count);
  }
}
