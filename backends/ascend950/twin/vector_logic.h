// Bit logic, shifts, compares and selects of the vector core.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg/logic_compute and compare_and_select, a document per intrinsic.
#pragma once

#include "vector_lanes.h"

namespace twin {

template <class Element, class Logic>
TWIN_OP void bitwise(Register<Element>& dst, const Register<Element>& a, const Register<Element>& b, const Predicate& mask,
                     const char* what, Logic logic) {
  require_written(a, what);
  require_written(b, what);
  using Bits = bits_t<Element>;
  for_lanes(dst, mask, what, [&](int i) TWIN_LAMBDA {
    return std::bit_cast<Element>(
        static_cast<Bits>(logic(std::bit_cast<Bits>(a.lane[i]), std::bit_cast<Bits>(b.lane[i]))));
  });
}

template <class Op, class Element, class Amount>
TWIN_OP void shift(Register<Element>& dst, const Register<Element>& src, const Predicate& mask, const char* what,
                   Amount amount) {
  require_written(src, what);
  for_lanes(dst, mask, what, [&](int i) TWIN_LAMBDA {
    const int64_t by = amount(i);
    if (by < 0) fault("argument", what, PIPE_V, 0, "shifts lane %d by %lld", i, static_cast<long long>(by));
    return Op::of(src.lane[i], by);
  });
}

/// The bit of a lane is the comparison, the bits between lanes and those of inactive lanes are zero.
template <class Element, class Compare>
TWIN_OP void compare(Predicate& dst, const Register<Element>& a, const Predicate& mask, const char* what, Compare holds) {
  require_written(a, what);
  require_written(mask, what);
  count_instruction();
  Predicate out;
  using Bits = bits_t<Element>;
  auto* bits = reinterpret_cast<Bits*>(out.bit);
  const auto* active = mask.of<Element>();
  for (int i = 0; i < Register<Element>::lanes; ++i) bits[i] = active[i] & 1 & (holds(i) ? 1 : 0);
  mark_written(out);
  dst = out;
}

}  // namespace twin

#define TWIN_BITWISE(Name, Expression, ...)                                                                       \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, __VA_ARGS__>                                                                   \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src0,                            \
                    const twin::Register<Element>& src1, const vector_bool& mask) {                               \
    twin::bitwise(dst, src0, src1, mask, #Name, [](auto a, auto b) TWIN_LAMBDA { return Expression; });           \
  }
#define TWIN_INTEGERS int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t

// asc_and.md, asc_or.md, asc_xor.md, asc_not.md
TWIN_BITWISE(asc_and, a & b, TWIN_INTEGERS, float8_e4m3_t, float8_e5m2_t, half, bfloat16_t, float)
TWIN_BITWISE(asc_or, a | b, TWIN_INTEGERS, half, float)
TWIN_BITWISE(asc_xor, a ^ b, TWIN_INTEGERS)
#undef TWIN_BITWISE
template <class Element>
  requires twin::one_of<Element, TWIN_INTEGERS, half, float>
TWIN_OP void asc_not(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::bitwise(dst, src, src, mask, "asc_not", [](auto a, auto) TWIN_LAMBDA { return ~a; });
}

// asc_shiftleft.md, asc_shiftright.md: the amounts are signed, whatever is shifted
#define TWIN_SHIFT(Name, Op)                                                                                      \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, TWIN_INTEGERS>                                                                 \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src0,                            \
                    const twin::Register<std::make_signed_t<Element>>& src1, const vector_bool& mask) {           \
    twin::require_written(src1, #Name);                                                                           \
    const auto by = src1;                                                                                         \
    twin::shift<twin::op::Op>(dst, src0, mask, #Name, [&](int i) TWIN_LAMBDA { return by.lane[i]; });             \
  }                                                                                                               \
  template <class Element> /* asc_shiftleft_scalar.md, asc_shiftright_scalar.md */                                \
    requires twin::one_of<Element, TWIN_INTEGERS>                                                                 \
  TWIN_OP void Name##_scalar(twin::Register<Element>& dst, const twin::Register<Element>& src, int16_t value,     \
                             const vector_bool& mask) {                                                           \
    twin::shift<twin::op::Op>(dst, src, mask, #Name "_scalar", [=](int) TWIN_LAMBDA { return value; });           \
  }
TWIN_SHIFT(asc_shiftleft, ShiftLeft)
TWIN_SHIFT(asc_shiftright, ShiftRight)
#undef TWIN_SHIFT

// asc_eq.md, asc_ne.md, asc_lt.md, asc_le.md, asc_gt.md, asc_ge.md and the same with _scalar
#define TWIN_COMPARE(Name, Operator)                                                                              \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, TWIN_INTEGERS, half, bfloat16_t, float>                                        \
  TWIN_OP void Name(vector_bool& dst, const twin::Register<Element>& src0, const twin::Register<Element>& src1,   \
                    const vector_bool& mask) {                                                                    \
    twin::require_written(src1, #Name);                                                                           \
    twin::compare(dst, src0, mask, #Name,                                                                         \
                  [&](int i) TWIN_LAMBDA { return twin::lift(src0.lane[i]) Operator twin::lift(src1.lane[i]); }); \
  }                                                                                                               \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, TWIN_INTEGERS, half, bfloat16_t, float>                                        \
  TWIN_OP void Name##_scalar(vector_bool& dst, const twin::Register<Element>& src,                                \
                             std::type_identity_t<Element> value, const vector_bool& mask) {                      \
    const auto right = twin::lift(value);                                                                         \
    twin::compare(dst, src, mask, #Name "_scalar",                                                                \
                  [&](int i) TWIN_LAMBDA { return twin::lift(src.lane[i]) Operator right; });                     \
  }
TWIN_COMPARE(asc_eq, ==)
TWIN_COMPARE(asc_ne, !=)
TWIN_COMPARE(asc_lt, <)
TWIN_COMPARE(asc_le, <=)
TWIN_COMPARE(asc_gt, >)
TWIN_COMPARE(asc_ge, >=)
#undef TWIN_COMPARE

// asc_select.md: src0 where the mask is set, else src1; only a side that is taken has to hold anything
template <class Element>
  requires twin::one_of<Element, TWIN_INTEGERS, float8_e4m3_t, float8_e5m2_t, hifloat8_t, half, bfloat16_t, float>
TWIN_OP void asc_select(twin::Register<Element>& dst, const twin::Register<Element>& src0,
                        const twin::Register<Element>& src1, const vector_bool& mask) {
  twin::require_written(mask, "asc_select");
  twin::count_instruction();
  const auto* active = mask.of<Element>();
  bool any = false, all = true;
  for (int i = 0; i < twin::Register<Element>::lanes; ++i) {
    const bool first = active[i] & 1;
    any |= first;
    all &= first;
    dst.lane[i] = first ? src0.lane[i] : src1.lane[i];
  }
  if (any) twin::require_written(src0, "asc_select");
  if (!all) twin::require_written(src1, "asc_select");
  twin::mark_written(dst);
}

// reg_load/asc_copy.md: where the mask is not set, dst keeps what it holds
template <class Element>
  requires twin::one_of<Element, TWIN_INTEGERS, half, bfloat16_t, float>
TWIN_OP void asc_copy(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  asc_select(dst, src, dst, mask);
}

#undef TWIN_INTEGERS
