// HiFloat8: a sign, a prefix-coded exponent width, the exponent and what is left of the byte.
//
// Follows: HiFloat8 (arXiv:2409.16626, table 1) for the code, asc-devkit `Cast.md` ("float to
// hifloat8_t", "half to hifloat8_t") for rounding: ties away, or hybrid, which takes the bits below
// as a random number where the mantissa has one or two bits.
#pragma once

#include "numbers.h"

namespace twin {

struct HiF8 {
  static constexpr uint8_t nan_code = 0x80, infinity_code = 0x6f, largest_code = 0x6e;

  TWIN_UNWATCHED static constexpr Number decode(uint32_t code) {
    Number out{.negative = (code & 0x80) != 0};
    const uint32_t magnitude = code & 0x7f;
    if (code == nan_code) return Number{.kind = Number::Kind::nan};
    if (magnitude == infinity_code) {
      out.kind = Number::Kind::infinite;
      return out;
    }
    if (magnitude < 8) {  // prefix 0000: a power of two alone, 2^(m - 23)
      out.significand = magnitude ? 1 : 0;
      out.exponent = static_cast<int>(magnitude) - 23;
      return out;
    }
    int width = 4, rest = 5;  // exponent bits; bits after the prefix
    if (magnitude < 16) width = 0, rest = 3;
    else if (magnitude < 32) width = 1, rest = 4;
    else if (magnitude < 64) width = 2, rest = 5;
    else if (magnitude < 96) width = 3, rest = 5;
    const int mantissa_bits = rest - width;
    const uint32_t field = magnitude >> mantissa_bits & ((1u << width) - 1);
    int exponent = 0;
    if (width > 0) {
      const uint32_t below_sign = field & ((1u << (width - 1)) - 1);
      exponent = static_cast<int>(1u << (width - 1) | below_sign);
      if (field >> (width - 1)) exponent = -exponent;
    }
    out.significand = (1u << mantissa_bits) | (magnitude & ((1u << mantissa_bits) - 1));
    out.exponent = exponent - mantissa_bits;
    return out;
  }

  /// `exponent` in [-22, 15] and its mantissa field, packed without the sign.
  TWIN_UNWATCHED static constexpr uint32_t pack(int exponent, uint32_t mantissa) {
    if (exponent < -15) return static_cast<uint32_t>(exponent + 23);
    const uint32_t size = static_cast<uint32_t>(exponent < 0 ? -exponent : exponent);
    if (size == 0) return 8 | mantissa;
    const int width = 32 - std::countl_zero(size);
    const uint32_t field = (exponent < 0 ? 1u << (width - 1) : 0) | (size & ((1u << (width - 1)) - 1));
    constexpr uint32_t prefix[5] = {0, 16, 32, 64, 96};
    return prefix[width] | field << mantissa_width(exponent) | mantissa;
  }

  TWIN_UNWATCHED static constexpr int mantissa_width(int exponent) {
    const int size = exponent < 0 ? -exponent : exponent;
    return size < 4 ? 3 : size < 8 ? 2 : 1;
  }

  /// A source of `fraction_bits` below its leading one: 23 for float, 10 for half. `threshold` is
  /// the hybrid mode's random number and `window` its width in bits.
  TWIN_UNWATCHED static constexpr uint8_t encode(Number x, Round mode, bool saturate, int fraction_bits, uint32_t threshold,
                                  int window) {
    const uint32_t sign = x.negative ? 0x80u : 0;
    if (x.kind == Number::Kind::nan) return saturate ? 0 : nan_code;
    const uint32_t overflow = sign | (saturate ? largest_code : infinity_code);
    if (x.kind == Number::Kind::infinite) return static_cast<uint8_t>(overflow);
    if (x.significand == 0) return 0;
    int exponent = 63 - std::countl_zero(x.significand) + x.exponent;
    if (exponent > 15) return static_cast<uint8_t>(overflow);
    if (exponent < -23) return 0;
    // Bits below the leading one, left-aligned to `fraction_bits`.
    const int lead = 63 - std::countl_zero(x.significand);
    const uint64_t fraction = (x.significand << (fraction_bits - lead)) & ((uint64_t{1} << fraction_bits) - 1);
    const bool hybrid = mode == Round::hybrid;
    if (exponent == -23) {  // below half of the smallest: only the bits under it decide
      const uint64_t probe = (uint64_t{1} << fraction_bits | fraction) >> (fraction_bits + 1 - window);
      return static_cast<uint8_t>(!hybrid || probe >= threshold ? sign | 1u : 0u);
    }
    const bool power_only = exponent < -15;
    const int width = power_only ? 0 : mantissa_width(exponent);
    const uint64_t tail = (fraction >> (fraction_bits - width - window < 0 ? 0 : fraction_bits - width - window)) &
                          ((uint64_t{1} << window) - 1);
    const bool tie_bit = fraction >> (fraction_bits - width - 1) & 1;
    uint32_t mantissa = width ? static_cast<uint32_t>(fraction >> (fraction_bits - width)) : 0;
    const bool near_one = exponent >= -3 && exponent <= 3;  // three mantissa bits: never at random
    if (near_one || !hybrid ? tie_bit : tail >= threshold) {
      if (power_only || ++mantissa >> width) ++exponent, mantissa = 0;
    }
    if (exponent > 15) return static_cast<uint8_t>(overflow);
    const uint32_t code = pack(exponent, mantissa);
    return static_cast<uint8_t>(code == infinity_code ? overflow : sign | code);
  }

  TWIN_UNWATCHED static constexpr uint8_t from_float(float value, Round mode, bool saturate) {
    return encode(read_binary32(value), mode, saturate, 23, std::bit_cast<uint32_t>(value) & 0x3fff, 14);
  }
  TWIN_UNWATCHED static constexpr uint8_t from_half(half value, Round mode, bool saturate) {
    const uint32_t bits = std::bit_cast<uint16_t>(value);
    return encode(Binary16::decode(bits), mode, saturate, 10, (bits & 1) << 1 | 1, 2);
  }
};

}  // namespace twin
