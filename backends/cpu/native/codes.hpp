// The codes of the block formats, one value at a time and without branches, so that loops over them vectorise.
//
// Bit for bit the arithmetic of `ops/quant.py`. Values of quotients are compared and rounded as real numbers: scales of
// the mx formats are powers of two, and midpoint * scale is exact.
#pragma once

#include "common.hpp"

namespace deepinfer::cpu {

DEEPINFER_INLINE float bf16_value(u16 bits) { return float_of(static_cast<u32>(bits) << 16); }

// Nearest even; a NaN stays one (its payload could round away, so a bit is set).
DEEPINFER_INLINE u16 bf16_code(float x) {
    const u32 bits = bits_of(x);
    const u32 rounded = (bits + 0x7FFFU + ((bits >> 16) & 1U)) >> 16;
    return static_cast<u16>((bits & 0x7FFFFFFFU) > 0x7F800000U ? ((bits >> 16) | 0x40U) : rounded);
}

DEEPINFER_INLINE float round_bf16(float x) { return bf16_value(bf16_code(x)); }

DEEPINFER_INLINE float ue8m0_value(u8 code) {
    const u32 wide = code;
    const float value = float_of(wide == 0 ? 0x00400000U : wide << 23);  // 2^-127 is subnormal
    return wide == 255 ? kNaN : value;
}

DEEPINFER_INLINE float e4m3_value(u8 code) {
    const u32 magnitude = code & 0x7FU;
    const float normal = float_of((magnitude << 20) + (120U << 23));
    const float subnormal = (normal - 0x1p-7F) * 2.0F;  // no implicit one: m/8 * 2^-6
    const float value = magnitude < 8 ? subnormal : normal;
    const u32 bits = magnitude == 0x7F ? 0x7FC00000U : bits_of(value);
    return float_of(bits | ((code & 0x80U) << 24));
}

DEEPINFER_INLINE float e2m1_value(u32 code) {
    const u32 magnitude = code & 7U;
    const float normal = float_of((magnitude << 22) + (126U << 23));
    const float value = magnitude < 2 ? (normal - 0.5F) * 2.0F : normal;
    return float_of(bits_of(value) | ((code & 8U) << 28));
}

// Nearest even e4m3; the caller has clamped to [-448, 448]. NaN gives the NaN code with the sign of x.
DEEPINFER_INLINE u8 e4m3_code(float x) {
    const u32 bits = bits_of(x);
    const u32 magnitude = bits & 0x7FFFFFFFU;
    const u32 normal = (magnitude + (static_cast<u32>(7 - 127) << 23) + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20;
    // adding 2^14 leaves the multiple of 2^-9 in the low bits, rounded to even
    const u32 subnormal = bits_of(float_of(magnitude) + 0x1p14F) - (141U << 23);
    u32 code = magnitude < (121U << 23) ? subnormal : normal;
    code = magnitude > 0x7F800000U ? 0x7FU : code;
    return static_cast<u8>(code | ((bits >> 24) & 0x80U));
}

// e2m1 code of x / scale: the number of midpoints it passes, a tie to the even code. A NaN scale gives magnitude 0.
DEEPINFER_INLINE u32 e2m1_code(float x, float scale) {
    const float magnitude = x < 0.0F ? -x : x;
    u32 code = magnitude > 0.25F * scale;
    code += magnitude >= 0.75F * scale;
    code += magnitude > 1.25F * scale;
    code += magnitude >= 1.75F * scale;
    code += magnitude > 2.5F * scale;
    code += magnitude >= 3.5F * scale;
    code += magnitude > 5.0F * scale;
    return code | (bits_of(x) >> 31 << 3);
}

// ue8m0 byte of the smallest power of two >= target; 255 for NaN and Inf. On the bits, never through a logarithm.
DEEPINFER_INLINE u8 pow2_ceil(float target) {
    const u32 bits = bits_of(target);
    return static_cast<u8>((bits & 0x7F800000U) == 0x7F800000U ? 255U : (bits + 0x7FFFFFU) >> 23);
}

// Scale byte of a group whose largest magnitude is amax (NaN or Inf when the group holds one).
DEEPINFER_INLINE u8 group_scale(int kind, float amax) {
    const float largest = (bits_of(amax) & 0x7F800000U) == 0x7F800000U ? kNaN : amax;
    if (kind == kMxfp8) return pow2_ceil((largest < 1e-4F ? 1e-4F : largest) / 448.0F);
    if (kind == kMxfp4) return pow2_ceil((largest < 6 * 0x1p-126F ? 6 * 0x1p-126F : largest) / 6.0F);
    const float target = (largest < 6 * 0x1p-9F ? 6 * 0x1p-9F : largest) / 6.0F;
    return e4m3_code(target > 448.0F ? 448.0F : target);
}

DEEPINFER_INLINE float scale_value(int kind, u8 code) { return kind == kNvfp4 ? e4m3_value(code) : ue8m0_value(code); }

}  // namespace deepinfer::cpu
