// What the search for a cut finds out about a row, and about a list of few of its ids.
#pragma once

#include "logits.h"

// What passes over a row leave behind, each in a register of the unified buffer.
constexpr uint32_t kTop = kFound;                    // best score
constexpr uint32_t kBroken = kTop + kRegister;       // NaN and +inf
constexpr uint32_t kLowest = kBroken + kRegister;    // lowest key that min-p keeps
constexpr uint32_t kTotal = kLowest + kRegister;     // sum of exp(score - top)
constexpr uint32_t kLogTotal = kTotal + kRegister;   // and its logarithm
constexpr uint32_t kWeight = kLogTotal + kRegister;  // counts or masses from three keys on
constexpr uint32_t kTie = kWeight + 3 * kRegister;   // the last tie that is kept
constexpr uint32_t kEach = kTie + kRegister;         // mass of one id
constexpr uint32_t kLanesOf = kEach + kRegister;     // the same per lane, for the next stretch
constexpr uint32_t kBest = kLanesOf + 4 * kRegister;
constexpr uint32_t kFallback = kBest + 3 * kRegister;
constexpr uint32_t kPicked = kFallback + 3 * kRegister;  // how many ids of a stretch are listed, and which
constexpr uint32_t kPicks = kPicked + kRegister;

// Where a cut is known to be among few ids, they are listed in place of a second row: keys, weights, ids.
constexpr uint32_t kShort = 6144;  // ids that may be listed
constexpr uint32_t kLeastMass = 360000;  // fewer than that have this mass: all masses add up to 2^31
constexpr uint32_t kList = 8192;   // room for them, since those of each stretch begin at a whole register
constexpr uint32_t kKeys = kSecond;
constexpr uint32_t kWeights = kKeys + kList * sizeof(uint32_t);
constexpr uint32_t kIds = kWeights + kList * sizeof(uint32_t);
constexpr int64_t kListedIds = (kList - kShort) / kLanes * (int64_t)kStretch;  // a longer row is not listed
static_assert(kIds + kList * sizeof(int32_t) <= kFound);

constexpr uint32_t kFilterEnd = kPicks + (kShort + kLanes) * sizeof(int32_t);

// ---- Passes. Each takes up what the stretch before it left per lane.

// Best score, and whether any is NaN or +inf.
__simd_vf__ inline void survey(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, __ubuf__ float* top,
                               __ubuf__ int32_t* broken, __ubuf__ float* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 best, value, nothing;
  vector_s32 bad, one, sum;
  asc_duplicate_scalar((vector_u32&)nothing, 0xFF800000u, all);
  asc_duplicate_scalar(one, 1, all);
  asc_duplicate_scalar(bad, 0, all);
  best = nothing;
  if (first > 0) {
    asc_loadalign(best, lanes);
    asc_loadalign(bad, (__ubuf__ int32_t*)lanes + kLanes);
  }
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), good, wrong;
    load_scores(value, x + at, divisor, mask);
    asc_le_scalar(good, value, kLargest, mask);
    asc_not(wrong, good, mask);
    asc_select(bad, one, bad, wrong);
    asc_select(value, value, nothing, good);
    asc_max(best, best, value, all);
  }
  asc_storealign(lanes, best, all);
  asc_storealign((__ubuf__ int32_t*)lanes + kLanes, bad, all);
  asc_reduce_max(best, best, all);
  asc_storealign(top, best, all);
  asc_reduce_sum(sum, bad, all);
  asc_storealign(broken, sum, all);
}

// The lowest key of scores that are at most -ln(share) below the best.
__simd_vf__ inline void lowest_shared(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, float best,
                                      float share, __ubuf__ uint32_t* lowest, __ubuf__ uint32_t* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 floor, value, below;
  vector_u32 least, key, most;
  asc_duplicate_scalar(floor, share, all);
  asc_min_scalar(floor, floor, 1.0f, all);
  asc_ln(floor, floor, all);
  asc_duplicate_scalar(most, 0xFFFFFFFFu, all);
  least = most;
  if (first > 0) asc_loadalign(least, lanes);
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), shared;
    load_scores(value, x + at, divisor, mask);
    asc_add_scalar(below, value, -best, mask);
    asc_ge(shared, below, floor, mask);
    order_keys(key, value, mask);
    asc_select(key, key, most, shared);
    asc_min(least, least, key, all);
  }
  asc_storealign(lanes, least, all);
  asc_reduce_min(least, least, all);
  asc_storealign(lowest, least, all);
}

// Sum of exp(score - best) over what a cut keeps, and its logarithm.
__simd_vf__ inline void sum_exp(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, uint32_t cut_key,
                                int32_t cut_limit, float best, __ubuf__ float* total, __ubuf__ float* log_total,
                                __ubuf__ float* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 sum, before, value, part;
  vector_s32 id;
  asc_duplicate_scalar(sum, 0.0f, all);
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), kept;
    load_scores(value, x + at, divisor, mask);
    asc_arange(id, first + (int32_t)at);
    kept_scores(kept, value, id, cut_key, cut_limit, mask);
    exp_of(part, value, best, kept);
    asc_add(sum, sum, part, all);
  }
  if (first > 0) {
    asc_loadalign(before, lanes);
    asc_add(sum, before, sum, all);
  }
  asc_storealign(lanes, sum, all);
  asc_reduce_sum(sum, sum, all);
  asc_storealign(total, sum, all);
  asc_ln(sum, sum, all);
  asc_storealign(log_total, sum, all);
}

__simd_callee__ inline void add_from(vector_u32& sum, vector_u32& key, uint32_t from, vector_u32& weight,
                                     vector_bool& kept) {
  vector_bool reached;
  vector_u32 more;
  asc_ge_scalar(reached, key, from, kept);
  asc_add(more, sum, weight, reached);
  asc_select(sum, more, sum, reached);
}

__simd_callee__ inline void store_weight(__ubuf__ uint32_t* to, __ubuf__ uint32_t* lanes, vector_u32& sum) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  asc_storealign(lanes, sum, all);
  asc_reduce_sum(sum, sum, all);
  asc_storealign(to, sum, all);
}

// How many kept ids have keys from each of three on, or what mass they have.
template <bool masses>
__simd_vf__ inline void weigh(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, uint32_t cut_key,
                              int32_t cut_limit, float best, float total, uint32_t low, uint32_t middle, uint32_t high,
                              __ubuf__ uint32_t* weight, __ubuf__ uint32_t* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value;
  vector_s32 id;
  vector_u32 key, each, from_low, from_middle, from_high;
  asc_duplicate_scalar(from_low, 0u, all);
  from_middle = from_high = from_low;
  if (first > 0) {
    asc_loadalign(from_low, lanes);
    asc_loadalign(from_middle, lanes + kLanes);
    asc_loadalign(from_high, lanes + 2 * kLanes);
  }
  asc_duplicate_scalar(each, 1u, all);
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), kept;
    load_scores(value, x + at, divisor, mask);
    asc_arange(id, first + (int32_t)at);
    order_keys(key, value, mask);
    kept_keys(kept, key, id, cut_key, cut_limit, mask);
    if (masses) mass_of(each, value, best, total, kept);
    add_from(from_low, key, low, each, kept);
    add_from(from_middle, key, middle, each, kept);
    add_from(from_high, key, high, each, kept);
  }
  store_weight(weight, lanes, from_low);
  store_weight(weight + kLanes, lanes + kLanes, from_middle);
  store_weight(weight + 2 * kLanes, lanes + 2 * kLanes, from_high);
}

// Mass of an id with this key.
__simd_vf__ inline void weigh_key(uint32_t key, float best, float total, __ubuf__ uint32_t* each) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 score;
  vector_u32 mass;
  asc_duplicate_scalar(mass, key, all);
  score_of(score, mass, all);
  mass_of(mass, score, best, total, all);
  asc_storealign(each, mass, all);
}

// Of lanes that tie, those among the first `wanted` of the row; `before` counts the ties that went by.
__simd_callee__ inline void take_ties(vector_s32& last, vector_u32& before, vector_s32& id, vector_bool& equal,
                                      uint32_t wanted) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), early;
  vector_u32 rank, ones;
  asc_unsqueeze(rank, equal);
  asc_add(rank, rank, before, all);
  asc_lt_scalar(early, rank, wanted, equal);
  asc_select(last, id, last, early);
  asc_duplicate_scalar(ones, 1u, equal);
  asc_reduce_sum(ones, ones, all);
  asc_duplicate(ones, ones, all);
  asc_add(before, before, ones, all);
}

// The last id among the first `wanted` that have this key.
__simd_vf__ inline void last_tie(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, uint32_t cut_key,
                                 uint32_t wanted, __ubuf__ int32_t* tie, __ubuf__ uint32_t* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value;
  vector_s32 id, last;
  vector_u32 key, before;
  asc_duplicate_scalar(before, 0u, all);
  asc_duplicate_scalar(last, -1, all);
  if (first > 0) {
    asc_loadalign(before, lanes);
    asc_loadalign(last, (__ubuf__ int32_t*)lanes + kLanes);
  }
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), equal;
    load_scores(value, x + at, divisor, mask);
    asc_arange(id, first + (int32_t)at);
    order_keys(key, value, mask);
    asc_eq_scalar(equal, key, cut_key, mask);
    take_ties(last, before, id, equal, wanted);
  }
  asc_storealign(lanes, before, all);
  asc_storealign((__ubuf__ int32_t*)lanes + kLanes, last, all);
  asc_reduce_max(last, last, all);
  asc_storealign(tie, last, all);
}

// ---- The list of few ids that a cut is among.

// Ids of a stretch that a cut keeps and whose mass, or key, is at least `from`.
template <bool masses>
__simd_vf__ inline void pick(__ubuf__ float* x, uint32_t count, int32_t first, float divisor, uint32_t cut_key,
                             int32_t cut_limit, float best, float total, uint32_t from, __ubuf__ int32_t* picks,
                             __ubuf__ uint32_t* picked) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value;
  vector_s32 id;
  vector_u32 key, mass, sum, ones;
  vector_store_unalign tail;
  asc_duplicate_scalar(sum, 0u, all);
  asc_clear_ar_spr();
  for (uint32_t at = 0; at < count; at += kLanes) {
    uint32_t left = count - at;
    vector_bool mask = asc_update_mask_b32(left), kept;
    load_scores(value, x + at, divisor, mask);
    asc_arange(id, first + (int32_t)at);
    order_keys(key, value, mask);
    kept_keys(kept, key, id, cut_key, cut_limit, mask);
    if (masses) {
      mass_of(mass, value, best, total, kept);
      asc_ge_scalar(kept, mass, from, kept);
    } else {
      asc_ge_scalar(kept, key, from, kept);
    }
    asc_squeeze_with_status(id, id, kept);
    asc_storeunalign_postupdate(picks, tail, id);
    asc_duplicate_scalar(ones, 1u, kept);
    asc_add(sum, sum, ones, all);
  }
  asc_storeunalign_post(picks, tail);
  asc_reduce_sum(sum, sum, all);
  asc_storealign(picked, sum, all);
}

// Keys and weights of these ids; the last register is filled up with what weighs nothing and is never kept.
template <bool masses>
__simd_vf__ inline void list_picks(__ubuf__ float* x, int32_t first, float divisor, float best, float total,
                                   __ubuf__ int32_t* picks, uint32_t picked, __ubuf__ uint32_t* keys,
                                   __ubuf__ uint32_t* weights, __ubuf__ int32_t* ids) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_f32 value, by;
  vector_s32 id, index;
  vector_u32 key, weight;
  asc_duplicate_scalar(by, divisor, all);
  for (uint32_t at = 0; at < picked; at += kLanes) {
    uint32_t left = picked - at;
    vector_bool mask = asc_update_mask_b32(left);
    asc_loadalign(id, picks + at);
    asc_add_scalar(index, id, -first, mask);
    asc_gather(value, x, (vector_u32&)index, mask);
    if (divisor != 1.0f) asc_div(value, value, by, mask);
    order_keys(key, value, mask);
    if (masses) {
      mass_of(weight, value, best, total, mask);
    } else {
      asc_duplicate_scalar(weight, 1u, mask);
    }
    asc_storealign(keys + at, key, all);
    asc_storealign(weights + at, weight, all);
    asc_storealign(ids + at, id, all);
  }
}

__simd_vf__ inline void weigh_list(__ubuf__ uint32_t* keys, __ubuf__ uint32_t* weights, uint32_t entries, uint32_t low,
                                   uint32_t middle, uint32_t high, __ubuf__ uint32_t* weight,
                                   __ubuf__ uint32_t* lanes) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_u32 key, each, from_low, from_middle, from_high;
  asc_duplicate_scalar(from_low, 0u, all);
  from_middle = from_high = from_low;
  for (uint32_t at = 0; at < entries; at += kLanes) {
    asc_loadalign(key, keys + at);
    asc_loadalign(each, weights + at);
    add_from(from_low, key, low, each, all);
    add_from(from_middle, key, middle, each, all);
    add_from(from_high, key, high, each, all);
  }
  store_weight(weight, lanes, from_low);
  store_weight(weight + kLanes, lanes + kLanes, from_middle);
  store_weight(weight + 2 * kLanes, lanes + 2 * kLanes, from_high);
}

__simd_vf__ inline void last_listed_tie(__ubuf__ uint32_t* keys, __ubuf__ int32_t* ids, uint32_t entries,
                                        uint32_t cut_key, uint32_t wanted, __ubuf__ int32_t* tie) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), equal;
  vector_s32 id, last;
  vector_u32 key, before;
  asc_duplicate_scalar(before, 0u, all);
  asc_duplicate_scalar(last, -1, all);
  for (uint32_t at = 0; at < entries; at += kLanes) {
    asc_loadalign(key, keys + at);
    asc_loadalign(id, ids + at);
    asc_eq_scalar(equal, key, cut_key, all);
    take_ties(last, before, id, equal, wanted);
  }
  asc_reduce_max(last, last, all);
  asc_storealign(tie, last, all);
}
