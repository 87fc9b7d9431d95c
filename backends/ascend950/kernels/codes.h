// Rows to block codes: the largest magnitude of every eight values, then scales of 64 groups side by side, then codes.
//
// Scales that are powers of two come from the bits of the largest magnitude: 448 is 1.75 * 2^8 and 6 is 1.5 * 2^2, so
// the exponent of the quotient, rounded up, is an integer sum, and it is exact.
#pragma once

#include "rows.h"

enum Format : int32_t { kPlain = 0, kMxfp8 = 1, kMxfp4 = 2, kNvfp4 = 3 };

constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kLeast8 = 0x38D1B717;   // 1e-4
constexpr uint32_t kLeast4 = 0x01C00000;   // 6 * 2^-126
constexpr uint32_t kLeastNv = 0x3C400000;  // 6 * 2^-9

// Scales of 64 groups from the bits of their largest magnitudes: the stored bytes and the values.
__simd_callee__ inline void scale_of(vector_u32& byte, vector_f32& value, vector_u32& amax, int32_t format) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), broken;
  vector_u32 nan;
  asc_ge_scalar(broken, amax, kInfinity, all);
  if (format == kNvfp4) {
    asc_max_scalar(amax, amax, kLeastNv, all);
    vector_f32 six, target;
    asc_duplicate_scalar(six, 6.0f, all);
    asc_div(target, (vector_f32&)amax, six, all);
    asc_min_scalar(target, target, 448.0f, all);
    vector_f8e4m3 narrow;
    asc_float2e4m3_rn(narrow, target, all);
    asc_e4m32float(value, narrow, asc_create_mask_b8(PAT_ALL));
    asc_duplicate_scalar(nan, 0x7Fu, all);
    asc_select(byte, nan, (vector_u32&)narrow, broken);
    return;
  }
  const bool eight = format == kMxfp8;
  asc_max_scalar(amax, amax, eight ? kLeast8 : kLeast4, all);
  asc_add_scalar(byte, amax, eight ? 0x1FFFFFu : 0x3FFFFFu, all);
  asc_shiftright_scalar(byte, byte, 23, all);
  vector_u32 bias, inverse;
  asc_duplicate_scalar(bias, eight ? 8u : 2u, all);
  asc_sub(byte, byte, bias, all);
  asc_duplicate_scalar(bias, 254u, all);
  asc_sub(inverse, bias, byte, all);
  asc_shiftleft_scalar(inverse, inverse, 23, all);
  value = (vector_f32&)inverse;  // of a power of two it is the inverse that is of use
  asc_duplicate_scalar(nan, 255u, all);
  asc_select(byte, nan, byte, broken);
}

// e2m1 codes of |y| / scale: how many midpoints lie below; a tie goes to the even code.
__simd_callee__ inline void e2m1_codes(vector_u32& code, vector_f32& y, vector_f32& scale, int32_t format,
                                       vector_bool& mask) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), above;
  vector_f32 magnitude, unit, edge;
  vector_u32 one, raised;
  asc_abs(magnitude, y, mask);
  if (format == kMxfp4) {
    asc_mul(magnitude, magnitude, scale, mask);
    asc_duplicate_scalar(unit, 1.0f, all);
  } else {
    unit = scale;
  }
  asc_duplicate_scalar(one, 1u, all);
  asc_shiftright_scalar(code, (vector_u32&)y, 31, mask);
  asc_shiftleft_scalar(code, code, 3, mask);
  const float midpoints[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  for (int32_t i = 0; i < 7; ++i) {
    asc_mul_scalar(edge, unit, midpoints[i], all);
    if (i % 2) {
      asc_ge(above, magnitude, edge, mask);
    } else {
      asc_gt(above, magnitude, edge, mask);
    }
    asc_add(raised, code, one, all);
    asc_select(code, raised, code, above);
  }
}

// Magnitudes as integers, so that NaN is above infinity and that above every number: the largest of every eight values.
template <class T>
__simd_callee__ inline void find_maxima(__ubuf__ uint32_t* maxima, __ubuf__ T* y, uint32_t width) {
  vector_bool all = asc_create_mask_b32(PAT_ALL), eight = asc_create_mask_b32(PAT_VL8);
  for (uint32_t at = 0; at < width; at += kLanes) {
    uint32_t left = width - at;
    vector_bool mask = asc_update_mask_b32(left);
    vector_f32 value;
    load_floats(value, y + at);
    asc_abs(value, value, mask);
    asc_reduce_max_datablock((vector_u32&)value, (vector_u32&)value, all);
    asc_storealign(maxima + at / 8, (vector_u32&)value, eight);
  }
}

// The largest of each of 64 groups.
__simd_callee__ inline void group_maxima(vector_u32& amax, __ubuf__ uint32_t* maxima, int32_t eights, vector_bool& mask) {
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_u32 place, other;
  asc_arange((vector_s32&)place, 0);
  asc_shiftleft_scalar(place, place, eights == 4 ? 2 : 1, all);
  asc_gather(amax, maxima, place, mask);
  for (int32_t i = 1; i < eights; ++i) {
    asc_add_scalar(place, place, 1u, all);
    asc_gather(other, maxima, place, mask);
    asc_max(amax, amax, other, all);
  }
}

__simd_callee__ inline void put_codes(__ubuf__ uint8_t* codes, vector_f32& y, vector_f32& scale, uint32_t width,
                                      int32_t format) {
  uint32_t left = width, bytes = width / 2;
  vector_bool mask = asc_update_mask_b32(left), all = asc_create_mask_b32(PAT_ALL);
  if (format == kMxfp8) {
    vector_f32 scaled;
    vector_f8e4m3 narrow;
    asc_mul(scaled, y, scale, mask);
    asc_min_scalar(scaled, scaled, 448.0f, mask);
    asc_max_scalar(scaled, scaled, -448.0f, mask);
    asc_float2e4m3_rn(narrow, scaled, mask);
    asc_storealign_pack_quarter((__ubuf__ uint32_t*)codes, (vector_u32&)narrow, mask);
    return;
  }
  vector_u32 code, even, odd;
  e2m1_codes(code, y, scale, format, mask);
  asc_deintlv(even, odd, code, code);
  asc_shiftleft_scalar(odd, odd, 4, all);
  asc_or(even, even, odd, all);
  vector_bool half = asc_update_mask_b32(bytes), first = asc_create_mask_b32(PAT_VL32), kept;
  asc_and(kept, half, first, all);
  asc_storealign_pack_quarter((__ubuf__ uint32_t*)codes, even, kept);
}

// A row of `width` values to codes and scales. `maxima` has room for an eighth of the row's values, of whole registers.
template <class T>
__simd_callee__ inline void quantise_row(__ubuf__ T* y, __ubuf__ uint8_t* codes, __ubuf__ uint8_t* scales,
                                         __ubuf__ uint32_t* maxima, uint32_t width, int32_t format) {
  const uint32_t group = format == kNvfp4 ? 16 : 32, per_byte = format == kMxfp8 ? 1 : 2;
  const uint32_t groups = (width + group - 1) / group;
  vector_bool all = asc_create_mask_b32(PAT_ALL);
  vector_u32 own, index, amax, byte;
  vector_f32 values, value, scale;
  find_maxima(maxima, y, width);
  asc_mem_bar(VST_VLD);
  asc_arange((vector_s32&)own, 0);
  asc_shiftright_scalar(own, own, format == kNvfp4 ? 4 : 5, all);
  for (uint32_t first = 0; first < groups; first += kLanes) {
    uint32_t left = groups - first;
    const uint32_t end = left < kLanes ? width : (first + kLanes) * group;
    vector_bool mask = asc_update_mask_b32(left);
    group_maxima(amax, maxima + first * group / 8, group / 8, mask);
    scale_of(byte, values, amax, format);
    asc_storealign_pack_quarter((__ubuf__ uint32_t*)(scales + first), byte, mask);
    for (uint32_t at = first * group; at < end; at += kLanes) {
      load_floats(value, y + at);
      asc_add_scalar(index, own, at / group - first, all);
      asc_gather(scale, values, index);
      put_codes(codes + at / per_byte, value, scale, end - at, format);
    }
  }
}
