// Loads from the unified buffer into registers, one per distribution, and gathers.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg/reg_load, a document per intrinsic and named like it; alignment is
// that of table 3 of 基础API/Reg矢量计算/Reg数据搬入/连续对齐搬入（LoadAlign）.md. Offsets count elements.
#pragma once

#include "vector_hazard.h"
#include "vector_lanes.h"
#include "vector_mask.h"

namespace twin {

/// Bytes of the unified buffer for a vector load.
TWIN_OP const uint8_t* load_bytes(const void* pointer, size_t bytes, size_t align, const char* what) {
  require_vector_function(what);
  const uint8_t* place = ub(pointer, bytes, PIPE_V, Access::read, what, align);
  require_stored_before(pointer, bytes, what);
  return place;
}

// Each distribution: what it reads, and where a lane comes from. `Element` is what the register holds.
enum class Spread { whole, element, block, element_to_block, double_up, every_second, unpack, unpack_quarter };

template <Spread How, class Element>
TWIN_OP void load(Register<Element>& dst, const Element* src, const char* what) {
  constexpr size_t size = sizeof(Element);
  constexpr int lanes = Register<Element>::lanes;
  constexpr size_t bytes = How == Spread::whole              ? kVectorBytes
                           : How == Spread::element          ? size
                           : How == Spread::block            ? 32
                           : How == Spread::element_to_block ? 8 * size
                           : How == Spread::double_up        ? kVectorBytes / 2
                           : How == Spread::every_second     ? 2 * kVectorBytes
                           : How == Spread::unpack           ? kVectorBytes / 2
                                                             : kVectorBytes / 4;
  constexpr size_t align = How == Spread::element ? size : How == Spread::element_to_block ? 8 * size : 32;
  issue(PIPE_V, bytes);
  const uint8_t* in = load_bytes(src, bytes, align, what);
  if constexpr (How == Spread::whole) {
    std::memcpy(dst.lane, in, kVectorBytes);
  } else if constexpr (How == Spread::unpack || How == Spread::unpack_quarter) {
    constexpr int room = How == Spread::unpack ? 2 : 4;  // each element, then zeros
    auto* out = reinterpret_cast<uint8_t*>(dst.lane);
    std::memset(out, 0, kVectorBytes);
    for (int i = 0; i < lanes / room; ++i) std::memcpy(out + i * room * size, in + i * size, size);
  } else {
    for (int i = 0; i < lanes; ++i) {
      int from = 0;
      if constexpr (How == Spread::block) from = i % (32 / static_cast<int>(size));
      if constexpr (How == Spread::element_to_block) from = i / (32 / static_cast<int>(size));
      if constexpr (How == Spread::double_up) from = i / 2;
      if constexpr (How == Spread::every_second) from = 2 * i;
      std::memcpy(&dst.lane[i], in + from * size, size);
    }
  }
  mark_written(dst);
}

template <class Element>
TWIN_OP void load_apart(Register<Element>& dst0, Register<Element>& dst1, const Element* src, const char* what) {
  issue(PIPE_V, 2 * kVectorBytes);
  const uint8_t* in = load_bytes(src, 2 * kVectorBytes, 32, what);
  for (int i = 0; i < Register<Element>::lanes; ++i) {
    std::memcpy(&dst0.lane[i], in + 2 * i * sizeof(Element), sizeof(Element));
    std::memcpy(&dst1.lane[i], in + (2 * i + 1) * sizeof(Element), sizeof(Element));
  }
  mark_written(dst0);
  mark_written(dst1);
}

/// Eight blocks of 32 bytes, `stride` blocks from head to head. A block without an active lane is not touched.
template <class Element>
TWIN_OP void load_blocks(Register<Element>& dst, const Element* src, int stride, const Predicate& mask, const char* what) {
  constexpr int per_block = 32 / sizeof(Element);
  require_written(mask, what);
  issue(PIPE_V, kVectorBytes);
  const auto* active = mask.of<Element>();
  for (int block = 0; block < 8; ++block) {
    const uint8_t* in = nullptr;
    for (int i = block * per_block; i < (block + 1) * per_block; ++i) {
      dst.lane[i] = Element{};
      if (!(active[i] & 1)) continue;
      if (!in) in = load_bytes(reinterpret_cast<const uint8_t*>(src) + static_cast<ptrdiff_t>(block) * stride * 32, 32, 32, what);
      std::memcpy(&dst.lane[i], in + (i % per_block) * sizeof(Element), sizeof(Element));
    }
  }
  mark_written(dst);
}

template <class Element>
concept loadable = sizeof(Element) <= 8;
template <class Element>
concept narrow = sizeof(Element) <= 4;
template <class Element>
concept byte_or_half = sizeof(Element) <= 2;
template <class Element>
concept half_or_word = sizeof(Element) == 2 || sizeof(Element) == 4;
template <class Element>
concept single_byte = sizeof(Element) == 1;

}  // namespace twin

// A distribution in its four forms: at the pointer, at an offset, at an address register, and moving the pointer on.
#define TWIN_LOAD(Name, PostName, How, Which)                                                             \
  template <twin::Which Element>                                                                          \
  TWIN_OP void Name(twin::Register<Element>& dst, const Element* src) {                                   \
    twin::load<twin::Spread::How>(dst, src, #Name);                                                       \
  }                                                                                                       \
  template <twin::Which Element>                                                                          \
  TWIN_OP void Name(twin::Register<Element>& dst, const Element* src, int32_t offset) {                   \
    twin::load<twin::Spread::How>(dst, src + offset, #Name);                                              \
  }                                                                                                       \
  template <twin::Which Element>                                                                          \
  TWIN_OP void Name(twin::Register<Element>&, const Element*, addr_reg) {                                 \
    twin::refuse_address_register(#Name);                                                                 \
  }                                                                                                       \
  template <twin::Which Element>                                                                          \
  TWIN_OP void PostName(twin::Register<Element>& dst, Element*& src, int32_t offset) {                    \
    twin::load<twin::Spread::How>(dst, src, #PostName);                                                   \
    src += offset;                                                                                        \
  }

TWIN_LOAD(asc_loadalign, asc_loadalign_postupdate, whole, loadable)
TWIN_LOAD(asc_loadalign_brc_elem, asc_loadalign_brc_elem_postupdate, element, narrow)
TWIN_LOAD(asc_loadalign_brc_datablock, asc_loadalign_brc_datablock_postupdate, block, narrow)
TWIN_LOAD(asc_loadalign_brc_elem2datablock, asc_loadalign_brc_elem2datablock_postupdate, element_to_block, half_or_word)
TWIN_LOAD(asc_loadalign_upsample, asc_loadalign_upsample_postupdate, double_up, byte_or_half)
TWIN_LOAD(asc_loadalign_downsample, asc_loadalign_downsample_postupdate, every_second, byte_or_half)
TWIN_LOAD(asc_loadalign_unpack, asc_loadalign_unpack_postupdate, unpack, narrow)
TWIN_LOAD(asc_loadalign_unpack4, asc_loadalign_unpack4_postupdate, unpack_quarter, single_byte)
// asc_loadalign_v1_deprecated.md and the following: older names of the same
TWIN_LOAD(asc_loadalign_brc, asc_loadalign_brc_postupdate, element, narrow)
TWIN_LOAD(asc_loadalign_brc_v2, asc_loadalign_brc_postupdate_v2, block, narrow)
TWIN_LOAD(asc_loadalign_brc_v3, asc_loadalign_brc_postupdate_v3, element_to_block, half_or_word)
TWIN_LOAD(asc_loadalign_unpack_v2, asc_loadalign_unpack_postupdate_v2, unpack_quarter, single_byte)
#undef TWIN_LOAD

// asc_load.md: 256 bytes from any address that suits the element
template <class Element>
TWIN_OP void asc_load(twin::Register<Element>& dst, const Element* src) {
  twin::issue(PIPE_V, twin::kVectorBytes);
  std::memcpy(dst.lane, twin::load_bytes(src, twin::kVectorBytes, sizeof(Element), "asc_load"), twin::kVectorBytes);
  twin::mark_written(dst);
}

// asc_loadalign_deintlv.md
template <twin::narrow Element>
TWIN_OP void asc_loadalign_deintlv(twin::Register<Element>& dst0, twin::Register<Element>& dst1, const Element* src,
                                   int32_t offset = 0) {
  twin::load_apart(dst0, dst1, src + offset, "asc_loadalign_deintlv");
}
template <twin::narrow Element>
TWIN_OP void asc_loadalign_deintlv(twin::Register<Element>&, twin::Register<Element>&, const Element*, addr_reg) {
  twin::refuse_address_register("asc_loadalign_deintlv");
}
template <twin::narrow Element>
TWIN_OP void asc_loadalign_deintlv_postupdate(twin::Register<Element>& dst0, twin::Register<Element>& dst1, Element*& src,
                                              int32_t offset) {
  twin::load_apart(dst0, dst1, src, "asc_loadalign_deintlv_postupdate");
  src += offset;
}

// asc_loadalign_v6_deprecated.md, 非连续对齐搬入（LoadAlign）.md: strides in blocks of 32 bytes
template <class Element>
TWIN_OP void asc_loadalign(twin::Register<Element>& dst, const Element* src, uint16_t block_stride, uint16_t repeat_stride,
                           const vector_bool& mask) {
  twin::load_blocks(dst, src + repeat_stride * (32 / sizeof(Element)), block_stride, mask, "asc_loadalign");
}
template <class Element>
TWIN_OP void asc_loadalign_postupdate(twin::Register<Element>& dst, Element*& src, uint16_t block_stride,
                                      uint16_t repeat_stride, const vector_bool& mask) {
  twin::load_blocks(dst, src, block_stride, mask, "asc_loadalign_postupdate");
  src += repeat_stride * (32 / sizeof(Element));
}

namespace twin {

enum class MaskSpread { whole, double_up, every_second };

/// A predicate from bits in memory; offsets of predicates count bytes (data_type_definition.md).
template <MaskSpread How>
TWIN_OP void load_mask(Predicate& dst, const void* src, int32_t offset, const char* what) {
  constexpr size_t bytes = How == MaskSpread::whole ? 32 : How == MaskSpread::double_up ? 16 : 64;
  constexpr size_t align = How == MaskSpread::double_up ? 16 : 32;
  issue(PIPE_V, bytes);
  const uint8_t* in = load_bytes(static_cast<const uint8_t*>(src) + offset, bytes, align, what);
  Predicate out;
  for (int i = 0; i < kVectorBytes; ++i) {
    const int from = How == MaskSpread::whole ? i : How == MaskSpread::double_up ? i / 2 : 2 * i;
    out.bit[i] = in[from / 8] >> (from % 8) & 1;
  }
  mark_written(out);
  dst = out;
}

template <class Pointee>
TWIN_LANE void move_bytes(Pointee*& pointer, int32_t bytes) {
  pointer = reinterpret_cast<Pointee*>(reinterpret_cast<uintptr_t>(pointer) + static_cast<intptr_t>(bytes));
}

}  // namespace twin

// asc_loadalign.md, asc_loadalign_upsample.md, asc_loadalign_downsample.md: the forms on predicates
#define TWIN_LOAD_MASK(Name, PostName, How)                                                               \
  template <class Pointee>                                                                                \
  TWIN_OP void Name(vector_bool& dst, const Pointee* src, int32_t offset = 0) {                           \
    twin::load_mask<twin::MaskSpread::How>(dst, src, offset, #Name);                                      \
  }                                                                                                       \
  template <class Pointee>                                                                                \
  TWIN_OP void Name(vector_bool&, const Pointee*, addr_reg) {                                             \
    twin::refuse_address_register(#Name);                                                                 \
  }                                                                                                       \
  template <class Pointee>                                                                                \
  TWIN_OP void PostName(vector_bool& dst, Pointee*& src, int32_t offset) {                                \
    twin::load_mask<twin::MaskSpread::How>(dst, src, 0, #PostName);                                       \
    twin::move_bytes(src, offset);                                                                        \
  }
TWIN_LOAD_MASK(asc_loadalign, asc_loadalign_postupdate, whole)
TWIN_LOAD_MASK(asc_loadalign_upsample, asc_loadalign_upsample_postupdate, double_up)
TWIN_LOAD_MASK(asc_loadalign_downsample, asc_loadalign_downsample_postupdate, every_second)
#undef TWIN_LOAD_MASK

namespace twin {

/// Elements at `src + index`; an 8-bit element fills the low byte of a 16-bit lane. `Lane` is what the index addresses.
template <class Lane, class Element, class Dst, class Index>
TWIN_OP void gather(Register<Dst>& dst, const Element* src, const Register<Index>& index, const Predicate& mask) {
  static_assert(sizeof(Lane) == sizeof(Index));
  const char* what = "asc_gather";
  require_written(index, what);
  require_written(mask, what);
  issue(PIPE_V, kVectorBytes);
  const Memory& memory = ub_of(machine().core->index - 1);
  if (const_cast<Memory&>(memory).offset_of(src) % 32) {
    fault("alignment", what, PIPE_V, reinterpret_cast<uintptr_t>(src), "the base is not a multiple of 32");
  }
  const auto* active = mask.of<Lane>();
  uint8_t out[kVectorBytes] = {};
  for (int i = 0; i < Register<Index>::lanes; ++i) {
    if (active[i] & 1) std::memcpy(out + i * sizeof(Lane), load_bytes(src + index.lane[i], sizeof(Element), 1, what), sizeof(Element));
  }
  std::memcpy(dst.lane, out, kVectorBytes);
  mark_written(dst);
}

}  // namespace twin

// asc_gather.md: from the unified buffer
template <class Element>
  requires twin::one_of<Element, int16_t, uint16_t, half, bfloat16_t>
TWIN_OP void asc_gather(twin::Register<Element>& dst, const Element* src, const vector_u16& index, const vector_bool& mask) {
  twin::gather<Element>(dst, src, index, mask);
}
template <class Element>
  requires twin::one_of<Element, int32_t, uint32_t, float>
TWIN_OP void asc_gather(twin::Register<Element>& dst, const Element* src, const vector_u32& index, const vector_bool& mask) {
  twin::gather<Element>(dst, src, index, mask);
}
TWIN_OP void asc_gather(vector_s16& dst, const int8_t* src, const vector_u16& index, const vector_bool& mask) {
  twin::gather<uint16_t>(dst, src, index, mask);
}
TWIN_OP void asc_gather(vector_u16& dst, const uint8_t* src, const vector_u16& index, const vector_bool& mask) {
  twin::gather<uint16_t>(dst, src, index, mask);
}
template <class Element>
  requires twin::one_of<Element, float8_e4m3_t, float8_e5m2_t, float8_e8m0_t, hifloat8_t>
TWIN_OP void asc_gather(twin::Register<Element>& dst, const Element* src, const vector_u16& index, const vector_bool& mask) {
  twin::gather<uint16_t>(dst, src, index, mask);
}
template <class Element>
  requires twin::one_of<Element, int16_t, uint16_t, half, bfloat16_t>
TWIN_OP void asc_gather(twin::Register<Element>&, const Element*, const vector_u32&, const vector_bool&) {
  twin::fault("unsupported", "asc_gather", PIPE_V, 0, "no document says where 16-bit elements go under 32-bit indices");
}
// asc_gather.md: from a register, index modulo the number of lanes
template <class Element, class Index>
  requires(std::is_unsigned_v<Index> && sizeof(Index) == sizeof(Element) && sizeof(Element) <= 4)
TWIN_OP void asc_gather(twin::Register<Element>& dst, const twin::Register<Element>& src, const twin::Register<Index>& index) {
  twin::require_written(src, "asc_gather");
  twin::require_written(index, "asc_gather");
  twin::count_instruction();
  constexpr int lanes = twin::Register<Element>::lanes;
  twin::Register<Element> out;
  for (int i = 0; i < lanes; ++i) out.lane[i] = src.lane[index.lane[i] % lanes];
  twin::mark_written(out);
  dst = out;
}
// asc_gather_datablock.md, GatherB.md: byte offsets of eight blocks, under the first eight 32-bit lanes of the mask
template <class Element>
TWIN_OP void asc_gather_datablock(twin::Register<Element>& dst, const Element* src, const vector_u32& index,
                                  const vector_bool& mask) {
  twin::require_written(index, "asc_gather_datablock");
  twin::require_written(mask, "asc_gather_datablock");
  twin::issue(PIPE_V, twin::kVectorBytes);
  uint8_t out[twin::kVectorBytes] = {};
  for (int block = 0; block < 8; ++block) {
    if (!mask.at<uint32_t>(block)) continue;
    const auto* place = reinterpret_cast<const uint8_t*>(src) + index.lane[block];
    std::memcpy(out + 32 * block, twin::load_bytes(place, 32, 32, "asc_gather_datablock"), 32);
  }
  std::memcpy(dst.lane, out, sizeof out);
  twin::mark_written(dst);
}
template <class Element>
TWIN_OP void asc_gather_datablock(twin::Register<Element>& dst, const Element* src, const vector_u32& index) {
  asc_gather_datablock(dst, src, index, asc_create_mask_b32(PAT_ALL));
}
