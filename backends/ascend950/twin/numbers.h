// Scalar number formats of the Ascend 950 and the conversions between them, bit for bit.
//
// One rounding routine serves every binary format: a finite value is a 64-bit significand times a
// power of two, and a format says where its last bit lies. Vector, SIMT and Cube code of the twin
// all convert through here, so a format is decided once.
//
// Follows: asc-devkit docs/zh/api, `rounding_mode.md` (rounding, saturation), `Cast.md` (special
// values of each format). HiFloat8 has its own file, hifloat8.h.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "qualifiers.h"

// 16-bit arithmetic rounds after every operation, which is what the device does.
typedef _Float16 half;

namespace twin {

/// Rounding modes: to even, away from zero at a tie, floor, ceiling, to zero, to odd, hybrid (HiF8).
enum class Round { even, away, floor, ceil, zero, odd, hybrid };

/// Whether `rest / unit` (both non-negative, rest < unit, rest > 0) rounds the magnitude up.
TWIN_UNWATCHED constexpr bool rounds_up(Round mode, bool negative, bool odd_below, uint64_t rest, uint64_t unit) {
  const uint64_t half_unit = unit >> 1;
  switch (mode) {
    case Round::even: return rest > half_unit || (rest == half_unit && odd_below);
    case Round::away: return rest >= half_unit;
    case Round::floor: return negative;
    case Round::ceil: return !negative;
    case Round::zero: return false;
    case Round::odd: return !odd_below;
    case Round::hybrid: return rest >= half_unit;  // HiF8 decides its random half itself
  }
  return false;
}

/// `magnitude * 2^-shift` as an integer, rounded. Shifts past 63 leave only a rest.
TWIN_UNWATCHED constexpr uint64_t shift_round(uint64_t magnitude, int shift, Round mode, bool negative) {
  if (shift <= 0) return shift < -63 ? 0 : magnitude << -shift;
  if (magnitude == 0) return 0;
  if (shift > 62) return rounds_up(mode, negative, false, 1, 4) ? 1 : 0;
  const uint64_t unit = uint64_t{1} << shift;
  const uint64_t below = magnitude >> shift;
  const uint64_t rest = magnitude & (unit - 1);
  return below + (rest != 0 && rounds_up(mode, negative, below & 1, rest, unit) ? 1 : 0);
}

/// A finite real number: (-1)^negative * significand * 2^exponent, or one of the special values.
struct Number {
  enum class Kind { finite, infinite, nan } kind = Kind::finite;
  bool negative = false;
  uint64_t significand = 0;
  int exponent = 0;
};

TWIN_UNWATCHED constexpr Number read_binary32(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t field = bits >> 23 & 0xff, fraction = bits & 0x7fffff;
  Number out{.negative = (bits >> 31) != 0};
  if (field == 0xff) {
    out.kind = fraction ? Number::Kind::nan : Number::Kind::infinite;
  } else {
    out.significand = field ? fraction | 0x800000u : fraction;
    out.exponent = (field ? static_cast<int>(field) : 1) - 150;
  }
  return out;
}

/// What the codes above the largest finite one mean.
enum class Specials { ieee, nan_only, none };

/// A sign, an exponent field and a fraction field, in this order from the top bit.
template <int ExponentBits, int FractionBits, Specials Codes>
struct BinaryFormat {
  static constexpr int exponent_bits = ExponentBits, fraction_bits = FractionBits;
  static constexpr int bias = (1 << (ExponentBits - 1)) - 1 + (ExponentBits == 1 ? 1 : 0);
  static constexpr uint32_t sign_bit = 1u << (ExponentBits + FractionBits);
  static constexpr uint32_t top_field = ((1u << ExponentBits) - 1) << FractionBits;
  static constexpr uint32_t nan_code =
      Codes == Specials::ieee ? top_field | 1u << (FractionBits - 1) : sign_bit - 1;
  static constexpr uint32_t infinity_code = Codes == Specials::ieee ? top_field : nan_code;
  static constexpr uint32_t largest_code = Codes == Specials::ieee       ? top_field - 1
                                           : Codes == Specials::nan_only ? sign_bit - 2
                                                                         : sign_bit - 1;
  static constexpr bool has_specials = Codes != Specials::none;

  /// Round to this format. Saturating: overflow and infinity give the largest code, nan gives zero
  /// (or nan where `keep_nan`); otherwise they give infinity (nan where the format has none).
  TWIN_UNWATCHED static constexpr uint32_t encode(Number x, Round mode, bool saturate, bool keep_nan = false) {
    const uint32_t sign = x.negative ? sign_bit : 0;
    if (x.kind == Number::Kind::nan) {
      if (!has_specials || (saturate && !keep_nan)) return 0;
      return nan_code;
    }
    const uint32_t overflow = sign | (saturate || !has_specials ? largest_code : infinity_code);
    if (x.kind == Number::Kind::infinite) return overflow;
    if (x.significand == 0) return sign;
    const int top = 63 - std::countl_zero(x.significand) + x.exponent;
    const int lowest = 1 - bias;
    const int level = top < lowest ? lowest : top;
    const int last = level - FractionBits;
    const uint64_t whole = shift_round(x.significand, last - x.exponent, mode, x.negative);
    if (level + bias > (1 << ExponentBits) + 1) return overflow;
    const uint64_t code =
        (static_cast<uint64_t>(level + bias) << FractionBits) + whole - (uint64_t{1} << FractionBits);
    if (code > largest_code) return overflow;
    return sign | static_cast<uint32_t>(code);
  }

  TWIN_UNWATCHED static constexpr Number decode(uint32_t code) {
    const uint32_t magnitude = code & (sign_bit - 1);
    Number out{.negative = (code & sign_bit) != 0};
    if (magnitude > largest_code) {
      out.kind = Codes == Specials::ieee && magnitude == infinity_code ? Number::Kind::infinite
                                                                      : Number::Kind::nan;
      return out;
    }
    const uint32_t field = magnitude >> FractionBits, fraction = magnitude & ((1u << FractionBits) - 1);
    out.significand = field ? fraction | 1u << FractionBits : fraction;
    out.exponent = (field ? static_cast<int>(field) : 1) - bias - FractionBits;
    return out;
  }
};

using Binary32 = BinaryFormat<8, 23, Specials::ieee>;
using Binary16 = BinaryFormat<5, 10, Specials::ieee>;
using BFloat16 = BinaryFormat<8, 7, Specials::ieee>;
using E5M2 = BinaryFormat<5, 2, Specials::ieee>;
using E4M3 = BinaryFormat<4, 3, Specials::nan_only>;
using E2M1 = BinaryFormat<2, 1, Specials::none>;
using E1M2 = BinaryFormat<1, 2, Specials::none>;

/// The float of a decoded number; exact for every format here that is narrower than binary32.
TWIN_UNWATCHED constexpr float to_float(Number x, Round mode = Round::even) {
  if (x.kind == Number::Kind::nan) return std::numeric_limits<float>::quiet_NaN();
  return std::bit_cast<float>(Binary32::encode(x, mode, false));
}

template <class Format>
TWIN_UNWATCHED constexpr float decode_float(uint32_t code) {
  return to_float(Format::decode(code));
}

/// Decoded values of an 8-bit format, so that loops over bytes are table look-ups.
template <class Format>
struct ByteTable {
  float value[256] = {};
  constexpr ByteTable() {
    for (int code = 0; code < 256; ++code) value[code] = decode_float<Format>(code);
  }
};
template <class Format>
inline constexpr ByteTable<Format> byte_table{};

/// The usual float to bfloat16: to even, overflow to infinity. The short way matters for speed.
TWIN_UNWATCHED constexpr uint16_t bfloat16_even(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}
TWIN_UNWATCHED constexpr float bfloat16_value(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

/// The low `sizeof(Integer)` bytes of `magnitude * 2^exponent`, or its saturation.
template <class Integer>
TWIN_UNWATCHED constexpr Integer to_integer(Number x, Round mode, bool saturate) {
  using Limits = std::numeric_limits<Integer>;
  if (x.kind == Number::Kind::nan) return 0;
  const Integer limit = x.negative ? Limits::min() : Limits::max();
  if (x.kind == Number::Kind::infinite) return limit;
  const int top = x.significand ? 63 - std::countl_zero(x.significand) + x.exponent : -1;
  if (top > 63 && saturate) return limit;
  if (x.exponent > 63) return 0;  // every kept bit is below the last one
  const uint64_t whole = shift_round(x.significand, -x.exponent, mode, x.negative);
  if (saturate) {
    const uint64_t bound = x.negative ? (Limits::is_signed ? uint64_t{1} << (sizeof(Integer) * 8 - 1) : 0)
                                      : static_cast<uint64_t>(Limits::max());
    if (whole > bound) return limit;
  }
  return static_cast<Integer>(x.negative ? uint64_t{0} - whole : whole);
}

template <class Integer>
TWIN_UNWATCHED constexpr Number read_integer(Integer value) {
  const bool negative = value < 0;
  const uint64_t bits = static_cast<uint64_t>(value);
  return Number{.negative = negative, .significand = negative ? uint64_t{0} - bits : bits};
}

/// Integer to integer: saturated, or the low bytes.
template <class To, class From>
TWIN_UNWATCHED constexpr To narrow_integer(From value, bool saturate) {
  if (!saturate) return static_cast<To>(value);
  const int64_t wide = static_cast<int64_t>(value);  // From is at most 32 bits unsigned, or int64
  if (wide < static_cast<int64_t>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (wide > static_cast<int64_t>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(value);
}

}  // namespace twin

// The scalar types that kernels name. Each holds its code; bfloat16_t also converts as the compiler's
// built-in type does, because kernels compute with it through float.
struct bfloat16_t {
  uint16_t bits;
  bfloat16_t() = default;
  template <class Value>
    requires std::is_arithmetic_v<Value> || std::is_same_v<Value, half>
  TWIN_UNWATCHED constexpr bfloat16_t(Value value) : bits(twin::bfloat16_even(static_cast<float>(value))) {}
  TWIN_UNWATCHED constexpr operator float() const { return twin::bfloat16_value(bits); }
};

#define TWIN_BYTE_FORMAT(Name, Format)                                                        \
  struct Name {                                                                               \
    uint8_t bits;                                                                             \
    Name() = default;                                                                         \
    TWIN_UNWATCHED constexpr explicit Name(float value)                                                      \
        : bits(static_cast<uint8_t>(twin::Format::encode(twin::read_binary32(value), twin::Round::even, true))) {} \
    TWIN_UNWATCHED constexpr explicit operator float() const { return twin::byte_table<twin::Format>.value[bits]; } \
  };
TWIN_BYTE_FORMAT(float8_e4m3_t, E4M3)
TWIN_BYTE_FORMAT(float8_e5m2_t, E5M2)
#undef TWIN_BYTE_FORMAT

// Two 4-bit codes a byte: the element of lower index in the low nibble.
struct float4_e2m1x2_t { uint8_t bits; };
struct float4_e1m2x2_t { uint8_t bits; };
struct int4x2_t { uint8_t bits; };
// An exponent alone: 2^(bits - 127); 255 is nan.
struct float8_e8m0_t { uint8_t bits; };
struct hifloat8_t { uint8_t bits; };

using fp8_e4m3fn_t = float8_e4m3_t;
using fp8_e5m2_t = float8_e5m2_t;
using fp8_e8m0_t = float8_e8m0_t;
using fp4x2_e2m1_t = float4_e2m1x2_t;
using fp4x2_e1m2_t = float4_e1m2x2_t;
using int4b_t = int4x2_t;

namespace twin {

/// 2^(code - 127) as float (2^-127 is subnormal there), nan for 255.
TWIN_UNWATCHED constexpr float e8m0_value(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  return to_float(Number{.significand = 1, .exponent = code - 127});
}
/// The exponent of |value| (its floor of log2), bounded to what e8m0 holds; nan gives 255.
TWIN_UNWATCHED constexpr uint8_t e8m0_floor(Number x) {
  if (x.kind == Number::Kind::nan) return 255;
  if (x.kind == Number::Kind::infinite) return 254;
  if (x.significand == 0) return 0;
  const int top = 63 - std::countl_zero(x.significand) + x.exponent + 127;
  return static_cast<uint8_t>(top < 0 ? 0 : top > 254 ? 254 : top);
}

}  // namespace twin
