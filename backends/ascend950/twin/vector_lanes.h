// One lane of an arithmetic instruction, and the loops that apply it under a predicate.
//
// bfloat16 and half are computed in float and rounded once, to even; for the four basic operations and the square root
// that is the correctly rounded result. Integers wrap. Special values follow asc-devkit, docs/zh/api/附录
// (Reg矢量计算接口边界值汇总.md): nan propagates through max and min, and +0 is above -0.
#pragma once

#include <cmath>

#include "registers.h"

namespace twin {

template <class Element>
TWIN_LANE auto lift(Element value) {
  if constexpr (one_of<Element, half, bfloat16_t>) {
    return static_cast<float>(value);
  } else {
    return value;
  }
}
template <class Element, class Value>
TWIN_LANE Element lower(Value value) {
  return static_cast<Element>(value);
}

/// Integers through their unsigned type in 64 bits, where nothing overflows that matters.
template <class Element>
TWIN_LANE uint64_t wide(Element value) {
  return static_cast<uint64_t>(static_cast<int64_t>(value));
}

/// Results too small for a normal float are flushed by the instructions that approximate (Exp.md, Div.md, ...).
TWIN_LANE float flush(float value) { return std::fabs(value) < 0x1p-126f ? std::copysign(0.0f, value) : value; }

namespace op {

#define TWIN_LANE_OP(Name, Real, Whole)                        \
  struct Name {                                                \
    template <class T>                                         \
    TWIN_LANE static T of(T a, T b) {                          \
      if constexpr (std::is_integral_v<T>) return static_cast<T>(Whole); \
      else return Real;                                        \
    }                                                          \
  };
TWIN_LANE_OP(Add, a + b, wide(a) + wide(b))
TWIN_LANE_OP(Sub, a - b, wide(a) - wide(b))
TWIN_LANE_OP(Mul, a * b, wide(a) * wide(b))
TWIN_LANE_OP(AbsSub, std::fabs(a - b), 0)
TWIN_LANE_OP(Max, a != a ? a : b != b ? b : a == b ? (std::signbit(a) ? b : a) : a > b ? a : b, a > b ? a : b)
TWIN_LANE_OP(Min, a != a ? a : b != b ? b : a == b ? (std::signbit(a) ? a : b) : a < b ? a : b, a < b ? a : b)
TWIN_LANE_OP(PRelu, a > 0 ? a : a * b, 0)
#undef TWIN_LANE_OP

struct Div {
  template <class T>
  TWIN_LANE static T of(T a, T b) {
    if constexpr (std::is_integral_v<T>) {
      if (b == 0) fault("argument", "asc_div", PIPE_V, 0, "divides an integer by zero: the result is not documented");
      return static_cast<T>(static_cast<int64_t>(a) / static_cast<int64_t>(b));
    } else {
      return flush(a / flush(b));
    }
  }
};

#define TWIN_UNARY_OP(Name, Real, Whole)                       \
  struct Name {                                                \
    template <class T>                                         \
    TWIN_LANE static T of(T a) {                               \
      if constexpr (std::is_integral_v<T>) return static_cast<T>(Whole); \
      else return Real;                                        \
    }                                                          \
  };
TWIN_UNARY_OP(Abs, std::fabs(a), a < 0 ? 0 - wide(a) : wide(a))
TWIN_UNARY_OP(Neg, -a, 0 - wide(a))
TWIN_UNARY_OP(Relu, a != a ? a : a > 0 ? a : T{0}, a > 0 ? a : 0)
TWIN_UNARY_OP(Sqrt, flush(std::sqrt(flush(a))), 0)
TWIN_UNARY_OP(Exp, flush(std::exp(a)), 0)
TWIN_UNARY_OP(Ln, flush(std::log(flush(a))), 0)
#undef TWIN_UNARY_OP

// Shifts. A signed value keeps its sign bit in both directions (asc_shiftleft.md, asc_shiftright.md).
struct ShiftLeft {
  template <class T>
  TWIN_LANE static T of(T value, int64_t by) {
    constexpr int width = sizeof(T) * 8;
    if (by >= width) return 0;
    const uint64_t moved = wide(value) << by;
    if constexpr (std::is_unsigned_v<T>) return static_cast<T>(moved);
    constexpr uint64_t sign = uint64_t{1} << (width - 1);
    return static_cast<T>((moved & ~sign) | (wide(value) & sign));
  }
};
struct ShiftRight {
  template <class T>
  TWIN_LANE static T of(T value, int64_t by) {
    constexpr int width = sizeof(T) * 8;
    if (by >= width) return value < 0 ? static_cast<T>(-1) : T{0};
    return static_cast<T>(value >> by);
  }
};

}  // namespace op

/// a * b + c with one rounding.
template <class Element>
TWIN_LANE Element fused(Element a, Element b, Element c) {
  if constexpr (std::is_integral_v<Element>) {
    return static_cast<Element>(wide(a) * wide(b) + wide(c));
  } else if constexpr (std::is_same_v<Element, float>) {
    return std::fma(a, b, c);
  } else {
    // The product of two 16-bit floats is exact in double; the sum loses at most its 53rd bit.
    const double sum = static_cast<double>(lift(a)) * lift(b) + lift(c);
    if constexpr (std::is_same_v<Element, half>) return static_cast<half>(sum);
    else return lower<bfloat16_t>(static_cast<float>(sum));
  }
}

TWIN_LANE void count_instruction() { ++machine().counters.instructions[slot_of(PIPE_V)]; }

/// dst[i] = mask[i] ? lane(i) : 0, or the old dst[i] where `merging`. `dst` may be one of the sources.
template <class Element, class Lane>
TWIN_LANE void for_lanes(Register<Element>& dst, const Predicate& mask, const char* what, Lane lane, bool merging = false) {
  require_written(mask, what);
  if (merging) require_written(dst, what);
  count_instruction();
  const auto* active = mask.of<Element>();
  const Element zero{};
  if (merging) {
    for (int i = 0; i < Register<Element>::lanes; ++i) {
      if (active[i] & 1) dst.lane[i] = lane(i);
    }
  } else {
#pragma GCC ivdep  // a lane depends on its own lane alone, also where dst is a source
    for (int i = 0; i < Register<Element>::lanes; ++i) {
      const Element value = lane(i);
      dst.lane[i] = active[i] & 1 ? value : zero;
    }
  }
  mark_written(dst);
}

template <class Op, class Element>
TWIN_OP void binary(Register<Element>& dst, const Register<Element>& a, const Register<Element>& b, const Predicate& mask,
                    const char* what) {
  require_written(a, what);
  require_written(b, what);
  for_lanes(dst, mask, what, [&](int i) TWIN_LAMBDA { return lower<Element>(Op::of(lift(a.lane[i]), lift(b.lane[i]))); });
}
template <class Op, class Element>
TWIN_OP void binary_scalar(Register<Element>& dst, const Register<Element>& a, Element b, const Predicate& mask,
                           const char* what) {
  require_written(a, what);
  for_lanes(dst, mask, what, [&](int i) TWIN_LAMBDA { return lower<Element>(Op::of(lift(a.lane[i]), lift(b))); });
}
template <class Op, class Element>
TWIN_OP void unary(Register<Element>& dst, const Register<Element>& a, const Predicate& mask, const char* what) {
  require_written(a, what);
  for_lanes(dst, mask, what, [&](int i) TWIN_LAMBDA { return lower<Element>(Op::of(lift(a.lane[i]))); });
}

}  // namespace twin
