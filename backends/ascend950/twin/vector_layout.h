// Lanes moved about within registers: fills, ramps, interleaving, packing, squeezing; and byte histograms.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg: data_fill, index_operate, data_rearrange, data_compress,
// compare_and_select (squeeze), histogram_compute; a document per intrinsic and named like it.
#pragma once

#include "vector_lanes.h"

// asc_duplicate_scalar.md; the type lists are those of include/c_api/reg_compute/reg_vector.h
template <class Element>
  requires twin::one_of<Element, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, half, bfloat16_t, float,
                        float8_e4m3_t, float8_e5m2_t>
TWIN_OP void asc_duplicate_scalar(twin::Register<Element>& dst, std::type_identity_t<Element> value, const vector_bool& mask) {
  twin::for_lanes(dst, mask, "asc_duplicate_scalar", [=](int) TWIN_LAMBDA { return value; });
}
template <class Element>
  requires twin::one_of<Element, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t, half, bfloat16_t, float,
                        float8_e4m3_t, float8_e5m2_t, float8_e8m0_t>
TWIN_OP void asc_duplicate_scalar(twin::Register<Element>& dst, std::type_identity_t<Element> value) {
  twin::count_instruction();
  for (auto& lane : dst.lane) lane = value;
  twin::mark_written(dst);
}

namespace twin {
template <class Element>
TWIN_OP void duplicate(Register<Element>& dst, const Register<Element>& src, const Predicate& mask, int from, const char* what) {
  require_written(src, what);
  const Element value = src.lane[from];
  for_lanes(dst, mask, what, [=](int) TWIN_LAMBDA { return value; });
}
}  // namespace twin

// asc_duplicate.md: the lowest lane everywhere. The highest: TileLang 0.1.15, simd_inst.h (POS_HIGHEST of vdup)
template <class Element>
TWIN_OP void asc_duplicate(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::duplicate(dst, src, mask, 0, "asc_duplicate");
}
template <class Element>
TWIN_OP void asc_duplicate_highest(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::duplicate(dst, src, mask, twin::Register<Element>::lanes - 1, "asc_duplicate_highest");
}

namespace twin {
template <class Element>
TWIN_OP void ramp(Register<Element>& dst, Element value, bool descending) {
  count_instruction();
  constexpr int lanes = Register<Element>::lanes;
  for (int i = 0; i < lanes; ++i) {
    const int step = descending ? lanes - 1 - i : i;
    if constexpr (std::is_integral_v<Element>) {
      dst.lane[i] = static_cast<Element>(wide(value) + static_cast<uint64_t>(step));  // wraps
    } else {
      dst.lane[i] = static_cast<Element>(static_cast<float>(value) + static_cast<float>(step));
    }
  }
  mark_written(dst);
}
}  // namespace twin

// asc_arange.md: value, value + 1, ... ; descending ends at value
template <class Element>
  requires twin::one_of<Element, int8_t, int16_t, int32_t, half, float>
TWIN_OP void asc_arange(twin::Register<Element>& dst, std::type_identity_t<Element> value) {
  twin::ramp<Element>(dst, value, false);
}
template <class Element>
  requires twin::one_of<Element, int8_t, int16_t, int32_t, half, float>
TWIN_OP void asc_arange_descend(twin::Register<Element>& dst, std::type_identity_t<Element> value) {
  twin::ramp<Element>(dst, value, true);
}

namespace twin {
template <class Element>
TWIN_OP void interleave(Register<Element>& dst0, Register<Element>& dst1, const Register<Element>& src0,
                        const Register<Element>& src1, bool apart, const char* what) {
  require_written(src0, what);
  require_written(src1, what);
  if (&dst0 == &dst1) fault("argument", what, PIPE_V, 0, "both results go to one register");
  count_instruction();
  constexpr int lanes = Register<Element>::lanes;
  Element in[2 * lanes], out[2 * lanes];
  std::memcpy(in, src0.lane, kVectorBytes);
  std::memcpy(in + lanes, src1.lane, kVectorBytes);
  for (int i = 0; i < lanes; ++i) {
    for (int side = 0; side < 2; ++side) {
      const int together = 2 * i + side, split = side * lanes + i;
      out[apart ? split : together] = in[apart ? together : split];
    }
  }
  std::memcpy(dst0.lane, out, kVectorBytes);
  std::memcpy(dst1.lane, out + lanes, kVectorBytes);
  mark_written(dst0);
  mark_written(dst1);
}
}  // namespace twin

// asc_intlv.md, asc_deintlv.md
template <class Element>
  requires(sizeof(Element) <= 4)
TWIN_OP void asc_intlv(twin::Register<Element>& dst0, twin::Register<Element>& dst1, const twin::Register<Element>& src0,
                       const twin::Register<Element>& src1) {
  twin::interleave(dst0, dst1, src0, src1, false, "asc_intlv");
}
template <class Element>
  requires(sizeof(Element) <= 4)
TWIN_OP void asc_deintlv(twin::Register<Element>& dst0, twin::Register<Element>& dst1, const twin::Register<Element>& src0,
                         const twin::Register<Element>& src1) {
  twin::interleave(dst0, dst1, src0, src1, true, "asc_deintlv");
}

namespace twin {
/// The low half of every lane, into one half of the register; the other half is zero.
template <class To, class From>
TWIN_OP void pack(Register<To>& dst, const Register<From>& src, bool high, const char* what) {
  static_assert(sizeof(From) == 2 * sizeof(To));
  require_written(src, what);
  count_instruction();
  constexpr int lanes = Register<From>::lanes;
  Register<To> out;
  std::memset(out.lane, 0, sizeof out.lane);
  for (int i = 0; i < lanes; ++i) out.lane[i + (high ? lanes : 0)] = static_cast<To>(src.lane[i]);
  std::memcpy(dst.lane, out.lane, sizeof out.lane);
  mark_written(dst);
}
/// Every lane of one half, as wide as two: with its sign, or zeros.
template <class To, class From>
TWIN_OP void unpack(Register<To>& dst, const Register<From>& src, bool high, const char* what) {
  require_written(src, what);
  count_instruction();
  constexpr int lanes = Register<To>::lanes;
  Register<To> out;
  for (int i = 0; i < lanes; ++i) out.lane[i] = static_cast<To>(src.lane[i + (high ? lanes : 0)]);
  std::memcpy(dst.lane, out.lane, sizeof out.lane);
  mark_written(dst);
}
}  // namespace twin

// asc_pack_to_low.md, asc_pack_to_high.md, asc_pack_deprecated.md
#define TWIN_PACK(Name, High)                                                                             \
  template <class From>                                                                                   \
    requires twin::one_of<From, int16_t, uint16_t>                                                        \
  TWIN_OP void Name(vector_u8& dst, const twin::Register<From>& src) { twin::pack(dst, src, High, #Name); } \
  template <class From>                                                                                   \
    requires twin::one_of<From, int32_t, uint32_t>                                                        \
  TWIN_OP void Name(vector_u16& dst, const twin::Register<From>& src) { twin::pack(dst, src, High, #Name); }
TWIN_PACK(asc_pack_to_low, false)
TWIN_PACK(asc_pack_to_high, true)
TWIN_PACK(asc_pack, false)
TWIN_PACK(asc_pack_v2, true)
#undef TWIN_PACK

// asc_unpack.md
#define TWIN_UNPACK(Name, High)                                                                  \
  TWIN_OP void Name(vector_u16& dst, const vector_u8& src) { twin::unpack(dst, src, High, #Name); }  \
  TWIN_OP void Name(vector_s16& dst, const vector_s8& src) { twin::unpack(dst, src, High, #Name); }  \
  TWIN_OP void Name(vector_u32& dst, const vector_u16& src) { twin::unpack(dst, src, High, #Name); } \
  TWIN_OP void Name(vector_s32& dst, const vector_s16& src) { twin::unpack(dst, src, High, #Name); }
TWIN_UNPACK(asc_unpack_lower, false)
TWIN_UNPACK(asc_unpack_upper, true)
#undef TWIN_UNPACK

namespace twin {
/// Active lanes moved to the low end, zeros behind them; how many there were.
template <class Element>
TWIN_OP int squeeze(Register<Element>& dst, const Register<Element>& src, const Predicate& mask, const char* what) {
  require_written(src, what);
  require_written(mask, what);
  count_instruction();
  Register<Element> out;
  std::memset(out.lane, 0, sizeof out.lane);
  int kept = 0;
  const auto* active = mask.of<Element>();
  for (int i = 0; i < Register<Element>::lanes; ++i) {
    if (active[i] & 1) out.lane[kept++] = src.lane[i];
  }
  std::memcpy(dst.lane, out.lane, sizeof out.lane);
  mark_written(dst);
  return kept;
}
template <class Element>
TWIN_OP void squeeze_with_status(Register<Element>& dst, const Register<Element>& src, const Predicate& mask, const char* what) {
  Core& core = *machine().core;
  core.squeezed_last = squeeze(dst, src, mask, what) * static_cast<int64_t>(sizeof(Element));
  core.squeezed_bytes += core.squeezed_last;
}
}  // namespace twin

// asc_squeeze.md, asc_squeeze_with_status.md, asc_squeeze_deprecated.md, asc_clear_ar_spr.md, asc_get_squeeze_status.md
template <class Element>
TWIN_OP void asc_squeeze(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::squeeze(dst, src, mask, "asc_squeeze");
}
template <class Element>
TWIN_OP void asc_squeeze_with_status(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::squeeze_with_status(dst, src, mask, "asc_squeeze_with_status");
}
template <class Element>
TWIN_OP void asc_squeeze_v2(twin::Register<Element>& dst, const twin::Register<Element>& src, const vector_bool& mask) {
  twin::squeeze_with_status(dst, src, mask, "asc_squeeze_v2");
}
TWIN_OP void asc_clear_ar_spr() { twin::machine().core->squeezed_bytes = twin::machine().core->squeezed_last = 0; }
TWIN_OP int64_t asc_get_squeeze_status() { return twin::machine().core->squeezed_bytes; }

// asc_unsqueeze.md: lane i holds how many lanes below it are active
template <class Element>
  requires twin::one_of<Element, int8_t, uint8_t, int16_t, uint16_t, int32_t, uint32_t>
TWIN_OP void asc_unsqueeze(twin::Register<Element>& dst, const vector_bool& mask) {
  twin::require_written(mask, "asc_unsqueeze");
  twin::count_instruction();
  int before = 0;
  for (int i = 0; i < twin::Register<Element>::lanes; ++i) {
    dst.lane[i] = static_cast<Element>(before);
    before += mask.at<Element>(i);
  }
  twin::mark_written(dst);
}

namespace twin {
/// Counts of the values first..first + 127 of the active bytes, added to what `dst` holds.
TWIN_OP void histogram(vector_u16& dst, const vector_u8& src, const Predicate& mask, int first, bool cumulative, const char* what) {
  require_written(dst, what);
  require_written(src, what);
  require_written(mask, what);
  count_instruction();
  int counts[256] = {};
  for (int i = 0; i < kVectorBytes; ++i) counts[src.lane[i]] += mask.bit[i] & 1;
  int below = 0;  // cumulative counts start at value 0, also in the upper half
  for (int value = 0; value < 256; ++value) {
    below += counts[value];
    if (value < first || value >= first + 128) continue;
    dst.lane[value - first] = static_cast<uint16_t>(dst.lane[value - first] + (cumulative ? below : counts[value]));
  }
}
}  // namespace twin

// asc_frequency_histogram.md, asc_cumulative_histogram.md
TWIN_OP void asc_frequency_histogram_bin0(vector_u16& dst, const vector_u8& src, const vector_bool& mask) {
  twin::histogram(dst, src, mask, 0, false, "asc_frequency_histogram_bin0");
}
TWIN_OP void asc_frequency_histogram_bin1(vector_u16& dst, const vector_u8& src, const vector_bool& mask) {
  twin::histogram(dst, src, mask, 128, false, "asc_frequency_histogram_bin1");
}
TWIN_OP void asc_cumulative_histogram_bin0(vector_u16& dst, const vector_u8& src, const vector_bool& mask) {
  twin::histogram(dst, src, mask, 0, true, "asc_cumulative_histogram_bin0");
}
TWIN_OP void asc_cumulative_histogram_bin1(vector_u16& dst, const vector_u8& src, const vector_bool& mask) {
  twin::histogram(dst, src, mask, 128, true, "asc_cumulative_histogram_bin1");
}
