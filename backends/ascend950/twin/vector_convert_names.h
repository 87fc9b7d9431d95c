// The conversions under the names of the C API: asc_<from>2<to>[_rounding][_sat][_v2|_v3|_v4].
//
// `_v2` and so on name the part. Follows: asc-devkit include/c_api/reg_compute/reg_convert.h for the names and
// docs/zh/api/SIMD-API/C-API/reg/data_type_convert/<name>.md for their meaning.
#pragma once

#include "vector_convert.h"

// Templates only so that a kernel compiles the conversions which it uses and no other.
#define TWIN_CONVERT(Name, To, From, ...)                                                                \
  template <class = void>                                                                                \
  TWIN_OP void Name(vector_##To& dst, const vector_##From& src, const vector_bool& mask) {               \
    vcvt(dst, src, mask, __VA_ARGS__, MODE_ZEROING);                                                     \
  }

// Parts, after other controls or alone.
#define TWIN_PART_2(Name, To, From, ...)                                 \
  TWIN_CONVERT(Name, To, From, __VA_ARGS__ __VA_OPT__(, ) PART_EVEN)     \
  TWIN_CONVERT(Name##_v2, To, From, __VA_ARGS__ __VA_OPT__(, ) PART_ODD)
#define TWIN_PART_4(Name, To, From, ...)                                 \
  TWIN_CONVERT(Name, To, From, __VA_ARGS__ __VA_OPT__(, ) PART_P0)       \
  TWIN_CONVERT(Name##_v2, To, From, __VA_ARGS__ __VA_OPT__(, ) PART_P1)  \
  TWIN_CONVERT(Name##_v3, To, From, __VA_ARGS__ __VA_OPT__(, ) PART_P2)  \
  TWIN_CONVERT(Name##_v4, To, From, __VA_ARGS__ __VA_OPT__(, ) PART_P3)
#define TWIN_PART_1(Name, To, From, ...) TWIN_CONVERT(Name, To, From, __VA_ARGS__)

// With and without saturation; then over the five common roundings.
#define TWIN_SAT(Parts, Name, To, From, ...)                             \
  TWIN_PART_##Parts(Name, To, From, __VA_ARGS__ __VA_OPT__(, ) RS_DISABLE)    \
  TWIN_PART_##Parts(Name##_sat, To, From, __VA_ARGS__ __VA_OPT__(, ) RS_ENABLE)
#define TWIN_ROUND(Parts, Name, To, From)                                \
  TWIN_PART_##Parts(Name##_rn, To, From, ROUND_R)                        \
  TWIN_PART_##Parts(Name##_rna, To, From, ROUND_A)                       \
  TWIN_PART_##Parts(Name##_rd, To, From, ROUND_F)                        \
  TWIN_PART_##Parts(Name##_ru, To, From, ROUND_C)                        \
  TWIN_PART_##Parts(Name##_rz, To, From, ROUND_Z)
#define TWIN_ROUND_SAT(Parts, Name, To, From)                            \
  TWIN_SAT(Parts, Name##_rn, To, From, ROUND_R)                          \
  TWIN_SAT(Parts, Name##_rna, To, From, ROUND_A)                         \
  TWIN_SAT(Parts, Name##_rd, To, From, ROUND_F)                          \
  TWIN_SAT(Parts, Name##_ru, To, From, ROUND_C)                          \
  TWIN_SAT(Parts, Name##_rz, To, From, ROUND_Z)

// Floats to floats.
TWIN_ROUND_SAT(2, asc_float2bfloat16, bf16, f32)
TWIN_ROUND_SAT(2, asc_float2half, f16, f32)
TWIN_SAT(2, asc_float2half_ro, f16, f32, ROUND_O)
TWIN_SAT(4, asc_float2e4m3_rn, f8e4m3, f32, ROUND_R)
TWIN_SAT(4, asc_float2e5m2_rn, f8e5m2, f32, ROUND_R)
TWIN_SAT(4, asc_float2hif8_rna, hif8, f32, ROUND_A)
TWIN_SAT(4, asc_float2hif8_rh, hif8, f32, ROUND_H)
TWIN_SAT(2, asc_half2hif8_rna, hif8, f16, ROUND_A)
TWIN_SAT(2, asc_half2hif8_rh, hif8, f16, ROUND_H)
TWIN_ROUND(1, asc_half2bfloat16, bf16, f16)
TWIN_ROUND(4, asc_bfloat162e2m1x2, f4e2m1x2, bf16)
TWIN_ROUND(4, asc_bfloat162e1m2x2, f4e1m2x2, bf16)
TWIN_PART_2(asc_half2float, f32, f16)
TWIN_PART_2(asc_bfloat162float, f32, bf16)
TWIN_PART_2(asc_hif82half, f16, hif8)
TWIN_PART_4(asc_hif82float, f32, hif8)
TWIN_PART_4(asc_e4m32float, f32, f8e4m3)
TWIN_PART_4(asc_e5m22float, f32, f8e5m2)
TWIN_PART_4(asc_e2m1x22bfloat16, bf16, f4e2m1x2)
TWIN_PART_4(asc_e1m2x22bfloat16, bf16, f4e1m2x2)
// asc_bfloat162half.md: saturation comes before rounding in the compiler's name.
#define TWIN_BFLOAT16_TO_HALF(Suffix, Round)                             \
  TWIN_CONVERT(asc_bfloat162half_##Suffix, f16, bf16, RS_DISABLE, Round) \
  TWIN_CONVERT(asc_bfloat162half_##Suffix##_sat, f16, bf16, RS_ENABLE, Round)
TWIN_BFLOAT16_TO_HALF(rn, ROUND_R)
TWIN_BFLOAT16_TO_HALF(rna, ROUND_A)
TWIN_BFLOAT16_TO_HALF(rd, ROUND_F)
TWIN_BFLOAT16_TO_HALF(ru, ROUND_C)
TWIN_BFLOAT16_TO_HALF(rz, ROUND_Z)
#undef TWIN_BFLOAT16_TO_HALF

// Floats to integers.
TWIN_ROUND_SAT(1, asc_float2int32, s32, f32)
TWIN_ROUND_SAT(2, asc_float2int16, s16, f32)
TWIN_ROUND_SAT(2, asc_float2int64, s64, f32)
TWIN_ROUND_SAT(1, asc_half2int16, s16, f16)
TWIN_ROUND_SAT(2, asc_half2int8, s8, f16)
TWIN_ROUND_SAT(2, asc_half2uint8, u8, f16)
TWIN_ROUND_SAT(4, asc_half2int4x2, s4x2, f16)
TWIN_ROUND(2, asc_half2int32, s32, f16)
TWIN_ROUND_SAT(2, asc_bfloat162int32, s32, bf16)

// Integers to floats.
TWIN_ROUND(1, asc_int322float, f32, s32)
TWIN_ROUND(2, asc_int642float, f32, s64)
TWIN_ROUND(1, asc_int162half, f16, s16)
TWIN_PART_2(asc_int162float, f32, s16)
TWIN_PART_2(asc_int82half, f16, s8)
TWIN_PART_2(asc_uint82half, f16, u8)
TWIN_PART_4(asc_int4x22half, f16, s4x2)
TWIN_PART_4(asc_int4x22bfloat16, bf16, s4x2)

// Integers to integers.
TWIN_PART_2(asc_int82int16, s16, s8)
TWIN_PART_4(asc_int82int32, s32, s8)
TWIN_PART_2(asc_uint82uint16, u16, u8)
TWIN_PART_4(asc_uint82uint32, u32, u8)
TWIN_PART_2(asc_int162int32, s32, s16)
TWIN_PART_2(asc_int162uint32, u32, s16)
TWIN_PART_2(asc_uint162uint32, u32, u16)
TWIN_PART_2(asc_int322int64, s64, s32)
TWIN_PART_4(asc_int4x22int16, s16, s4x2)
TWIN_SAT(2, asc_int162uint8, u8, s16)
TWIN_SAT(2, asc_uint162uint8, u8, u16)
TWIN_SAT(2, asc_int322int16, s16, s32)
TWIN_SAT(2, asc_int322uint16, u16, s32)
TWIN_SAT(4, asc_int322uint8, u8, s32)
TWIN_SAT(2, asc_uint322int16, s16, u32)
TWIN_SAT(2, asc_uint322uint16, u16, u32)
TWIN_SAT(4, asc_uint322uint8, u8, u32)
TWIN_SAT(2, asc_int642int32, s32, s64)

#undef TWIN_CONVERT
#undef TWIN_PART_1
#undef TWIN_PART_2
#undef TWIN_PART_4
#undef TWIN_SAT
#undef TWIN_ROUND
#undef TWIN_ROUND_SAT

// asc_ceil.md, asc_floor.md, asc_rint.md, asc_round.md, asc_trunc.md: to a whole number of the same type
#define TWIN_WHOLE(Name, Round)                                                                                   \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, half, bfloat16_t, float>                                                       \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {  \
    vtrc(dst, src, Round, mask, MODE_ZEROING);                                                                    \
  }
TWIN_WHOLE(asc_ceil, ROUND_C)
TWIN_WHOLE(asc_floor, ROUND_F)
TWIN_WHOLE(asc_rint, ROUND_R)
TWIN_WHOLE(asc_round, ROUND_A)
TWIN_WHOLE(asc_trunc, ROUND_Z)
#undef TWIN_WHOLE
