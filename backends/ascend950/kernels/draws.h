// Random words of ids, Gumbels made of them, and the best lane of many: what a draw needs.
#pragma once

#include "rows.h"

constexpr int32_t kNobody = 0x7FFFFFFF;  // behind every id
constexpr uint32_t kQuads = 4 * kLanes;  // ids whose words 64 counters give

// A request's random stream: everything of the key and the counter but the id.
struct Stream {
  uint32_t seed_low, seed_high;
  uint32_t index, purpose, anchor;  // counter words 1 to 3; the purpose holds the choice as well
};

// Four Philox4x32-10 words per lane, from counters that begin with `c0`.
__simd_callee__ inline void philox(vector_u32& c0, vector_u32& c1, vector_u32& c2, vector_u32& c3, uint32_t key0,
                                   uint32_t key1, uint32_t index, uint32_t purpose, uint32_t anchor) {
  constexpr int32_t rounds = 10;
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_u32 first, second, key, low0, high0, low1, high1;
  asc_duplicate_scalar(first, 0xD2511F53u, all);
  asc_duplicate_scalar(second, 0xCD9E8D57u, all);
  asc_duplicate_scalar(c1, index, all);
  asc_duplicate_scalar(c2, purpose, all);
  asc_duplicate_scalar(c3, anchor, all);
  for (int32_t round = 0; round < rounds; ++round) {
    asc_mull(low0, high0, c0, first, all);
    asc_mull(low1, high1, c2, second, all);
    asc_xor(c0, high1, c1, all);
    asc_duplicate_scalar(key, key0, all);
    asc_xor(c0, c0, key, all);
    asc_xor(c2, high0, c3, all);
    asc_duplicate_scalar(key, key1, all);
    asc_xor(c2, c2, key, all);
    c1 = low1;
    c3 = low0;
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
}

// Words of 256 ids from `first` on, a multiple of four: word v mod 4 of counter v div 4 belongs to id v.
__simd_callee__ inline void words_of_ids(vector_u32& w0, vector_u32& w1, vector_u32& w2, vector_u32& w3, int32_t first,
                                         uint32_t seed_low, uint32_t seed_high, uint32_t index, uint32_t purpose,
                                         uint32_t anchor) {
  vector_u32 c0, c1, c2, c3, even_low, even_high, odd_low, odd_high;
  asc_arange((vector_s32&)c0, first / 4);
  philox(c0, c1, c2, c3, seed_low, seed_high, index, purpose, anchor);
  asc_intlv(even_low, even_high, c0, c2);
  asc_intlv(odd_low, odd_high, c1, c3);
  asc_intlv(w0, w1, even_low, odd_low);
  asc_intlv(w2, w3, even_high, odd_high);
}

// Words of ids that stand anywhere.
__simd_callee__ inline void words_of_listed(vector_u32& to, vector_s32& id, uint32_t seed_low, uint32_t seed_high,
                                            uint32_t index, uint32_t purpose, uint32_t anchor) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), odd, second;
  vector_u32 c0, c1, c2, c3, place, bit;
  asc_shiftright_scalar(c0, (vector_u32&)id, 2, all);
  philox(c0, c1, c2, c3, seed_low, seed_high, index, purpose, anchor);
  asc_duplicate_scalar(bit, 1u, all);
  asc_and(place, (vector_u32&)id, bit, all);
  asc_ne_scalar(odd, place, 0u, all);
  asc_duplicate_scalar(bit, 2u, all);
  asc_and(place, (vector_u32&)id, bit, all);
  asc_ne_scalar(second, place, 0u, all);
  asc_select(c0, c1, c0, odd);
  asc_select(c2, c3, c2, odd);
  asc_select(to, c2, c0, second);
}

// min((float(word) + 0.5) * 2^-32, 1 - 2^-24). Halves of a word are exact, so their sum is the word rounded once.
__simd_callee__ inline void uniform(vector_f32& to, vector_u32& word, vector_bool& mask) {
  vector_u32 half;
  vector_f32 low;
  asc_shiftright_scalar(half, word, 16, mask);
  asc_int322float_rn(to, (vector_s32&)half, mask);
  asc_shiftleft_scalar(half, word, 16, mask);
  asc_shiftright_scalar(half, half, 16, mask);
  asc_int322float_rn(low, (vector_s32&)half, mask);
  asc_mul_scalar(to, to, 65536.0f, mask);
  asc_add(to, to, low, mask);
  asc_add_scalar(to, to, 0.5f, mask);
  asc_mul_scalar(to, to, 0x1p-32f, mask);
  asc_min_scalar(to, to, 1.0f - 0x1p-24f, mask);
}

// -ln(-ln(1 - u)). The logarithm of the rounded 1 - u is scaled by what the rounding left of u.
__simd_callee__ inline void gumbel(vector_f32& to, vector_u32& word, vector_bool& mask) {
  vector_f32 u, rest, left;
  vector_bool lost;
  uniform(u, word, mask);
  asc_neg(rest, u, mask);
  asc_add_scalar(rest, rest, 1.0f, mask);
  asc_neg(left, rest, mask);
  asc_add_scalar(left, left, 1.0f, mask);
  asc_ln(to, rest, mask);
  asc_neg(to, to, mask);
  asc_mul(to, to, u, mask);
  asc_eq_scalar(lost, left, 0.0f, mask);
  asc_div(to, to, left, mask);
  asc_select(to, u, to, lost);
  asc_ln(to, to, mask);
  asc_neg(to, to, mask);
}

// Per lane the best value so far and its id. Ids come in rising order, so the first of equal values stays.
__simd_callee__ inline void begin_best(vector_f32& best, vector_s32& best_id) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  asc_duplicate_scalar((vector_u32&)best, 0xFF800000u, all);
  asc_duplicate_scalar(best_id, kNobody, all);
}

__simd_callee__ inline void load_best(vector_f32& best, vector_s32& best_id, __ubuf__ float* from) {
  asc_loadalign(best, from);
  asc_loadalign(best_id, (__ubuf__ int32_t*)from + kLanes);
}

__simd_callee__ inline void keep_best(vector_f32& best, vector_s32& best_id, vector_f32& value, vector_s32& id,
                                      vector_bool& mask) {
  vector_bool better;
  asc_gt(better, value, best, mask);
  asc_select(best, value, best, better);
  asc_select(best_id, id, best_id, better);
}

// Lanes for the next stretch, and behind them, in the third register, the lowest id of the best of all lanes.
__simd_callee__ inline void store_best(__ubuf__ float* to, vector_f32& best, vector_s32& best_id) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), equal;
  vector_f32 top;
  vector_s32 winner;
  asc_storealign(to, best, all);
  asc_storealign((__ubuf__ int32_t*)to + kLanes, best_id, all);
  asc_reduce_max(top, best, all);
  asc_duplicate(top, top, all);
  asc_eq(equal, best, top, all);
  asc_reduce_min(winner, best_id, equal);
  asc_storealign((__ubuf__ int32_t*)to + 2 * kLanes, winner, all);
}
