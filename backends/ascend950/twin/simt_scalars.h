// Scalar functions of SIMT code beyond the C library: bits, roundings, narrow floats, loads and stores past a cache.
//
// Follows: asc-devkit include/simt_api (device_functions.h, asc_bf16.h, asc_fp16.h, asc_fp8.h, math_functions.h) for
// names, docs/zh/api/SIMT-API for meaning. Functions of the C library (expf, sqrtf, fmaf, ...) are the host's.
#pragma once

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "numbers.h"

// One conversion and its roundings: to nearest even, to nearest away, down, up, to zero.
#define TWIN_ROUNDINGS(Make) Make(rn, even) Make(rna, away) Make(rd, floor) Make(ru, ceil) Make(rz, zero)

TWIN_UNWATCHED inline float __int_as_float(int bits) { return std::bit_cast<float>(bits); }
TWIN_UNWATCHED inline float __uint_as_float(unsigned int bits) { return std::bit_cast<float>(bits); }
TWIN_UNWATCHED inline int __float_as_int(float value) { return std::bit_cast<int>(value); }
TWIN_UNWATCHED inline unsigned int __float_as_uint(float value) { return std::bit_cast<unsigned int>(value); }

#define TWIN_TO_INTEGER(suffix, mode)                                                                      \
  TWIN_UNWATCHED inline int __float2int_##suffix(float x) {                                                \
    return twin::to_integer<int32_t>(twin::read_binary32(x), twin::Round::mode, true);                     \
  }                                                                                                        \
  TWIN_UNWATCHED inline unsigned int __float2uint_##suffix(float x) {                                      \
    return twin::to_integer<uint32_t>(twin::read_binary32(x), twin::Round::mode, true);                    \
  }                                                                                                        \
  TWIN_UNWATCHED inline long long int __float2ll_##suffix(float x) {                                       \
    return twin::to_integer<int64_t>(twin::read_binary32(x), twin::Round::mode, true);                     \
  }                                                                                                        \
  TWIN_UNWATCHED inline float __int2float_##suffix(int x) {                                                \
    return twin::to_float(twin::read_integer(x), twin::Round::mode);                                       \
  }                                                                                                        \
  TWIN_UNWATCHED inline float __uint2float_##suffix(unsigned int x) {                                      \
    return twin::to_float(twin::read_integer(x), twin::Round::mode);                                       \
  }                                                                                                        \
  TWIN_UNWATCHED inline float __ll2float_##suffix(long long int x) {                                       \
    return twin::to_float(twin::read_integer(static_cast<int64_t>(x)), twin::Round::mode);                 \
  }
TWIN_ROUNDINGS(TWIN_TO_INTEGER)
#undef TWIN_TO_INTEGER

// bfloat16 and half. Without `_sat` a value beyond the largest becomes infinite, as IEEE has it.
TWIN_UNWATCHED inline float __bfloat162float(bfloat16_t x) { return static_cast<float>(x); }
TWIN_UNWATCHED inline float __half2float(half x) { return static_cast<float>(x); }
#define TWIN_NARROW(suffix, mode)                                                                          \
  TWIN_UNWATCHED inline bfloat16_t __float2bfloat16_##suffix(float x) {                                    \
    bfloat16_t made;                                                                                       \
    made.bits = static_cast<uint16_t>(twin::BFloat16::encode(twin::read_binary32(x), twin::Round::mode, false)); \
    return made;                                                                                           \
  }                                                                                                        \
  TWIN_UNWATCHED inline half __float2half_##suffix(float x) {                                              \
    const auto bits = static_cast<uint16_t>(twin::Binary16::encode(twin::read_binary32(x), twin::Round::mode, false)); \
    return std::bit_cast<half>(bits);                                                                      \
  }
TWIN_ROUNDINGS(TWIN_NARROW)
#undef TWIN_NARROW
#undef TWIN_ROUNDINGS
TWIN_UNWATCHED inline bfloat16_t __float2bfloat16(float x) { return __float2bfloat16_rn(x); }
TWIN_UNWATCHED inline half __float2half(float x) { return __float2half_rn(x); }

// Two fp8 codes in one word, the first in the low byte.
struct float2 {
  float x, y;
};
TWIN_UNWATCHED inline float2 make_float2(float x, float y) { return {x, y}; }
struct float8_e4m3x2_t {
  uint8_t x, y;
};
struct float8_e5m2x2_t {
  uint8_t x, y;
};
using __asc_fp8x2_storage_t = uint16_t;
enum __asc_fp8_interpretation_t { __ASC_E4M3, __ASC_E5M2 };
enum __asc_saturation_t { __ASC_NOSAT, __ASC_SATFINITE };

TWIN_UNWATCHED inline __asc_fp8x2_storage_t __asc_cvt_float2_to_fp8x2(float2 x, __asc_saturation_t saturate,
                                                                      __asc_fp8_interpretation_t format) {
  const bool sat = saturate == __ASC_SATFINITE;
  const auto code = [&](float value) TWIN_UNWATCHED {
    const twin::Number number = twin::read_binary32(value);
    return static_cast<uint16_t>(format == __ASC_E4M3 ? twin::E4M3::encode(number, twin::Round::even, sat)
                                                      : twin::E5M2::encode(number, twin::Round::even, sat));
  };
  return static_cast<uint16_t>(code(x.x) | code(x.y) << 8);
}
TWIN_UNWATCHED inline float2 __e4m3x22float2(float8_e4m3x2_t x) {
  return {twin::byte_table<twin::E4M3>.value[x.x], twin::byte_table<twin::E4M3>.value[x.y]};
}
TWIN_UNWATCHED inline float2 __e5m2x22float2(float8_e5m2x2_t x) {
  return {twin::byte_table<twin::E5M2>.value[x.x], twin::byte_table<twin::E5M2>.value[x.y]};
}

// math_functions.h
TWIN_UNWATCHED inline float rsqrtf(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
TWIN_UNWATCHED inline unsigned int umax(unsigned int x, unsigned int y) { return x > y ? x : y; }
TWIN_UNWATCHED inline unsigned int umin(unsigned int x, unsigned int y) { return x < y ? x : y; }
