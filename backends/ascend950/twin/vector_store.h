// Stores from registers to the unified buffer, one per distribution, and scatters.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg/reg_store, a document per intrinsic and named like it; alignment is
// that of table 3 of 基础API/Reg矢量计算/Reg数据搬出/连续对齐搬出（StoreAlign）.md. Offsets count elements of the pointer.
#pragma once

#include "vector_load.h"

namespace twin {

TWIN_OP void store_bytes(void* pointer, const void* from, size_t bytes, const char* what) {
  require_vector_function(what);
  std::memcpy(ub(pointer, bytes, PIPE_V, Access::write, what), from, bytes);
  remember_store(pointer, bytes);
}

TWIN_LANE void require_aligned([[maybe_unused]] const void* pointer, [[maybe_unused]] size_t align,
                               [[maybe_unused]] const char* what) {
#if TWIN_CHECKED
  if (on_cube()) fault("core", what, PIPE_V, 0, "a cube core has no unified buffer");
  const size_t offset = ub_of(machine().core->index - 1).offset_of(pointer);
  if (offset % align) fault("alignment", what, PIPE_V, offset, "UB+%zu is not a multiple of %zu", offset, align);
#endif
}

/// Active lanes only: each run of them is one write.
template <class Element>
TWIN_OP void store(Element* dst, const Register<Element>& src, const Predicate& mask, const char* what) {
  require_written(src, what);
  require_written(mask, what);
  require_aligned(dst, 32, what);
  const auto* active = mask.of<Element>();
  constexpr int lanes = Register<Element>::lanes;
  issue(PIPE_V, kVectorBytes);
  for (int i = 0; i < lanes;) {
    if (!(active[i] & 1)) {
      ++i;
      continue;
    }
    int end = i + 1;
    while (end < lanes && active[end] & 1) ++end;
    store_bytes(dst + i, src.lane + i, (end - i) * sizeof(Element), what);
    i = end;
  }
}

/// The low bytes of each active lane, one after another. Only masks of the form 1..10..0 are accepted: for others the
/// documents do not say whether a hole is kept or closed.
template <size_t Keep, class Element>
TWIN_OP void store_packed(Element* dst, const Register<Element>& src, const Predicate& mask, const char* what) {
  require_written(src, what);
  require_written(mask, what);
  require_aligned(dst, 32, what);
  issue(PIPE_V, kVectorBytes);
  uint8_t out[kVectorBytes];
  size_t count = 0;
  bool ended = false;
  const auto* active = mask.of<Element>();
  for (int i = 0; i < Register<Element>::lanes; ++i) {
    if (!(active[i] & 1)) {
      ended = true;
      continue;
    }
    if (ended) fault("argument", what, PIPE_V, 0, "packs under a mask with a hole before lane %d", i);
    std::memcpy(out + count, &src.lane[i], Keep);
    count += Keep;
  }
  if (count) store_bytes(dst, out, count, what);
}

template <class Element>
TWIN_OP void store_first(Element* dst, const Register<Element>& src, const char* what) {
  require_written(src, what);
  require_aligned(dst, sizeof(Element), what);
  issue(PIPE_V, sizeof(Element));
  store_bytes(dst, src.lane, sizeof(Element), what);
}

template <class Element>
TWIN_OP void store_together(Element* dst, const Register<Element>& src0, const Register<Element>& src1, const char* what) {
  require_written(src0, what);
  require_written(src1, what);
  require_aligned(dst, 32, what);
  issue(PIPE_V, 2 * kVectorBytes);
  Element out[2 * Register<Element>::lanes];
  for (int i = 0; i < Register<Element>::lanes; ++i) {
    out[2 * i] = src0.lane[i];
    out[2 * i + 1] = src1.lane[i];
  }
  store_bytes(dst, out, sizeof out, what);
}

/// Eight blocks of 32 bytes, `stride` blocks from head to head.
template <class Element>
TWIN_OP void store_blocks(Element* dst, const Register<Element>& src, int stride, const Predicate& mask, const char* what) {
  constexpr int per_block = 32 / sizeof(Element);
  require_written(src, what);
  require_written(mask, what);
  require_aligned(dst, 32, what);
  issue(PIPE_V, kVectorBytes);
  const auto* active = mask.of<Element>();
  for (int first = 0; first < Register<Element>::lanes; first += per_block) {
    Element* block = dst + static_cast<ptrdiff_t>(first / per_block) * stride * per_block;
    for (int i = 0; i < per_block;) {
      int end = i;
      while (end < per_block && active[first + end] & 1) ++end;
      if (end > i) store_bytes(block + i, &src.lane[first + i], (end - i) * sizeof(Element), what);
      i = end + 1;
    }
  }
}

}  // namespace twin

#define TWIN_STORE(Name, PostName, Call, Which)                                                                        \
  template <twin::Which Element>                                                                                       \
  TWIN_OP void Name(Element* dst, const twin::Register<Element>& src, const vector_bool& mask) {                       \
    twin::Call(dst, src, mask, #Name);                                                                                 \
  }                                                                                                                    \
  template <twin::Which Element>                                                                                       \
  TWIN_OP void Name(Element* dst, const twin::Register<Element>& src, int32_t offset, const vector_bool& mask) {       \
    twin::Call(dst + offset, src, mask, #Name);                                                                        \
  }                                                                                                                    \
  template <twin::Which Element>                                                                                       \
  TWIN_OP void Name(Element*, const twin::Register<Element>&, addr_reg, const vector_bool&) {                          \
    twin::refuse_address_register(#Name);                                                                              \
  }                                                                                                                    \
  template <twin::Which Element>                                                                                       \
  TWIN_OP void PostName(Element*& dst, const twin::Register<Element>& src, int32_t offset, const vector_bool& mask) {  \
    twin::Call(dst, src, mask, #PostName);                                                                             \
    dst += offset;                                                                                                     \
  }

namespace twin {
template <class Element>
concept wide_lane = sizeof(Element) >= 2 && std::is_same_v<Element, Element>;
template <class Element>
concept word = sizeof(Element) == 4;
template <class Element>
TWIN_LANE void store_half(Element* dst, const Register<Element>& src, const Predicate& mask, const char* what) {
  store_packed<sizeof(Element) / 2>(dst, src, mask, what);
}
template <class Element>
TWIN_LANE void store_quarter(Element* dst, const Register<Element>& src, const Predicate& mask, const char* what) {
  store_packed<1>(dst, src, mask, what);
}
}  // namespace twin

TWIN_STORE(asc_storealign, asc_storealign_postupdate, store, narrow)
TWIN_STORE(asc_storealign_pack, asc_storealign_pack_postupdate, store_half, wide_lane)
TWIN_STORE(asc_storealign_pack_quarter, asc_storealign_pack_quarter_postupdate, store_quarter, word)
// asc_storealign_v1_deprecated.md and the following: older names of the same
TWIN_STORE(asc_storealign_pack_v2, asc_storealign_pack_postupdate_v2, store_quarter, word)
#undef TWIN_STORE

// asc_storealign_1st.md: the lowest lane, whatever a mask says
template <twin::narrow Element>
TWIN_OP void asc_storealign_1st(Element* dst, const twin::Register<Element>& src, int32_t offset = 0) {
  twin::store_first(dst + offset, src, "asc_storealign_1st");
}
template <twin::narrow Element>
TWIN_OP void asc_storealign_1st(Element*, const twin::Register<Element>&, addr_reg) {
  twin::refuse_address_register("asc_storealign_1st");
}
template <twin::narrow Element>
TWIN_OP void asc_storealign_1st_postupdate(Element*& dst, const twin::Register<Element>& src, int32_t offset) {
  twin::store_first(dst, src, "asc_storealign_1st_postupdate");
  dst += offset;
}

// asc_storealign_intlv.md: lanes of two registers in turn, whatever a mask says
template <twin::narrow Element>
TWIN_OP void asc_storealign_intlv(Element* dst, const twin::Register<Element>& src0, const twin::Register<Element>& src1,
                                  int32_t offset = 0) {
  twin::store_together(dst + offset, src0, src1, "asc_storealign_intlv");
}
template <twin::narrow Element>
TWIN_OP void asc_storealign_intlv(Element*, const twin::Register<Element>&, const twin::Register<Element>&, addr_reg) {
  twin::refuse_address_register("asc_storealign_intlv");
}

// asc_storealign_v5_deprecated.md, 非连续对齐搬出（StoreAlign）.md: strides in blocks of 32 bytes
template <twin::narrow Element>
TWIN_OP void asc_storealign(Element* dst, const twin::Register<Element>& src, uint16_t block_stride, uint16_t repeat_stride,
                            const vector_bool& mask) {
  twin::store_blocks(dst + repeat_stride * (32 / sizeof(Element)), src, block_stride, mask, "asc_storealign");
}
template <twin::narrow Element>
TWIN_OP void asc_storealign_postupdate(Element*& dst, const twin::Register<Element>& src, uint16_t block_stride,
                                       uint16_t repeat_stride, const vector_bool& mask) {
  twin::store_blocks(dst, src, block_stride, mask, "asc_storealign_postupdate");
  dst += repeat_stride * (32 / sizeof(Element));
}

// asc_store.md: `count` lanes to any address that suits the element
template <class Element>
TWIN_OP void asc_store(Element* dst, const twin::Register<Element>& src, uint32_t count) {
  twin::require_written(src, "asc_store");
  twin::require_aligned(dst, sizeof(Element), "asc_store");
  if (count < 1 || count > static_cast<uint32_t>(src.lanes)) {
    twin::fault("argument", "asc_store", PIPE_V, 0, "%u lanes: not in [1, %d]", count, src.lanes);
  }
  twin::issue(PIPE_V, count * sizeof(Element));
  twin::store_bytes(dst, src.lane, count * sizeof(Element), "asc_store");
}
template <class Element>
TWIN_OP void asc_store(Element* dst, const twin::Register<Element>& src) {
  asc_store(dst, src, static_cast<uint32_t>(src.lanes));
}

namespace twin {

/// A predicate to memory: all bits, or every second one. Offsets count bytes.
template <bool Packed>
TWIN_OP void store_mask(void* dst, const Predicate& src, int32_t offset, const char* what) {
  constexpr int bits = Packed ? kVectorBytes / 2 : kVectorBytes;
  require_written(src, what);
  auto* place = static_cast<uint8_t*>(dst) + offset;
  require_aligned(place, bits / 8, what);
  issue(PIPE_V, bits / 8);
  uint8_t out[bits / 8] = {};
  for (int i = 0; i < bits; ++i) out[i / 8] |= static_cast<uint8_t>((src.bit[Packed ? 2 * i : i] & 1) << (i % 8));
  store_bytes(place, out, sizeof out, what);
}

}  // namespace twin

// asc_storealign.md, asc_storealign_pack.md: the forms on predicates
#define TWIN_STORE_MASK(Name, PostName, Packed)                                               \
  template <class Pointee>                                                                    \
  TWIN_OP void Name(Pointee* dst, const vector_bool& src, int32_t offset = 0) {               \
    twin::store_mask<Packed>(dst, src, offset, #Name);                                        \
  }                                                                                           \
  template <class Pointee>                                                                    \
  TWIN_OP void Name(Pointee*, const vector_bool&, addr_reg) {                                 \
    twin::refuse_address_register(#Name);                                                     \
  }                                                                                           \
  template <class Pointee>                                                                    \
  TWIN_OP void PostName(Pointee*& dst, const vector_bool& src, int32_t offset) {              \
    twin::store_mask<Packed>(dst, src, 0, #PostName);                                         \
    twin::move_bytes(dst, offset);                                                            \
  }
TWIN_STORE_MASK(asc_storealign, asc_storealign_postupdate, false)
TWIN_STORE_MASK(asc_storealign_pack, asc_storealign_pack_postupdate, true)
#undef TWIN_STORE_MASK

// asc_scatter.md: one lane an index; of 8-bit registers the even lanes. Two equal indices are a fault.
template <twin::narrow Element, class Index>
  requires(sizeof(Index) == (sizeof(Element) == 4 ? 4 : 2) && std::is_unsigned_v<Index>)
TWIN_OP void asc_scatter(Element* dst, const twin::Register<Element>& src, const twin::Register<Index>& index,
                         const vector_bool& mask) {
  const char* what = "asc_scatter";
  twin::require_written(src, what);
  twin::require_written(index, what);
  twin::require_written(mask, what);
  twin::require_aligned(dst, 32, what);
  twin::issue(PIPE_V, twin::kVectorBytes);
  constexpr int step = sizeof(Index) / sizeof(Element);
  for (int i = 0; i < twin::Register<Index>::lanes; ++i) {
    if (!mask.at<Index>(i)) continue;
#if TWIN_CHECKED
    for (int j = 0; j < i; ++j) {
      if (mask.at<Index>(j) && index.lane[j] == index.lane[i]) {
        twin::fault("argument", what, PIPE_V, 0, "lanes %d and %d scatter to the same index %u", j, i,
                    static_cast<unsigned>(index.lane[i]));
      }
    }
#endif
    twin::store_bytes(dst + index.lane[i], &src.lane[step * i], sizeof(Element), what);
  }
}
template <twin::narrow Element, class Index>  // asc_scatter_deprecated.md
TWIN_OP void asc_scatter(twin::Register<Element>& src, Element* dst, const twin::Register<Index>& index, const vector_bool& mask) {
  asc_scatter(dst, src, index, mask);
}
