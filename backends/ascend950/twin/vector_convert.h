// Conversions between element types: vcvt with its rounding, saturation and sub-register layout, and vtrc.
//
// A conversion reads or writes every second or fourth narrow lane; `part` says which. The mask is that of the lanes of
// the source, and what it leaves out is zero, as is every narrow lane that the part does not name.
//
// Follows: asc-devkit docs/zh/api, Cast.md (tables 3 to 9: pairs, controls, saturation), RegLayout.md (layouts and
// masks, as code), rounding_mode.md; half and bfloat16 to fp8: TileLang 0.1.15, tilelang/ascend/language/simd.py.
#pragma once

#include "hifloat8.h"
#include "vector_lanes.h"

namespace twin {

/// Which controls a pair of types takes.
struct Rule {
  bool exists = false, round = false, saturate = false;
};

template <class To, class From>
constexpr Rule conversion_rule() {
  constexpr Rule plain{true, false, false}, rounds{true, true, false}, clamps{true, false, true}, both{true, true, true};
  if constexpr (std::is_same_v<From, float>) {
    if constexpr (one_of<To, int16_t, int32_t, int64_t, half, bfloat16_t, float8_e4m3_t, float8_e5m2_t, hifloat8_t>) return both;
  } else if constexpr (std::is_same_v<From, half>) {
    if constexpr (one_of<To, int4x2_t, int8_t, uint8_t, int16_t, hifloat8_t, float8_e4m3_t, float8_e5m2_t>) return both;
    if constexpr (one_of<To, int32_t, bfloat16_t>) return rounds;
    if constexpr (one_of<To, float>) return plain;
  } else if constexpr (std::is_same_v<From, bfloat16_t>) {
    if constexpr (one_of<To, int32_t, half, float8_e4m3_t, float8_e5m2_t>) return both;
    if constexpr (one_of<To, float4_e2m1x2_t, float4_e1m2x2_t>) return rounds;
    if constexpr (one_of<To, float, float8_e8m0_t>) return plain;
  } else if constexpr (one_of<From, float8_e4m3_t, float8_e5m2_t>) {
    if constexpr (one_of<To, float>) return plain;
  } else if constexpr (std::is_same_v<From, hifloat8_t>) {
    if constexpr (one_of<To, float, half>) return plain;
  } else if constexpr (one_of<From, float8_e8m0_t, float4_e2m1x2_t, float4_e1m2x2_t>) {
    if constexpr (one_of<To, bfloat16_t>) return plain;
  } else if constexpr (std::is_same_v<From, int4x2_t>) {
    if constexpr (one_of<To, int16_t, half, bfloat16_t>) return plain;
  } else if constexpr (std::is_same_v<From, int8_t>) {
    if constexpr (one_of<To, int16_t, int32_t, half>) return plain;
  } else if constexpr (std::is_same_v<From, uint8_t>) {
    if constexpr (one_of<To, uint16_t, uint32_t, half>) return plain;
  } else if constexpr (std::is_same_v<From, int16_t>) {
    if constexpr (one_of<To, int4x2_t, uint8_t>) return clamps;
    if constexpr (one_of<To, half>) return rounds;
    if constexpr (one_of<To, int32_t, uint32_t, float>) return plain;
  } else if constexpr (std::is_same_v<From, uint16_t>) {
    if constexpr (one_of<To, uint8_t>) return clamps;
    if constexpr (one_of<To, uint32_t>) return plain;
  } else if constexpr (std::is_same_v<From, int32_t>) {
    if constexpr (one_of<To, uint8_t, int16_t, uint16_t>) return clamps;
    if constexpr (one_of<To, float>) return rounds;
    if constexpr (one_of<To, int64_t>) return plain;
  } else if constexpr (std::is_same_v<From, uint32_t>) {
    if constexpr (one_of<To, uint8_t, int16_t, uint16_t>) return clamps;
  } else if constexpr (std::is_same_v<From, int64_t>) {
    if constexpr (one_of<To, int32_t>) return clamps;
    if constexpr (one_of<To, float>) return rounds;
  }
  return {};
}

template <class Element>
inline constexpr bool is_packed = one_of<Element, int4x2_t, float4_e2m1x2_t, float4_e1m2x2_t>;
template <class Element>
inline constexpr bool is_float = one_of<Element, float, half, bfloat16_t, float8_e4m3_t, float8_e5m2_t, hifloat8_t,
                                        float8_e8m0_t, float4_e2m1x2_t, float4_e1m2x2_t>;

/// Saturation that is in force: the instruction's own, or the core's where CTRL[60] says so (Cast.md, table 5).
template <class To>
TWIN_LANE bool saturation_in_force(bool requested) {
  const uint64_t ctrl = machine().core->ctrl;
  if (!(ctrl >> 60 & 1)) return requested;
  return !(ctrl >> (is_float<To> ? 48 : 59) & 1);
}

template <class Element>
TWIN_LANE Number read_number(Element value) {
  if constexpr (std::is_same_v<Element, float>) return read_binary32(value);
  else if constexpr (std::is_same_v<Element, half>) return Binary16::decode(std::bit_cast<uint16_t>(value));
  else if constexpr (std::is_same_v<Element, bfloat16_t>) return BFloat16::decode(value.bits);
  else if constexpr (std::is_same_v<Element, hifloat8_t>) return HiF8::decode(value.bits);
  else return read_integer(value);
}

struct Casting {
  Round round;
  bool saturate;
  bool keep_nan;  // CTRL[50]: a saturating conversion to fp8 keeps nan
};

/// One lane; 4-bit types are done as pairs elsewhere.
template <class To, class From>
TWIN_LANE To convert_lane(From value, const Casting& how) {
  if constexpr (std::is_integral_v<To> && std::is_integral_v<From>) {
    // Widening is exact but for signed to unsigned, which has only the saturating form.
    constexpr bool always = sizeof(To) > sizeof(From) && std::is_unsigned_v<To> && std::is_signed_v<From>;
    return narrow_integer<To>(value, how.saturate || always);
  } else if constexpr (std::is_integral_v<To>) {
    return to_integer<To>(read_number(value), how.round, how.saturate);
  } else if constexpr (std::is_same_v<To, float>) {
    if constexpr (std::is_same_v<From, bfloat16_t> || one_of<From, float8_e4m3_t, float8_e5m2_t, half>) {
      return static_cast<float>(value);
    } else {
      return to_float(read_number(value), how.round);
    }
  } else if constexpr (std::is_same_v<To, half>) {
    return std::bit_cast<half>(static_cast<uint16_t>(Binary16::encode(read_number(value), how.round, how.saturate)));
  } else if constexpr (std::is_same_v<To, bfloat16_t>) {
    bfloat16_t out;
    if constexpr (std::is_same_v<From, float8_e8m0_t>) {
      out.bits = static_cast<uint16_t>(BFloat16::encode(read_binary32(e8m0_value(value.bits)), Round::even, false));
    } else if (std::is_same_v<From, float> && how.round == Round::even && !how.saturate) {
      out.bits = bfloat16_even(static_cast<float>(value));
    } else {
      out.bits = static_cast<uint16_t>(BFloat16::encode(read_number(value), how.round, how.saturate));
    }
    return out;
  } else {
    To out;
    if constexpr (std::is_same_v<To, float8_e4m3_t>) {
      out.bits = static_cast<uint8_t>(E4M3::encode(read_number(value), how.round, how.saturate, how.keep_nan));
    } else if constexpr (std::is_same_v<To, float8_e5m2_t>) {
      out.bits = static_cast<uint8_t>(E5M2::encode(read_number(value), how.round, how.saturate, how.keep_nan));
    } else if constexpr (std::is_same_v<To, float8_e8m0_t>) {
      out.bits = e8m0_floor(read_number(value));
    } else if constexpr (std::is_same_v<From, half>) {
      out.bits = HiF8::from_half(value, how.round, how.saturate);
    } else {
      out.bits = HiF8::from_float(value, how.round, how.saturate);
    }
    return out;
  }
}

/// One 4-bit code.
template <class Packed, class From>
TWIN_LANE uint8_t encode_nibble(From value, const Casting& how) {
  const Number number = read_number(value);
  if constexpr (std::is_same_v<Packed, float4_e2m1x2_t>) return static_cast<uint8_t>(E2M1::encode(number, how.round, true));
  if constexpr (std::is_same_v<Packed, float4_e1m2x2_t>) return static_cast<uint8_t>(E1M2::encode(number, how.round, true));
  int whole = to_integer<int8_t>(number, how.round, how.saturate);
  if (how.saturate) whole = whole < -8 ? -8 : whole > 7 ? 7 : whole;
  if (number.kind == Number::Kind::infinite) whole = number.negative ? -8 : 7;
  return static_cast<uint8_t>(whole & 15);
}
template <class Packed, class To>
TWIN_LANE To decode_nibble(uint8_t code) {
  if constexpr (std::is_same_v<Packed, float4_e2m1x2_t>) return static_cast<To>(to_float(E2M1::decode(code)));
  if constexpr (std::is_same_v<Packed, float4_e1m2x2_t>) return static_cast<To>(to_float(E1M2::decode(code)));
  return static_cast<To>(static_cast<int>(code ^ 8) - 8);
}

/// The conversion of a register. `dst` may share storage with `src`.
template <class To, class From>
TWIN_OP void convert(Register<To>& dst, const Register<From>& src, const Predicate& mask, Round round, bool saturate,
                     int part) {
  require_written(src, "vcvt");
  require_written(mask, "vcvt");
  count_instruction();
  const Casting how{round, saturation_in_force<To>(saturate), (machine().core->ctrl >> 50 & 1) != 0};
  Register<To> out;
  std::memset(out.lane, 0, sizeof out.lane);
  const auto* active = mask.of<From>();
  if constexpr (is_packed<To>) {  // two lanes into a byte; the mask of the even lane counts
    for (int pair = 0; pair < Register<From>::lanes / 2; ++pair) {
      if (!(active[2 * pair] & 1)) continue;
      const uint8_t low = encode_nibble<To>(src.lane[2 * pair], how), high = encode_nibble<To>(src.lane[2 * pair + 1], how);
      out.lane[4 * pair + part].bits = static_cast<uint8_t>(low | high << 4);
    }
  } else if constexpr (is_packed<From>) {  // a byte into two lanes; its own bit counts
    for (int pair = 0; pair < Register<To>::lanes / 2; ++pair) {
      const int lane = 4 * pair + part;
      if (!(active[lane] & 1)) continue;
      out.lane[2 * pair] = decode_nibble<From, To>(src.lane[lane].bits & 15);
      out.lane[2 * pair + 1] = decode_nibble<From, To>(src.lane[lane].bits >> 4);
    }
  } else if constexpr (sizeof(To) >= sizeof(From)) {
    constexpr int step = sizeof(To) / sizeof(From);
    for (int i = 0; i < Register<To>::lanes; ++i) {
      if (active[step * i + part] & 1) out.lane[i] = convert_lane<To>(src.lane[step * i + part], how);
    }
  } else {
    constexpr int step = sizeof(From) / sizeof(To);
    for (int i = 0; i < Register<From>::lanes; ++i) {
      if (active[i] & 1) out.lane[step * i + part] = convert_lane<To>(src.lane[i], how);
    }
  }
  std::memcpy(dst.lane, out.lane, sizeof out.lane);
  mark_written(dst);
}

/// Where a control of one kind stands among those given, and its value; -1 where it is absent.
template <class Kind, class... Controls>
struct FindControl {
  static constexpr bool matches[] = {std::is_same_v<typename Controls::value_type, Kind>..., false};
  static constexpr int place() {
    for (int i = 0; i < static_cast<int>(sizeof...(Controls)); ++i) {
      if (matches[i]) return i;
    }
    return -1;
  }
  static constexpr Kind value(Kind otherwise) {
    Kind found = otherwise;
    ([&] {
      if constexpr (std::is_same_v<typename Controls::value_type, Kind>) found = Controls::value;
    }(), ...);
    return found;
  }
};

}  // namespace twin

/// vcvt(dst, src, mask, [round], [saturation], [part], mode): the compiler's own name. The controls that a pair of types
/// takes, and their order, are checked: what the compiler would refuse does not compile here either.
template <class To, class From, class... Controls>
TWIN_OP void vcvt(twin::Register<To>& dst, const twin::Register<From>& src, const vector_bool& mask, Controls...) {
  constexpr twin::Rule rule = twin::conversion_rule<To, From>();
  static_assert(rule.exists, "the Ascend 950 has no conversion between these types");
  using Rounds = twin::FindControl<twin::Round, Controls...>;
  using Clamps = twin::FindControl<twin::Saturation, Controls...>;
  using Parts = twin::FindControl<twin::Part, Controls...>;
  using Modes = twin::FindControl<twin::Mode, Controls...>;
  constexpr bool packed = twin::is_packed<To> || twin::is_packed<From>;
  constexpr int ratio = packed                       ? 4
                        : sizeof(To) > sizeof(From) ? sizeof(To) / sizeof(From)
                                                    : sizeof(From) / sizeof(To);
  static_assert((Rounds::place() >= 0) == rule.round, "this conversion takes a rounding mode, or takes none");
  static_assert((Clamps::place() >= 0) == rule.saturate, "this conversion takes a saturation control, or takes none");
  static_assert((Parts::place() >= 0) == (ratio > 1), "a conversion between widths takes a part, others take none");
  static_assert(Modes::place() == static_cast<int>(sizeof...(Controls)) - 1, "the mode comes last");
  static_assert(Modes::value(twin::Mode::unknown) == twin::Mode::zeroing, "conversions know MODE_ZEROING alone");
  constexpr bool clamp_first = std::is_same_v<To, half> && std::is_same_v<From, bfloat16_t>;
  static_assert(!rule.round || !rule.saturate || (Clamps::place() < Rounds::place()) == clamp_first,
                "the order is rounding, saturation (bfloat16 to half: saturation, rounding)");
  constexpr twin::Round round = Rounds::value(twin::Round::even);
  constexpr bool hif8 = std::is_same_v<To, hifloat8_t>;
  constexpr bool to_half = std::is_same_v<To, half> && std::is_same_v<From, float>;
  static_assert(!hif8 || round == twin::Round::away || round == twin::Round::hybrid, "hifloat8 rounds away or hybrid");
  static_assert(hif8 || round != twin::Round::hybrid, "only hifloat8 rounds hybrid");
  static_assert(to_half || round != twin::Round::odd, "only float to half rounds to odd");
  constexpr bool fp8 = std::is_same_v<To, float8_e4m3_t> || std::is_same_v<To, float8_e5m2_t>;
  static_assert(!fp8 || round == twin::Round::even, "fp8 rounds to even alone");
  constexpr int part = static_cast<int>(Parts::value(twin::Part::p0));
  static_assert(part < ratio, "this pair of widths has fewer parts");
  twin::convert(dst, src, mask, round, Clamps::value(twin::Saturation::disable) == twin::Saturation::enable, part);
}

namespace twin {
template <Round Direction>
TWIN_LANE float round_to_whole(float value) {
  switch (Direction) {
    case Round::even: return std::nearbyint(value);
    case Round::away: return std::round(value);
    case Round::floor: return std::floor(value);
    case Round::ceil: return std::ceil(value);
    default: return std::trunc(value);
  }
}
}  // namespace twin

/// vtrc(dst, src, round, mask, mode): to a whole number of the same type (Truncate.md).
template <class Element, twin::Round Direction>
  requires twin::one_of<Element, half, bfloat16_t, float>
TWIN_OP void vtrc(twin::Register<Element>& dst, const twin::Register<Element>& src,
                  std::integral_constant<twin::Round, Direction>, const vector_bool& mask,
                  twin::Control<twin::Mode::zeroing>) {
  static_assert(Direction != twin::Round::odd && Direction != twin::Round::hybrid, "vtrc knows five rounding modes");
  twin::require_written(src, "vtrc");
  twin::for_lanes(dst, mask, "vtrc", [&](int i) TWIN_LAMBDA {
    return twin::lower<Element>(twin::round_to_whole<Direction>(twin::lift(src.lane[i])));
  });
}
