// The names that generated text uses for instructions, in terms of the C API: values are returned, modes are tags.
//
// TileLang ships a header for this with its wheel. Ours holds what these kernels use, so that neither the twin nor a
// device needs the wheel to compile them; a test compiles the same text against the wheel's own header and compares.
#pragma once

#include "c_api/asc_simd.h"
#include "simt_api/asc_simt.h"

using fp8_e4_t = float8_e4m3_t;

namespace tl::limits {
constexpr float kFloatNInf = -__builtin_inff();
}

namespace simd_inst {

template <class T>
struct Lanes;
template <>
struct Lanes<float> {
  using type = vector_f32;
};
template <>
struct Lanes<uint32_t> {
  using type = vector_u32;
};
template <>
struct Lanes<uint8_t> {
  using type = vector_u8;
};
template <>
struct Lanes<bfloat16_t> {
  using type = vector_bf16;
};
template <>
struct Lanes<float8_e4m3_t> {
  using type = vector_f8e4m3;
};
template <class T>
using lanes = typename Lanes<T>::type;

template <class Register>
struct Pair {
  Register v0, v1;
};

#define TILE_LOAD(name, call)                                          \
  template <class T>                                                   \
  __simd_callee__ inline lanes<T> name(__ubuf__ T* place, int offset) { \
    lanes<T> value;                                                    \
    call(value, place, offset);                                        \
    return value;                                                      \
  }
TILE_LOAD(vlds_norm, asc_loadalign)
TILE_LOAD(vlds_brc_elem, asc_loadalign_brc_elem)
TILE_LOAD(vlds_brc_elem2datablock, asc_loadalign_brc_elem2datablock)
TILE_LOAD(vlds_unpack, asc_loadalign_unpack)
TILE_LOAD(vlds_unpack4, asc_loadalign_unpack4)
#undef TILE_LOAD

template <class T>
__simd_callee__ inline void vsts_norm(lanes<T> value, __ubuf__ T* place, int offset, vector_bool mask) {
  asc_storealign(place, value, offset, mask);
}
template <class T>
__simd_callee__ inline void vsts_1st(lanes<T> value, __ubuf__ T* place, int offset, vector_bool) {
  asc_storealign_1st(place, value, offset);
}
// The low half of each 32-bit lane; the mask is one of 32-bit lanes.
template <class T>
__simd_callee__ inline void vsts_pack_b32(lanes<T> value, __ubuf__ T* place, int offset, vector_bool mask) {
  asc_storealign_pack((__ubuf__ uint32_t*)place, reinterpret_cast<vector_u32&>(value), offset, mask);
}
// The low byte of each 32-bit lane.
template <class T>
__simd_callee__ inline void vsts_pack_quarter(lanes<T> value, __ubuf__ T* place, int offset, vector_bool mask) {
  asc_storealign_pack_quarter((__ubuf__ uint32_t*)place, reinterpret_cast<vector_u32&>(value), offset, mask);
}

#define TILE_BINARY(name, call)                                                                   \
  template <class Register, class Right, class Mode>                                              \
  __simd_callee__ inline Register name(Register left, Right right, vector_bool mask, Mode) {      \
    Register value;                                                                               \
    call(value, left, right, mask);                                                               \
    return value;                                                                                 \
  }
TILE_BINARY(vadd, asc_add)
TILE_BINARY(vsub, asc_sub)
TILE_BINARY(vmul, asc_mul)
TILE_BINARY(vdiv, asc_div)
TILE_BINARY(vmax, asc_max)
TILE_BINARY(vand, asc_and)
TILE_BINARY(vor, asc_or)
TILE_BINARY(vadds, asc_add_scalar)
TILE_BINARY(vmuls, asc_mul_scalar)
TILE_BINARY(vshls, asc_shiftleft_scalar)
TILE_BINARY(vshrs, asc_shiftright_scalar)
#undef TILE_BINARY

#define TILE_UNARY(name, call)                                                     \
  template <class Register, class Mode>                                            \
  __simd_callee__ inline Register name(Register source, vector_bool mask, Mode) {  \
    Register value;                                                                \
    call(value, source, mask);                                                     \
    return value;                                                                  \
  }
TILE_UNARY(vneg, asc_neg)
TILE_UNARY(vexp, asc_exp)
TILE_UNARY(vln, asc_ln)
TILE_UNARY(vsqrt, asc_sqrt)
TILE_UNARY(vcadd, asc_reduce_sum)
TILE_UNARY(vcgmax, asc_reduce_max_datablock)
#undef TILE_UNARY

#define TILE_COMPARE(name, call)                                                                \
  template <class Register, class Right>                                                        \
  __simd_callee__ inline vector_bool name(Register left, Right right, vector_bool mask) {       \
    vector_bool value;                                                                          \
    call(value, left, right, mask);                                                             \
    return value;                                                                               \
  }
TILE_COMPARE(vcmp_eq, asc_eq)
TILE_COMPARE(vcmp_gt, asc_gt)
TILE_COMPARE(vcmp_le, asc_le)
TILE_COMPARE(vcmp_lt, asc_lt)
TILE_COMPARE(vcmps_eq, asc_eq_scalar)
TILE_COMPARE(vcmps_ge, asc_ge_scalar)
TILE_COMPARE(vcmps_lt, asc_lt_scalar)
#undef TILE_COMPARE

template <class T, class Mode>
__simd_callee__ inline lanes<T> vdup(T number, vector_bool mask, Mode) {
  lanes<T> value;
  asc_duplicate_scalar(value, number, mask);
  return value;
}

template <class Register>
__simd_callee__ inline Register vsel(Register yes, Register no, vector_bool mask) {
  Register value;
  asc_select(value, yes, no, mask);
  return value;
}

template <class To, class Register, class... Controls>
__simd_callee__ inline lanes<To> vcvt(Register source, vector_bool mask, Controls... controls) {
  lanes<To> value;
  ::vcvt(value, source, mask, controls...);
  return value;
}

template <class Register>
__simd_callee__ inline Pair<Register> vintlv(Register first, Register second) {
  Pair<Register> value;
  asc_intlv(value.v0, value.v1, first, second);
  return value;
}
template <class Register>
__simd_callee__ inline Pair<Register> vdintlv(Register first, Register second) {
  Pair<Register> value;
  asc_deintlv(value.v0, value.v1, first, second);
  return value;
}

__simd_callee__ inline vector_bool update_mask_b32(uint32_t count) { return asc_update_mask_b32(count); }

template <class Order>
__simd_callee__ inline void mem_bar(Order order) {
  asc_mem_bar(order);
}

}  // namespace simd_inst
