// Arithmetic, logic, shifts, compares and selects of the vector core.
//
// Each intrinsic names its document under asc-devkit docs/zh/api/SIMD-API/C-API/reg; the element types are those that
// include/c_api/reg_compute/reg_vector.h declares, so that a kernel which compiles here names nothing unknown there.
#pragma once

#include "vector_lanes.h"

#define TWIN_BINARY(Name, Op, ...)                                                                                \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, __VA_ARGS__>                                                                   \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src0,                            \
                    const twin::Register<Element>& src1, const vector_bool& mask) {                               \
    twin::binary<twin::op::Op>(dst, src0, src1, mask, #Name);                                                     \
  }
#define TWIN_SCALAR(Name, Op, ...)                                                                                \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, __VA_ARGS__>                                                                   \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src,                             \
                    std::type_identity_t<Element> value, const vector_bool& mask) {                               \
    twin::binary_scalar<twin::op::Op>(dst, src, value, mask, #Name);                                              \
  }
#define TWIN_UNARY(Name, Op, ...)                                                                                 \
  template <class Element>                                                                                        \
    requires twin::one_of<Element, __VA_ARGS__>                                                                   \
  TWIN_OP void Name(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {  \
    twin::unary<twin::op::Op>(dst, src, mask, #Name);                                                             \
  }
#define TWIN_BYTES int8_t, uint8_t
#define TWIN_WORDS int16_t, uint16_t, int32_t, uint32_t

// arithmetic_compute/asc_add.md, asc_sub.md, asc_mul.md, asc_div.md, asc_max.md, asc_min.md, asc_prelu.md
TWIN_BINARY(asc_add, Add, TWIN_BYTES, TWIN_WORDS, half, bfloat16_t, float)
TWIN_BINARY(asc_sub, Sub, TWIN_BYTES, TWIN_WORDS, half, bfloat16_t, float)
TWIN_BINARY(asc_mul, Mul, TWIN_WORDS, half, bfloat16_t, float)
TWIN_BINARY(asc_div, Div, TWIN_WORDS, half, float)
TWIN_BINARY(asc_max, Max, TWIN_BYTES, TWIN_WORDS, half, bfloat16_t, float)
TWIN_BINARY(asc_min, Min, TWIN_BYTES, TWIN_WORDS, half, bfloat16_t, float)
TWIN_BINARY(asc_prelu, PRelu, half, float)
// asc_add_scalar.md, asc_mul_scalar.md, asc_max_scalar.md, asc_min_scalar.md, asc_leakyrelu.md
TWIN_SCALAR(asc_add_scalar, Add, TWIN_BYTES, TWIN_WORDS, half, bfloat16_t, float)
TWIN_SCALAR(asc_mul_scalar, Mul, TWIN_WORDS, half, float)
TWIN_SCALAR(asc_max_scalar, Max, TWIN_BYTES, TWIN_WORDS, half, bfloat16_t, float)
TWIN_SCALAR(asc_min_scalar, Min, TWIN_BYTES, TWIN_WORDS, half, float)
TWIN_SCALAR(asc_leakyrelu, PRelu, half, float)
// asc_abs.md, asc_neg.md, asc_relu.md, asc_sqrt.md, asc_exp.md, asc_ln.md
TWIN_UNARY(asc_abs, Abs, int8_t, int16_t, int32_t, half, float)
TWIN_UNARY(asc_neg, Neg, int8_t, int16_t, int32_t, half, float)
TWIN_UNARY(asc_relu, Relu, int32_t, half, float)
TWIN_UNARY(asc_sqrt, Sqrt, half, float)
TWIN_UNARY(asc_exp, Exp, half, float)
TWIN_UNARY(asc_ln, Ln, half, float)
// compound_compute/asc_abs_sub.md
TWIN_BINARY(asc_abs_sub, AbsSub, half, float)

namespace twin {

/// 32-bit addition with a carry a lane. Subtraction adds the complement of `src1`, as the documents do.
TWIN_OP void add_with_carry(Predicate& carry, vector_u32& dst, const vector_u32& src0, const vector_u32& src1,
                            const Predicate* carry_in, uint64_t constant, bool complement, const Predicate& mask,
                            const char* what) {
  require_written(src0, what);
  require_written(src1, what);
  require_written(mask, what);
  if (carry_in) require_written(*carry_in, what);
  count_instruction();
  Predicate out;
  std::memset(out.bit, 0, sizeof out.bit);
  for (int i = 0; i < vector_u32::lanes; ++i) {
    const uint64_t in = carry_in ? carry_in->at<uint32_t>(i) : constant;
    const uint64_t sum = uint64_t{src0.lane[i]} + (complement ? ~src1.lane[i] : src1.lane[i]) + in;
    const bool active = mask.at<uint32_t>(i);
    dst.lane[i] = active ? static_cast<uint32_t>(sum) : 0;
    out.bit[4 * i] = active && sum >> 32;
  }
  mark_written(dst);
  mark_written(out);
  carry = out;
}

}  // namespace twin

// asc_add.md, asc_sub.md, asc_addc.md, asc_subc.md: the forms with a carry
TWIN_OP void asc_add(vector_bool& carry, vector_u32& dst, const vector_u32& src0, const vector_u32& src1,
                     const vector_bool& mask) {
  twin::add_with_carry(carry, dst, src0, src1, nullptr, 0, false, mask, "asc_add");
}
TWIN_OP void asc_sub(vector_bool& carry, vector_u32& dst, const vector_u32& src0, const vector_u32& src1,
                     const vector_bool& mask) {
  twin::add_with_carry(carry, dst, src0, src1, nullptr, 1, true, mask, "asc_sub");
}
TWIN_OP void asc_addc(vector_bool& carry, vector_u32& dst, const vector_u32& src0, const vector_u32& src1,
                      const vector_bool& carry_src, const vector_bool& mask) {
  twin::add_with_carry(carry, dst, src0, src1, &carry_src, 0, false, mask, "asc_addc");
}
TWIN_OP void asc_subc(vector_bool& carry, vector_u32& dst, const vector_u32& src0, const vector_u32& src1,
                      const vector_bool& carry_src, const vector_bool& mask) {
  twin::add_with_carry(carry, dst, src0, src1, &carry_src, 0, true, mask, "asc_subc");
}

// asc_mull.md: low words in dst0, high words in dst1
template <class Element>
  requires twin::one_of<Element, int32_t, uint32_t>
TWIN_OP void asc_mull(twin::Register<Element>& dst0, twin::Register<Element>& dst1, const twin::Register<Element>& src0,
                      const twin::Register<Element>& src1, const vector_bool& mask) {
  twin::require_written(src0, "asc_mull");
  twin::require_written(src1, "asc_mull");
  using Wide = std::conditional_t<std::is_signed_v<Element>, int64_t, uint64_t>;
  const twin::Register<Element> a = src0, b = src1;
  const auto product = [&](int i) TWIN_LAMBDA { return static_cast<Wide>(a.lane[i]) * static_cast<Wide>(b.lane[i]); };
  twin::for_lanes(dst0, mask, "asc_mull", [&](int i) TWIN_LAMBDA { return static_cast<Element>(product(i)); });
  twin::for_lanes(dst1, mask, "asc_mull", [&](int i) TWIN_LAMBDA { return static_cast<Element>(product(i) >> 32); });
}

namespace twin {

/// dst = x * y + z under a mask, where two of the three may be dst itself.
template <class Element>
TWIN_OP void multiply_add(Register<Element>& dst, const Register<Element>& x, const Register<Element>& y,
                          const Register<Element>& z, const Predicate& mask, bool merging, const char* what) {
  require_written(x, what);
  require_written(y, what);
  require_written(z, what);
  for_lanes(dst, mask, what, [&](int i) TWIN_LAMBDA { return fused(x.lane[i], y.lane[i], z.lane[i]); }, merging);
}

}  // namespace twin

// compound_compute/asc_axpy.md: dst = src * value + dst
template <class Element>
  requires twin::one_of<Element, half, float>
TWIN_OP void asc_axpy(twin::Register<Element>& dst, const twin::Register<Element>& src, std::type_identity_t<Element> value,
                      const vector_bool& mask) {
  twin::require_written(src, "asc_axpy");
  twin::require_written(dst, "asc_axpy");
  twin::for_lanes(dst, mask, "asc_axpy", [&](int i) TWIN_LAMBDA { return twin::fused(src.lane[i], value, dst.lane[i]); });
}
// compound_compute/asc_madd.md: dst = dst * src0 + src1
template <class Element>
  requires twin::one_of<Element, half, float>
TWIN_OP void asc_madd(twin::Register<Element>& dst, const twin::Register<Element>& src0,
                      const twin::Register<Element>& src1, const vector_bool& mask) {
  twin::multiply_add(dst, dst, src0, src1, mask, false, "asc_madd");
}
// MulDstAdd.md (vmadd) and MulAddDst.md (vmula): the compiler's own names, which the C API does not wrap
template <class Element, twin::Mode Merge>
  requires twin::one_of<Element, half, bfloat16_t, float>
TWIN_OP void vmadd(twin::Register<Element>& dst, const twin::Register<Element>& src0, const twin::Register<Element>& src1,
                   const vector_bool& mask, std::integral_constant<twin::Mode, Merge>) {
  twin::multiply_add(dst, dst, src0, src1, mask, Merge == twin::Mode::merging, "vmadd");
}
template <class Element, twin::Mode Merge>
  requires twin::one_of<Element, TWIN_WORDS, half, bfloat16_t, float>
TWIN_OP void vmula(twin::Register<Element>& dst, const twin::Register<Element>& src0, const twin::Register<Element>& src1,
                   const vector_bool& mask, std::integral_constant<twin::Mode, Merge>) {
  twin::multiply_add(dst, src0, src1, dst, mask, Merge == twin::Mode::merging, "vmula");
}

// compound_compute/asc_exp_sub_deprecated.md: e^(src0 - src1); halves are read from even or odd lanes
TWIN_OP void asc_exp_sub(vector_f32& dst, const vector_f32& src0, const vector_f32& src1, const vector_bool& mask) {
  twin::require_written(src0, "asc_exp_sub");
  twin::require_written(src1, "asc_exp_sub");
  twin::for_lanes(dst, mask, "asc_exp_sub",
                  [&](int i) TWIN_LAMBDA { return twin::op::Exp::of(src0.lane[i] - src1.lane[i]); });
}
TWIN_OP void asc_exp_sub_v2(vector_f32& dst, const vector_f32& src0, const vector_f32& src1, const vector_bool& mask) {
  asc_exp_sub(dst, src0, src1, mask);  // ExpSub.md: the layout has no effect on float
}

namespace twin {
TWIN_OP void exp_sub_half(vector_f32& dst, const vector_f16& src0, const vector_f16& src1, const Predicate& mask, int part,
                          const char* what) {
  require_written(src0, what);
  require_written(src1, what);
  require_written(mask, what);
  count_instruction();
  for (int i = 0; i < vector_f32::lanes; ++i) {  // the mask is that of the half lanes that are read
    const int lane = 2 * i + part;
    const float difference = static_cast<float>(src0.lane[lane]) - static_cast<float>(src1.lane[lane]);
    dst.lane[i] = mask.at<half>(lane) ? op::Exp::of(difference) : 0.0f;
  }
  mark_written(dst);
}
TWIN_OP void multiply_to_half(vector_f16& dst, const vector_f32& src, float value, const Predicate& mask, int part,
                              const char* what) {
  require_written(src, what);
  require_written(mask, what);
  count_instruction();
  for (int i = 0; i < vector_f32::lanes; ++i) {
    const uint32_t code = Binary16::encode(read_binary32(src.lane[i] * value), Round::away, false);
    dst.lane[2 * i + 1 - part] = half{0};
    dst.lane[2 * i + part] = mask.at<float>(i) ? std::bit_cast<half>(static_cast<uint16_t>(code)) : half{0};
  }
  mark_written(dst);
}
}  // namespace twin

TWIN_OP void asc_exp_sub(vector_f32& dst, const vector_f16& src0, const vector_f16& src1, const vector_bool& mask) {
  twin::exp_sub_half(dst, src0, src1, mask, 0, "asc_exp_sub");
}
TWIN_OP void asc_exp_sub_v2(vector_f32& dst, const vector_f16& src0, const vector_f16& src1, const vector_bool& mask) {
  twin::exp_sub_half(dst, src0, src1, mask, 1, "asc_exp_sub_v2");
}
// arithmetic_compute/asc_muls_deprecated.md
TWIN_OP void asc_muls(vector_f16& dst, const vector_f32& src, float value, const vector_bool& mask) {
  twin::multiply_to_half(dst, src, value, mask, 0, "asc_muls");
}
TWIN_OP void asc_muls_v2(vector_f16& dst, const vector_f32& src, float value, const vector_bool& mask) {
  twin::multiply_to_half(dst, src, value, mask, 1, "asc_muls_v2");
}

#undef TWIN_BINARY
#undef TWIN_SCALAR
#undef TWIN_UNARY
