// Predicates: made from patterns and counts, combined, packed, moved to and from data registers.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg, one document per intrinsic and named like it.
#pragma once

#include "registers.h"

// asc_create_mask.md: the patterns, with the numbers of the compiler's enumeration as far as they are public.
enum twin_pattern : int {
  PAT_ALL, PAT_VL1, PAT_VL2, PAT_VL3, PAT_VL4, PAT_VL8, PAT_VL16, PAT_VL32, PAT_VL64, PAT_VL128,
  PAT_M3, PAT_M4, PAT_H, PAT_Q, PAT_ALLF = 15,
};

namespace twin {

template <size_t Bytes, class Choose>
TWIN_LANE Predicate make_mask(Choose choose) {
  Predicate out;
  std::memset(out.bit, 0, sizeof out.bit);
  for (size_t lane = 0; lane < kVectorBytes / Bytes; ++lane) out.bit[lane * Bytes] = choose(lane);
  mark_written(out);
  return out;
}

template <size_t Bytes>
TWIN_OP Predicate pattern_mask(twin_pattern pattern) {
  constexpr size_t lanes = kVectorBytes / Bytes;
  constexpr size_t counts[] = {lanes, 1, 2, 3, 4, 8, 16, 32, 64, 128};
  const size_t first = pattern <= PAT_VL128 ? counts[pattern] : pattern == PAT_H ? lanes / 2 : pattern == PAT_Q ? lanes / 4 : 0;
  const size_t step = pattern == PAT_M3 ? 3 : pattern == PAT_M4 ? 4 : 0;
  return make_mask<Bytes>([=](size_t lane) TWIN_LAMBDA { return lane < first || (step && lane % step == 0); });
}

template <size_t Bytes>
TWIN_OP Predicate count_mask(uint32_t& value) {
  constexpr uint32_t lanes = kVectorBytes / Bytes;
  const uint32_t active = value < lanes ? value : lanes;
  value -= active;
  return make_mask<Bytes>([=](size_t lane) TWIN_LAMBDA { return lane < active; });
}

/// One predicate from others, bit by bit. What `mask` leaves out is zero.
template <class Logic>
TWIN_OP void combine_masks(Predicate& dst, const Predicate& a, const Predicate& b, const Predicate& mask,
                           const char* what, Logic logic) {
  require_written(a, what);
  require_written(b, what);
  require_written(mask, what);
  for (int i = 0; i < kVectorBytes; ++i) dst.bit[i] = logic(a.bit[i], b.bit[i], mask.bit[i]);
  mark_written(dst);
}

}  // namespace twin

// asc_create_mask.md
#define TWIN_CREATE_MASK(Bits, Bytes)                                                                               \
  TWIN_OP vector_bool asc_create_mask_b##Bits(twin_pattern pattern) { return twin::pattern_mask<Bytes>(pattern); }  \
  TWIN_OP vector_bool pset_b##Bits(twin_pattern pattern) { return twin::pattern_mask<Bytes>(pattern); }             \
  TWIN_OP vector_bool pge_b##Bits(twin_pattern pattern) { return twin::pattern_mask<Bytes>(pattern); }              \
  /* asc_update_mask.md */                                                                                          \
  TWIN_OP vector_bool asc_update_mask_b##Bits(uint32_t& value) { return twin::count_mask<Bytes>(value); }           \
  TWIN_OP vector_bool plt_b##Bits(uint32_t& value, twin::Control<twin::Post::update>) { return twin::count_mask<Bytes>(value); }
TWIN_CREATE_MASK(8, 1)
TWIN_CREATE_MASK(16, 2)
TWIN_CREATE_MASK(32, 4)
#undef TWIN_CREATE_MASK

// asc_and.md, asc_or.md, asc_xor.md, asc_not.md, asc_select.md: the forms on predicates.
TWIN_OP void asc_and(vector_bool& dst, const vector_bool& src0, const vector_bool& src1, const vector_bool& mask) {
  twin::combine_masks(dst, src0, src1, mask, "asc_and", [](int a, int b, int m) TWIN_LAMBDA { return a & b & m; });
}
TWIN_OP void asc_or(vector_bool& dst, const vector_bool& src0, const vector_bool& src1, const vector_bool& mask) {
  twin::combine_masks(dst, src0, src1, mask, "asc_or", [](int a, int b, int m) TWIN_LAMBDA { return (a | b) & m; });
}
TWIN_OP void asc_xor(vector_bool& dst, const vector_bool& src0, const vector_bool& src1, const vector_bool& mask) {
  twin::combine_masks(dst, src0, src1, mask, "asc_xor", [](int a, int b, int m) TWIN_LAMBDA { return (a ^ b) & m; });
}
TWIN_OP void asc_not(vector_bool& dst, const vector_bool& src, const vector_bool& mask) {
  twin::combine_masks(dst, src, src, mask, "asc_not", [](int a, int, int m) TWIN_LAMBDA { return ~a & m & 1; });
}
TWIN_OP void asc_select(vector_bool& dst, const vector_bool& src0, const vector_bool& src1, const vector_bool& mask) {
  twin::combine_masks(dst, src0, src1, mask, "asc_select", [](int a, int b, int m) TWIN_LAMBDA { return m & 1 ? a : b; });
}

// asc_copy.md: predicate to predicate.
TWIN_OP void asc_copy(vector_bool& dst, const vector_bool& src, const vector_bool& mask) {
  twin::combine_masks(dst, src, src, mask, "asc_copy", [](int a, int, int m) TWIN_LAMBDA { return a & m; });
}
TWIN_OP void asc_copy(vector_bool& dst, const vector_bool& src) {
  twin::require_written(src, "asc_copy");
  dst = src;
}

namespace twin {

/// A block of a data register as a predicate: every bit repeated for the bits of one lane.
template <class Element>
TWIN_OP void mask_from_register(Predicate& dst, const Register<Element>& src, int part) {
  constexpr int repeat = sizeof(Element), blocks = 8 * repeat, bytes = kVectorBytes / blocks;
  require_written(src, "asc_copy");
  if (part < 0 || part >= blocks) fault("argument", "asc_copy", PIPE_V, 0, "part %d is not in [0, %d]", part, blocks - 1);
  const auto* block = reinterpret_cast<const uint8_t*>(src.lane) + part * bytes;
  Predicate out;
  for (int i = 0; i < kVectorBytes; ++i) out.bit[i] = block[i / repeat / 8] >> (i / repeat % 8) & 1;
  mark_written(out);
  dst = out;
}

template <int Repeat>
TWIN_OP Predicate mask_from_spr() {
  const uint64_t* mask = machine().core->mask;
  Predicate out;
  for (int i = 0; i < kVectorBytes; ++i) out.bit[i] = mask[i / Repeat / 64] >> (i / Repeat % 64) & 1;
  mark_written(out);
  return out;
}

/// Interleave (or its inverse) two predicates by groups of bits, one group a lane.
template <int Group>
TWIN_OP void interleave_masks(Predicate& dst0, Predicate& dst1, const Predicate& src0, const Predicate& src1, bool apart,
                              const char* what) {
  require_written(src0, what);
  require_written(src1, what);
  uint8_t in[2 * kVectorBytes], out[2 * kVectorBytes];
  std::memcpy(in, src0.bit, kVectorBytes);
  std::memcpy(in + kVectorBytes, src1.bit, kVectorBytes);
  constexpr int lanes = kVectorBytes / Group;
  for (int i = 0; i < lanes; ++i) {
    for (int half = 0; half < 2; ++half) {
      const int together = (2 * i + half) * Group, split = (half * lanes + i) * Group;
      std::memcpy(out + (apart ? split : together), in + (apart ? together : split), Group);
    }
  }
  std::memcpy(dst0.bit, out, kVectorBytes);
  std::memcpy(dst1.bit, out + kVectorBytes, kVectorBytes);
  mark_written(dst0);
  mark_written(dst1);
}

/// Every second bit into one half; the other half is zero.
TWIN_OP void pack_mask(Predicate& dst, const Predicate& src, bool high, const char* what) {
  require_written(src, what);
  uint8_t out[kVectorBytes] = {};
  for (int i = 0; i < kVectorBytes / 2; ++i) out[i + (high ? kVectorBytes / 2 : 0)] = src.bit[2 * i];
  std::memcpy(dst.bit, out, sizeof out);
  mark_written(dst);
}

/// Every bit of one half, followed by a zero.
TWIN_OP void unpack_mask(Predicate& dst, const Predicate& src, bool high, const char* what) {
  require_written(src, what);
  uint8_t out[kVectorBytes] = {};
  for (int i = 0; i < kVectorBytes / 2; ++i) out[2 * i] = src.bit[i + (high ? kVectorBytes / 2 : 0)];
  std::memcpy(dst.bit, out, sizeof out);
  mark_written(dst);
}

}  // namespace twin

// asc_copy.md: data register to predicate.
TWIN_OP void asc_copy(vector_bool& dst, const vector_u16& src, int16_t part) { twin::mask_from_register(dst, src, part); }
TWIN_OP void asc_copy(vector_bool& dst, const vector_u32& src, int16_t part) { twin::mask_from_register(dst, src, part); }

// asc_get_mask_spr.md
TWIN_OP vector_bool asc_get_mask_spr_b16() { return twin::mask_from_spr<2>(); }
TWIN_OP vector_bool asc_get_mask_spr_b32() { return twin::mask_from_spr<4>(); }

// asc_intlv.md, asc_deintlv.md: the forms on predicates.
#define TWIN_INTERLEAVE_MASK(Bits, Group)                                                                             \
  TWIN_OP void asc_intlv_b##Bits(vector_bool& dst0, vector_bool& dst1, const vector_bool& src0, const vector_bool& src1) { \
    twin::interleave_masks<Group>(dst0, dst1, src0, src1, false, "asc_intlv_b" #Bits);                                \
  }                                                                                                                   \
  TWIN_OP void asc_deintlv_b##Bits(vector_bool& dst0, vector_bool& dst1, const vector_bool& src0,                     \
                                   const vector_bool& src1) {                                                         \
    twin::interleave_masks<Group>(dst0, dst1, src0, src1, true, "asc_deintlv_b" #Bits);                               \
  }
TWIN_INTERLEAVE_MASK(8, 1)
TWIN_INTERLEAVE_MASK(16, 2)
TWIN_INTERLEAVE_MASK(32, 4)
#undef TWIN_INTERLEAVE_MASK

// asc_pack_to_low.md, asc_pack_to_high.md, asc_pack_deprecated.md, asc_unpack.md: the forms on predicates.
TWIN_OP void asc_pack_to_low(vector_bool& dst, const vector_bool& src) { twin::pack_mask(dst, src, false, "asc_pack_to_low"); }
TWIN_OP void asc_pack_to_high(vector_bool& dst, const vector_bool& src) { twin::pack_mask(dst, src, true, "asc_pack_to_high"); }
TWIN_OP void asc_pack(vector_bool& dst, const vector_bool& src) { twin::pack_mask(dst, src, false, "asc_pack"); }
TWIN_OP void asc_pack_v2(vector_bool& dst, const vector_bool& src) { twin::pack_mask(dst, src, true, "asc_pack_v2"); }
TWIN_OP void asc_unpack_lower(vector_bool& dst, const vector_bool& src) { twin::unpack_mask(dst, src, false, "asc_unpack_lower"); }
TWIN_OP void asc_unpack_upper(vector_bool& dst, const vector_bool& src) { twin::unpack_mask(dst, src, true, "asc_unpack_upper"); }
