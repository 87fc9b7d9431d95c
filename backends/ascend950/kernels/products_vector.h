// The vector cores' side of a product whose weight is stored in another format than the Cube multiplies in.
//
// Each core brings half of a tile's rows of w: codes of global memory to UB, from there as blocks of the Cube's layout
// to L1. Codes of e2m1 become e4m3 by moving bits: their exponent is as it is, so values come out too small by 2^6
// (e2m1 counts exponents from 1, e4m3 from 7), subnormal ones too; the block's scale makes up for it. Nothing is
// rounded. A scale that has no room for what it makes up for, above 2^113 at the least, is taken as the largest that
// has; a model's weights are far below.
#pragma once

#include "products.h"

constexpr int kHalfRows = 128;
constexpr uint8_t kLeftOut = 6;  // exponent of what moving the bits of e2m1 leaves out

// UB: two stages each of codes as stored, scales as stored, blocks for L1, scales for L1; and e4m3 codes of one row.
constexpr uint32_t kRawBytes = kHalfRows * 256, kRawScaleBytes = kHalfRows * kBlock;
constexpr uint32_t kOutBytes = kStageBytes / kBlock * (kHalfRows + 1) * kBlock, kOutScaleBytes = kHalfRows * 16;
constexpr uint32_t kRawScaleBase = 2 * kRawBytes;
constexpr uint32_t kOutBase = kRawScaleBase + 2 * kRawScaleBytes;
constexpr uint32_t kOutScaleBase = kOutBase + 2 * kOutBytes;
constexpr uint32_t kRowBase = kOutScaleBase + 2 * kOutScaleBytes;
static_assert(kRowBase + kHalfRows * 256 <= 248 * 1024);

enum Source { kE2m1, kE4m3 };

// 256 pairs of codes to 512 bytes of e4m3, in order.
__simd_callee__ inline void spread(vector_uint8_t& first, vector_uint8_t& second, const vector_uint8_t& pairs,
                                   const vector_bool& all) {
  vector_uint8_t sign, magnitude, low, high, part;
  asc_duplicate_scalar(sign, (uint8_t)0x80, all);
  asc_duplicate_scalar(magnitude, (uint8_t)0x1c, all);
  asc_shiftleft_scalar(low, pairs, (int16_t)2, all);
  asc_and(low, low, magnitude, all);
  asc_shiftleft_scalar(part, pairs, (int16_t)4, all);
  asc_and(part, part, sign, all);
  asc_or(low, low, part, all);
  asc_shiftright_scalar(high, pairs, (int16_t)2, all);
  asc_and(high, high, magnitude, all);
  asc_and(part, pairs, sign, all);
  asc_or(high, high, part, all);
  asc_intlv(first, second, low, high);
}

// Rows of 256 pairs to blocks of e4m3; block g of row r is block g * (kHalfRows + 1) + r: the odd distance keeps
// neighbouring blocks of a row in different banks.
__simd_vf__ inline void spread_rows(__ubuf__ uint8_t* out, __ubuf__ uint8_t* raw, int32_t rows) {
  const vector_bool all = asc_create_mask_b8(PAT_ALL);
  for (int32_t r = 0; r < rows; ++r) {
    vector_uint8_t pairs, first, second;
    asc_loadalign(pairs, raw + r * 256);
    spread(first, second, pairs, all);
    __ubuf__ uint8_t* row = out + r * kBlock;
    asc_storealign(row, first, (uint16_t)(kHalfRows + 1), (uint16_t)0, all);
    asc_storealign(row + 8 * (kHalfRows + 1) * kBlock, second, (uint16_t)(kHalfRows + 1), (uint16_t)0, all);
  }
}

// Rows of 256 pairs to rows of 256 codes of e4m3 (as many as a stage of bfloat16 has).
__simd_vf__ inline void spread_plain(__ubuf__ uint8_t* out, __ubuf__ uint8_t* raw, int32_t rows) {
  const vector_bool all = asc_create_mask_b8(PAT_ALL);
  for (int32_t r = 0; r < rows; ++r) {
    vector_uint8_t pairs, first, second;
    asc_loadalign(pairs, raw + r * 256);
    spread(first, second, pairs, all);
    asc_storealign(out + r * 256, first, all);
  }
}

// Scales of 16 rows and up to 8 pairs each to fractals of 16 x 2, made larger by 2^kLeftOut.
__simd_vf__ inline void arrange_scales(__ubuf__ uint16_t* out, __ubuf__ uint16_t* raw, int32_t rows, int32_t pairs) {
  const vector_bool all = asc_create_mask_b16(PAT_ALL), bytes = asc_create_mask_b8(PAT_ALL);
  vector_uint16_t lane, row, pair, low, index;
  vector_uint8_t most;
  asc_arange((vector_int16_t&)lane, (int16_t)0);
  asc_duplicate_scalar(low, (uint16_t)15, all);
  asc_and(row, lane, low, all);
  asc_shiftleft_scalar(row, row, (int16_t)4, all);  // 16 elements, 32 bytes, lie between rows
  asc_shiftright_scalar(pair, lane, (int16_t)4, all);
  asc_add(index, row, pair, all);
  asc_duplicate_scalar(most, (uint8_t)(254 - kLeftOut), bytes);
  uint32_t wanted = pairs * 16;
  const vector_bool valid = asc_update_mask_b16(wanted);
  for (int32_t r = 0; r < rows; r += 16) {
    vector_uint16_t scales;
    asc_gather(scales, raw + r * 16, index, valid);
    asc_min((vector_uint8_t&)scales, (vector_uint8_t&)scales, most, bytes);
    asc_add_scalar((vector_uint8_t&)scales, (vector_uint8_t&)scales, kLeftOut, bytes);
    asc_storealign(out + r * pairs, scales, valid);
  }
}

// Rows of e4m3 codes and scales to blocks of float32, exactly; `left_out` adds to the exponents.
__simd_vf__ inline void widen_to_f32(__ubuf__ float* out, __ubuf__ uint8_t* codes, __ubuf__ uint8_t* scales,
                                     int32_t rows, int32_t depth, int32_t left_out) {
  const vector_bool bytes = asc_create_mask_b8(PAT_ALL), words = asc_create_mask_b32(PAT_ALL);
  vector_uint32_t lane, group;
  asc_arange((vector_int32_t&)lane, (int32_t)0);
  asc_shiftright_scalar(group, lane, (int16_t)5, words);
  for (int32_t r = 0; r < rows; ++r) {
    vector_uint32_t factors;  // 2^scale, by bits
    asc_loadalign_unpack4((vector_uint8_t&)factors, scales + r * kBlock);
    asc_min_scalar(factors, factors, (uint32_t)(254 - left_out), words);
    asc_add_scalar(factors, factors, (uint32_t)left_out, words);
    asc_shiftleft_scalar(factors, factors, (int16_t)23, words);
    for (int32_t k = 0; k < depth; k += 64) {
      vector_uint32_t index, factor;
      vector_fp8_e4m3fn_t packed;
      vector_float values;
      asc_add_scalar(index, group, (uint32_t)(k / 32), words);
      asc_gather(factor, factors, index);
      asc_loadalign_unpack4(packed, (__ubuf__ fp8_e4m3fn_t*)codes + r * 256 + k);
      asc_e4m32float(values, packed, bytes);
      asc_mul(values, values, (vector_float&)factor, words);
      asc_storealign(out + (k / 8 * (kHalfRows + 1) + r) * 8, values, (uint16_t)(kHalfRows + 1), (uint16_t)0, words);
    }
  }
}

// The same to bfloat16, 128 at a time: the bits of an e4m3 code, seven places to the left, are those of a half that is
// too small by 2^8 (e4m3 counts exponents from 7, half from 15), subnormal ones too. A half of four bits is a bfloat16.
__simd_vf__ inline void widen_to_bf16(__ubuf__ bfloat16_t* out, __ubuf__ uint8_t* codes, __ubuf__ uint8_t* scales,
                                      int32_t rows, int32_t depth, int32_t left_out) {
  const vector_bool bytes = asc_create_mask_b8(PAT_ALL), all = asc_create_mask_b16(PAT_ALL);
  const uint16_t extra = left_out + 8;
  vector_uint16_t lane, group, kept;
  asc_arange((vector_int16_t&)lane, (int16_t)0);
  asc_shiftright_scalar(group, lane, (int16_t)5, all);
  asc_duplicate_scalar(kept, (uint16_t)0xbf80, all);
  for (int32_t r = 0; r < rows; ++r) {
    vector_uint16_t factors;  // 2^scale, by bits
    asc_loadalign_unpack((vector_uint8_t&)factors, scales + r * kBlock);
    asc_min_scalar(factors, factors, (uint16_t)(254 - extra), all);
    asc_add_scalar(factors, factors, extra, all);
    asc_shiftleft_scalar(factors, factors, (int16_t)7, all);
    for (int32_t k = 0; k < depth; k += 128) {
      vector_uint16_t index, factor, bits;
      vector_int8_t packed;
      vector_bfloat16_t values;
      asc_add_scalar(index, group, (uint16_t)(k / 32), all);
      asc_gather(factor, factors, index);
      asc_loadalign_unpack(packed, (__ubuf__ int8_t*)codes + r * 256 + k);
      asc_int82int16((vector_int16_t&)bits, packed, bytes);  // the sign fills what the shift leaves of the upper byte
      asc_shiftleft_scalar(bits, bits, (int16_t)7, all);
      asc_and(bits, bits, kept, all);
      asc_half2bfloat16_rn(values, (vector_half&)bits, all);
      asc_mul(values, values, (vector_bfloat16_t&)factor, all);
      asc_storealign(out + (k / 16 * (kHalfRows + 1) + r) * 16, values, (uint16_t)(kHalfRows + 1), (uint16_t)0, all);
    }
  }
}

// This core's rows of a tile: the first half goes to the first core, rounded up to whole fractals.
struct Half {
  int64_t first, rows, padded_tile;
};

__aicore__ inline Half half_of(const Tiles& at) {
  const int64_t middle = least(at.num_columns, round_up((at.num_columns + 1) / 2, 16));
  const bool second = asc_get_sub_block_id() != 0;
  return {second ? middle : 0, second ? at.num_columns - middle : middle, round_up(at.num_columns, 16)};
}

template <Source S>
__aicore__ inline void load_codes(const Product& p, const Tiles& at, const Half& half, int64_t from, int64_t depth,
                                  int64_t stage) {
  constexpr int per_byte = S == kE2m1 ? 2 : 1;
  __ubuf__ uint8_t* raw = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(stage * kRawBytes);
  __ubuf__ uint8_t* scales = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kRawScaleBase + stage * kRawScaleBytes);
  const int64_t row = at.column + half.first, groups = (depth + 31) / 32;
  __gm__ uint8_t* w = p.w + at.group * p.w_group + row * p.w_row + from / per_byte;
  __gm__ uint8_t* ws = p.ws + at.group * p.ws_group + row * p.ws_row + from / 32;
  asc_copy_gm2ub_align(raw, w, half.rows, (depth + per_byte - 1) / per_byte, 0, 0, false, weight_mode(at), p.w_row,
                       256);
  // an odd number of scales is filled up to a pair with the scale of nothing
  asc_copy_gm2ub_align(scales, ws, half.rows, groups, 0, groups % 2, true, weight_mode(at), p.ws_row, kBlock);
}

template <class T, Source S>
__aicore__ inline void expand(const Half& half, int64_t depth, int64_t stage) {
  constexpr bool scaled = std::is_same_v<T, fp8_e4m3fn_t>;
  __ubuf__ uint8_t* raw = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(stage * kRawBytes);
  __ubuf__ uint8_t* scales = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kRawScaleBase + stage * kRawScaleBytes);
  __ubuf__ uint8_t* out = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kOutBase + stage * kOutBytes);
  if constexpr (scaled) {
    __ubuf__ uint8_t* arranged = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kOutScaleBase + stage * kOutScaleBytes);
    asc_vf_call<spread_rows>(out, raw, (int32_t)half.rows);
    asc_vf_call<arrange_scales>((__ubuf__ uint16_t*)arranged, (__ubuf__ uint16_t*)scales, (int32_t)half.rows,
                                (int32_t)((depth + 63) / 64));
  } else {
    __ubuf__ uint8_t* codes = raw;
    if constexpr (S == kE2m1) {
      codes = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kRowBase);
      asc_vf_call<spread_plain>(codes, raw, (int32_t)half.rows);
    }
    const int32_t rows = half.rows, left_out = S == kE2m1 ? kLeftOut : 0;
    if constexpr (sizeof(T) == 4) {
      asc_vf_call<widen_to_f32>((__ubuf__ float*)out, codes, scales, rows, (int32_t)depth, left_out);
    } else {
      asc_vf_call<widen_to_bf16>((__ubuf__ bfloat16_t*)out, codes, scales, rows, (int32_t)depth, left_out);
    }
  }
}

template <class T>
__aicore__ inline void give_stage(const Half& half, int64_t depth, int64_t stage) {
  constexpr int64_t per_block = kBlock / sizeof(T);
  __ubuf__ uint8_t* out = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kOutBase + stage * kOutBytes);
  const uint32_t w_l1 = stage * kStageSize + kTileRows * kStageBytes;
  asc_copy_ub2l1((__cbuf__ void*)(uint64_t)(w_l1 + half.first * kBlock), out, (depth + per_block - 1) / per_block,
                 half.rows, kHalfRows + 1 - half.rows, half.padded_tile - half.rows);
  if constexpr (std::is_same_v<T, fp8_e4m3fn_t>) {
    __ubuf__ uint8_t* arranged = (__ubuf__ uint8_t*)asc_get_phy_buf_addr(kOutScaleBase + stage * kOutScaleBytes);
    const uint32_t ws_l1 = kScaleBase + stage * kScaleSize + kTileRows * kStageBytes / 32;
    const int64_t pairs = (depth + 63) / 64;
    asc_copy_ub2l1((__cbuf__ void*)(uint64_t)(ws_l1 + half.first / 16 * pairs * kBlock), arranged, 1,
                   (half.rows + 15) / 16 * pairs, 0, 0);
  }
}

template <class T, Source S>
__aicore__ inline void vector_side(const Product& p) {
  constexpr int64_t stage_depth = kStageBytes / sizeof(T);
  asc_set_copy_pad_val((uint8_t)0);
  for (int turn = 0; turn < 2; ++turn) {
    asc_sync_notify(PIPE_V, PIPE_MTE2, turn);
    asc_sync_notify(PIPE_MTE3, PIPE_V, turn);
  }
  Tiles at;
  int64_t count = 0;
  for (int64_t tile = asc_get_block_idx(); find_tile(at, p, tile); tile += asc_get_block_num()) {
    const Half half = half_of(at);
    for (int64_t from = 0; from < p.k; from += stage_depth, ++count) {
      const int64_t stage = count % 2, depth = least(stage_depth, p.k - from);
      asc_sync_wait(PIPE_V, PIPE_MTE2, stage);
      if (half.rows) load_codes<S>(p, at, half, from, depth, stage);
      asc_sync_notify(PIPE_MTE2, PIPE_V, stage);
      asc_sync_wait(PIPE_MTE2, PIPE_V, stage);
      asc_sync_wait(PIPE_MTE3, PIPE_V, stage);
      if (half.rows) expand<T, S>(half, depth, stage);
      asc_sync_notify(PIPE_V, PIPE_MTE2, stage);
      asc_sync_notify(PIPE_V, PIPE_MTE3, stage);
      asc_sync_wait(PIPE_V, PIPE_MTE3, stage);
      if (count >= 2) asc_sync_intra_wait(PIPE_MTE3, kStageFree + stage);
      if (half.rows) give_stage<T>(half, depth, stage);
      asc_sync_intra_arrive(PIPE_MTE3, kStageReady + stage);
      asc_sync_notify(PIPE_MTE3, PIPE_V, stage);
    }
  }
  for (int turn = 0; turn < 2; ++turn) {
    if (turn < count) asc_sync_intra_wait(PIPE_MTE3, kStageFree + turn);
    asc_sync_wait(PIPE_V, PIPE_MTE2, turn);
    asc_sync_wait(PIPE_MTE3, PIPE_V, turn);
  }
}
