// Records of cached keys to blocks of the Cube's layout, on a vector core's registers.
#pragma once

#include "attention.h"

constexpr uint16_t kNanHalf = 0x7FC0;  // of bfloat16

// Lanes that the factors of a record take: one per 16 values, and at least a whole load of eight; as a power of two.
__aicore__ inline int32_t factor_shift(int32_t dim) {
  int32_t shift = 3;
  while ((16 << shift) < dim) ++shift;
  return shift;
}

// Where the scales of records are in a buffer, for a gather: one per lane, and one lane per 16 values.
__simd_vf__ inline void make_places(__ubuf__ uint16_t* places, int32_t dim, int32_t shift) {
  const vector_bool all = asc_create_mask_b16(PAT_ALL);
  vector_u16 lane, record, low, half, place;
  asc_arange((vector_s16&)lane, (int16_t)0);
  asc_shiftright_scalar(record, lane, (int16_t)shift, all);
  asc_mul_scalar(record, record, (uint16_t)kRecordPitch, all);
  asc_duplicate_scalar(low, (uint16_t)((1 << shift) - 1), all);
  asc_and(lane, lane, low, all);
  asc_shiftright_scalar(half, lane, (int16_t)1, all);
  asc_add(place, record, half, all);
  asc_add_scalar(place, place, (uint16_t)dim, all);
  asc_storealign(places, place, all);  // of fp8 records, which have half as many
  asc_add(place, record, lane, all);
  asc_add_scalar(place, place, (uint16_t)(dim / 2), all);
  asc_storealign(places + 128, place, all);  // of fp4 records
}

// Scales of 16 records as bfloat16, one per 16 values: e4m3 of fp4 records is in the upper half of its float32; the
// powers of two of fp8 records are exponents already, but for 2^-127, which is subnormal, and NaN.
template <int32_t Kind>
__simd_callee__ inline void expand_factors(__ubuf__ uint16_t* factors, __ubuf__ uint8_t* raw, __ubuf__ uint16_t* places,
                                           int32_t shift) {
  const vector_bool all = asc_create_mask_b16(PAT_ALL), words = asc_create_mask_b32(PAT_ALL),
                    bytes = asc_create_mask_b8(PAT_ALL);
  vector_u16 index;
  asc_loadalign(index, places + (Kind == kFp8Record ? 0 : 128));
  for (int32_t r = 0; r < kPiece; r += 128 >> shift) {
    vector_u16 scale;
    asc_gather(scale, raw + r * kRecordPitch, index, all);
    if constexpr (Kind == kFp8Record) {
      vector_u16 nan;
      vector_bool broken;
      asc_shiftleft_scalar(scale, scale, (int16_t)7, all);
      asc_max_scalar(scale, scale, (uint16_t)0x40, all);
      asc_eq_scalar(broken, scale, (uint16_t)0x7F80, all);
      asc_duplicate_scalar(nan, kNanHalf, all);
      asc_select(scale, nan, scale, broken);
    } else {
      vector_f32 even, odd;
      asc_e4m32float(even, (vector_f8e4m3&)scale, bytes);
      asc_e4m32float_v3(odd, (vector_f8e4m3&)scale, bytes);
      asc_shiftright_scalar((vector_u32&)even, (vector_u32&)even, (int16_t)16, words);
      asc_or((vector_u32&)scale, (vector_u32&)even, (vector_u32&)odd, words);
    }
    asc_storealign(factors + (r << shift), scale, all);
  }
}

// 128 codes from `codes` as bfloat16, exactly.
template <int32_t Kind>
__simd_callee__ inline void widen_codes(vector_bf16& value, __ubuf__ uint8_t* codes) {
  const vector_bool bytes = asc_create_mask_b8(PAT_ALL);
  if constexpr (Kind == kFp8Record) {
    vector_f8e4m3 low, high;
    vector_f32 first, second;
    vector_u16 zeros;
    asc_loadalign_unpack4(low, (__ubuf__ fp8_e4m3fn_t*)codes);
    asc_loadalign_unpack4(high, (__ubuf__ fp8_e4m3fn_t*)codes + 64);
    asc_e4m32float(first, low, bytes);
    asc_e4m32float(second, high, bytes);
    asc_deintlv(zeros, (vector_u16&)value, (vector_u16&)first, (vector_u16&)second);  // the upper halves
  } else {
    vector_f4e2m1x2 pairs;
    asc_loadalign_unpack4(pairs, (__ubuf__ fp4x2_e2m1_t*)codes);
    asc_e2m1x22bfloat16(value, pairs, bytes);
  }
}

// 16 records to 16 rows of blocks; block g of row r is block g * kPieceRows + r. Bit r of `present` says whether there
// is a record r; where there is none the row is zero, whatever the buffer holds.
template <int32_t Kind>
__simd_vf__ inline void expand_keys(__ubuf__ bfloat16_t* out, __ubuf__ uint8_t* raw, __ubuf__ uint16_t* factors,
                                    __ubuf__ uint16_t* places, uint32_t present, int32_t dim, int32_t shift) {
  expand_factors<Kind>(factors, raw, places, shift);
  asc_mem_bar(VST_VLD);
  uint32_t width = dim;  // 64, or a multiple of what a register holds
  const vector_bool inside = asc_update_mask_b16(width);
  for (int32_t r = 0; r < kPiece; ++r) {
    uint32_t held = (present >> r & 1) * 128;
    const vector_bool there = asc_update_mask_b16(held);
    for (int32_t at = 0; at < dim; at += 128) {
      vector_bf16 value, factor;
      widen_codes<Kind>(value, raw + r * kRecordPitch + (Kind == kFp8Record ? at : at / 2));
      asc_loadalign_brc_elem2datablock(factor, (__ubuf__ bfloat16_t*)factors + (r << shift) + at / 16);
      asc_mul(value, value, factor, there);
      asc_storealign(out + (at / 16 * kPieceRows + r) * 16, value, (uint16_t)kPieceRows, (uint16_t)0, inside);
    }
  }
}

// Marks of a tile's keys, each twice: 0 where there is one, -inf where there is none; and whether there was any so far.
__simd_vf__ inline void mark_holes(__ubuf__ float* holes, __ubuf__ float* any, __ubuf__ int32_t* slots, uint32_t count,
                                   int32_t first) {
  const vector_bool all = asc_create_mask_b32(PAT_ALL), inside = asc_update_mask_b32(count);
  vector_s32 slot;
  vector_bool held;
  vector_f32 zero, mark, low, high;
  vector_u32 lost;
  asc_loadalign(slot, slots);
  asc_ge_scalar(held, slot, 0, inside);
  asc_duplicate_scalar(zero, 0.0f, all);
  asc_duplicate_scalar(lost, 0xFF800000u, all);
  asc_select(mark, zero, (vector_f32&)lost, held);
  asc_intlv(low, high, mark, mark);
  asc_storealign(holes, low, all);
  asc_storealign(holes + 64, high, all);
  if (!first) {
    asc_loadalign(low, any);
    asc_max(mark, mark, low, all);
  }
  asc_storealign(any, mark, all);
}

__aicore__ inline List list_of(const Attention& a, int32_t index, int32_t& column) {
  const int32_t before = tiles_of(a.window);
  column = (index < before ? index : index - before) * kTile;
  return index < before ? a.window : a.compressed;
}

// Slots of a tile, a tile ahead of their use: the scalar unit reads them.
__aicore__ inline void fetch_slots(const Attention& a, const Group& group, int32_t tile) {
  const int32_t turn = (int32_t)(turn_of(group, tile) % 2);
  int32_t column;
  const List list = list_of(a, group.first + tile, column);
  asc_sync_wait(PIPE_V, PIPE_MTE2, 2 + turn);
  const int32_t count = least(kTile, list.columns - column);
  if (count > 0) {
    const int64_t row = unit_at(a, group.unit).row;
    load_row(ub_at<int32_t>(kSlots + turn * kRegister), list.slots + row * list.pitch + column, count);
  }
  asc_sync_notify(PIPE_MTE2, PIPE_S, turn);
  asc_sync_notify(PIPE_MTE2, PIPE_V, 2 + turn);
}

__aicore__ inline uint32_t fetch_records(const List& list, __ubuf__ int32_t* slots, int32_t first, int32_t count,
                                         int32_t bytes, int32_t stage) {
  __ubuf__ uint8_t* raw = ub_at<uint8_t>(kRaw + stage * kRawBytes);
  uint32_t present = 0;
  for (int32_t r = 0; r < kPiece; ++r) {
    if (first + r >= count) break;
    const int32_t slot = slots[first + r];
    if (slot < 0) continue;
    const int32_t page = slot / list.records, offset = slot - page * list.records;
    load_row(raw + r * kRecordPitch, list.cache + page * list.page_bytes + (int64_t)offset * bytes, bytes);
    present |= 1u << r;
  }
  return present;
}

// This core's 32 keys of a tile into L1.
__aicore__ inline void bring_keys(const Attention& a, const Group& group, int32_t tile) {
  const uint32_t turn = turn_of(group, tile), place = turn % kRing;
  const int32_t parity = (int32_t)(turn % 2), core = (int32_t)asc_get_sub_block_id();
  int32_t column;
  const List list = list_of(a, group.first + tile, column);
  const int32_t count = least(kTile, list.columns - column), shift = factor_shift(a.dim);
  const int32_t bytes = list.kind == kFp8Record ? a.dim + a.dim / 32 : a.dim / 2 + a.dim / 16;
  __ubuf__ int32_t* slots = ub_at<int32_t>(kSlots + parity * kRegister);
  __ubuf__ uint16_t* places = ub_at<uint16_t>(kPlaces);
  asc_sync_wait(PIPE_MTE2, PIPE_S, parity);
  asc_sync_wait(PIPE_MTE2, PIPE_V, 2 + parity);
  asc_vf_call<mark_holes>(ub_at<float>(kHoles + place * kHoleBytes), ub_at<float>(kAny + group.home * kRegister), slots,
                          (uint32_t)count, (int32_t)(group.opens && tile == 0));
  asc_sync_notify(PIPE_V, PIPE_MTE2, 2 + parity);
  for (int32_t stage = 0; stage < 2; ++stage) {
    const int32_t first = core * kHalf + stage * kPiece;
    __ubuf__ bfloat16_t* keys = ub_at<bfloat16_t>(kPieces + stage * kPieceBytes);
    __ubuf__ uint8_t* raw = ub_at<uint8_t>(kRaw + stage * kRawBytes);
    asc_sync_wait(PIPE_V, PIPE_MTE2, stage);
    const uint32_t present = fetch_records(list, slots, first, count, bytes, stage);
    asc_sync_notify(PIPE_MTE2, PIPE_V, stage);
    asc_sync_wait(PIPE_MTE2, PIPE_V, stage);
    asc_sync_wait(PIPE_MTE3, PIPE_V, stage);
    if (list.kind == kFp8Record) {
      asc_vf_call<expand_keys<kFp8Record>>(keys, raw, ub_at<uint16_t>(kFactors), places, present, a.dim, shift);
    } else {
      asc_vf_call<expand_keys<kFp4Record>>(keys, raw, ub_at<uint16_t>(kFactors), places, present, a.dim, shift);
    }
    asc_sync_notify(PIPE_V, PIPE_MTE2, stage);
    asc_sync_notify(PIPE_V, PIPE_MTE3, stage);
    asc_sync_wait(PIPE_V, PIPE_MTE3, stage);
    if (stage == 0 && turn >= kRing) asc_sync_intra_wait(PIPE_MTE3, kTileFree);
    const uint32_t l1 = kKeyL1 + place * kKeyBytes + first * kBlockBytes;
    asc_copy_ub2l1((__cbuf__ void*)(uint64_t)l1, keys, a.dim / 16, kPiece, kPieceRows - kPiece,
                   kTile - kPiece);
    asc_sync_notify(PIPE_MTE3, PIPE_V, stage);
  }
  asc_sync_intra_arrive(PIPE_MTE3, kKeysReady);
}
