// Registers of the vector core: 256 bytes of data, a predicate with one bit a byte, buffers for unaligned access.
//
// In `checked` mode a register knows whether anything was written to it, and an instruction that reads one too early
// is a fault; the bytes of such a register are poison.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg/reg_data_types (data_type_definition.md).
#pragma once

#include <cstring>

#include "machine.h"
#include "numbers.h"

// An intrinsic, and the arithmetic of one lane of it.
#define TWIN_OP TWIN_UNWATCHED inline
#define TWIN_LANE __attribute__((always_inline)) TWIN_UNWATCHED inline
#define TWIN_LAMBDA __attribute__((always_inline, no_sanitize("thread")))

namespace twin {

inline constexpr int kVectorBytes = 256;

template <class Element, class... Of>
concept one_of = (std::is_same_v<Element, Of> || ...);

template <size_t Bytes>
struct bits_of;
template <> struct bits_of<1> { using type = uint8_t; };
template <> struct bits_of<2> { using type = uint16_t; };
template <> struct bits_of<4> { using type = uint32_t; };
template <> struct bits_of<8> { using type = uint64_t; };
template <class Element>
using bits_t = typename bits_of<sizeof(Element)>::type;

/// A vector register. Registers of different element types have one layout, so kernels may cast between them.
template <class Element>
struct Register {
  using element = Element;
  static constexpr int lanes = kVectorBytes / sizeof(Element);
  alignas(32) Element lane[lanes];
#if TWIN_CHECKED
  bool written = false;
#endif
};

/// A predicate. Lane i of a register of n-byte elements listens to bit n * i; the bits between are kept as they are.
struct Predicate {
  alignas(32) uint8_t bit[kVectorBytes];
#if TWIN_CHECKED
  bool written = false;
#endif

  /// The bits as integers as wide as an element: the lowest bit of each is its lane's.
  template <class Element>
  TWIN_LANE const bits_t<Element>* of() const { return reinterpret_cast<const bits_t<Element>*>(bit); }
  template <class Element>
  TWIN_LANE bool at(int lane) const { return bit[lane * sizeof(Element)] & 1; }
};

/// What an unaligned access holds back: up to 32 bytes that belong at `address`.
struct AlignRegister {
  uint8_t held[32];
  int count = 0;
  const uint8_t* address = nullptr;
  bool primed = false;
};

/// An offset that hardware loops advance. The twin cannot see the loops, so it refuses its use.
struct AddressRegister {};

TWIN_LANE void refuse_address_register(const char* what) {
  fault("unsupported", what, PIPE_V, 0, "address registers follow hardware loops, which the twin cannot see: "
        "pass an element offset");
}

template <class Any>
TWIN_LANE void require_written([[maybe_unused]] const Any& reg, [[maybe_unused]] const char* what) {
#if TWIN_CHECKED
  if (__builtin_expect(!reg.written, 0)) fault("poison", what, PIPE_V, 0, "reads a register that nothing has written");
#endif
}
template <class Any>
TWIN_LANE void mark_written([[maybe_unused]] Any& reg) {
#if TWIN_CHECKED
  reg.written = true;
#endif
}

/// A control of an intrinsic as a type of its own, so that `if constexpr` and overloads can tell it.
template <auto Value>
using Control = std::integral_constant<decltype(Value), Value>;

enum class Saturation { disable, enable };
enum class Part { p0, p1, p2, p3 };
enum class Mode { zeroing, merging, unknown };
enum class Half { lower, higher };
enum class Order { increasing, decreasing };
enum class Position { lowest, highest };
enum class Bin { n0, n1 };
enum class Post { update };

}  // namespace twin

using vector_s8 = twin::Register<int8_t>;
using vector_u8 = twin::Register<uint8_t>;
using vector_s16 = twin::Register<int16_t>;
using vector_u16 = twin::Register<uint16_t>;
using vector_s32 = twin::Register<int32_t>;
using vector_u32 = twin::Register<uint32_t>;
using vector_s64 = twin::Register<int64_t>;
using vector_u64 = twin::Register<uint64_t>;
using vector_f16 = twin::Register<half>;
using vector_f32 = twin::Register<float>;
using vector_bf16 = twin::Register<bfloat16_t>;
using vector_hif8 = twin::Register<hifloat8_t>;
using vector_f8e4m3 = twin::Register<float8_e4m3_t>;
using vector_f8e5m2 = twin::Register<float8_e5m2_t>;
using vector_f8e8m0 = twin::Register<float8_e8m0_t>;
using vector_s4x2 = twin::Register<int4x2_t>;
using vector_f4e2m1x2 = twin::Register<float4_e2m1x2_t>;
using vector_f4e1m2x2 = twin::Register<float4_e1m2x2_t>;
using vector_bool = twin::Predicate;
using vector_align = twin::AlignRegister;
using vector_address = twin::AddressRegister;

using vector_int8_t = vector_s8;
using vector_uint8_t = vector_u8;
using vector_int16_t = vector_s16;
using vector_uint16_t = vector_u16;
using vector_int32_t = vector_s32;
using vector_uint32_t = vector_u32;
using vector_int64_t = vector_s64;
using vector_uint64_t = vector_u64;
using vector_half = vector_f16;
using vector_float = vector_f32;
using vector_bfloat16_t = vector_bf16;
using vector_hifloat8_t = vector_hif8;
using vector_fp8_e4m3fn_t = vector_f8e4m3;
using vector_fp8_e5m2_t = vector_f8e5m2;
using vector_fp8_e8m0_t = vector_f8e8m0;
using vector_int4x2_t = vector_s4x2;
using vector_fp4x2_e2m1_t = vector_f4e2m1x2;
using vector_fp4x2_e1m2_t = vector_f4e1m2x2;
using vector_load_unalign = vector_align;
using vector_store_unalign = vector_align;
using vector_load_align = vector_align;
using vector_store_align = vector_align;
using addr_reg = vector_address;
using iter_reg = vector_address;

// asc-devkit: rounding_mode.md (suffixes rn, rna, rd, ru, rz, ro, rh).
inline constexpr twin::Control<twin::Round::even> ROUND_R{};
inline constexpr twin::Control<twin::Round::away> ROUND_A{};
inline constexpr twin::Control<twin::Round::floor> ROUND_F{};
inline constexpr twin::Control<twin::Round::ceil> ROUND_C{};
inline constexpr twin::Control<twin::Round::zero> ROUND_Z{};
inline constexpr twin::Control<twin::Round::odd> ROUND_O{};
inline constexpr twin::Control<twin::Round::hybrid> ROUND_H{};
inline constexpr twin::Control<twin::Saturation::disable> RS_DISABLE{};
inline constexpr twin::Control<twin::Saturation::enable> RS_ENABLE{};
// asc-devkit: RegLayout.md.
inline constexpr twin::Control<twin::Part::p0> PART_EVEN{}, PART_P0{};
inline constexpr twin::Control<twin::Part::p1> PART_ODD{}, PART_P1{};
inline constexpr twin::Control<twin::Part::p2> PART_P2{};
inline constexpr twin::Control<twin::Part::p3> PART_P3{};
inline constexpr twin::Control<twin::Mode::zeroing> MODE_ZEROING{};
inline constexpr twin::Control<twin::Mode::merging> MODE_MERGING{};
inline constexpr twin::Control<twin::Mode::unknown> MODE_UNKNOWN{};
inline constexpr twin::Control<twin::Half::lower> LOWER{};
inline constexpr twin::Control<twin::Half::higher> HIGHER{};
inline constexpr twin::Control<twin::Order::increasing> INC_ORDER{};
inline constexpr twin::Control<twin::Order::decreasing> DEC_ORDER{};
inline constexpr twin::Control<twin::Position::lowest> POS_LOWEST{};
inline constexpr twin::Control<twin::Position::highest> POS_HIGHEST{};
inline constexpr twin::Control<twin::Bin::n0> Bin_N0{};
inline constexpr twin::Control<twin::Bin::n1> Bin_N1{};
inline constexpr twin::Control<twin::Post::update> POST_UPDATE{};
