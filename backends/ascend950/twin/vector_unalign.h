// Unaligned streams: a buffer register of 32 bytes between the unified buffer and a data register.
//
// Stores hold back what ends a stream short of a 32-byte boundary until asc_storeunalign_post; forgetting it, or naming
// another end, is a fault.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg: reg_load/asc_loadunalign*.md, reg_store/asc_storeunalign*.md.
#pragma once

#include "vector_store.h"

namespace twin {

TWIN_OP void prime_load(AlignRegister& reg, const void* src) {
  issue(PIPE_V, 32);
  reg.address = static_cast<const uint8_t*>(src);
  reg.primed = true;
}
template <class Element>
TWIN_OP void load_unaligned(Register<Element>& dst, AlignRegister& reg, const Element* src, const char* what) {
  const auto* place = reinterpret_cast<const uint8_t*>(src);
  if (!reg.primed || reg.address != place) {
    fault("argument", what, PIPE_V, reinterpret_cast<uintptr_t>(src), "asc_loadunalign_pre did not prepare this address");
  }
  issue(PIPE_V, kVectorBytes);
  std::memcpy(dst.lane, load_bytes(src, kVectorBytes, sizeof(Element), what), kVectorBytes);
  mark_written(dst);
  reg.address = place + kVectorBytes;
}

/// `bytes` at `place`, but for those after the last 32-byte boundary, which the register holds.
TWIN_OP void store_unaligned(AlignRegister& reg, uint8_t* place, const void* from, size_t bytes, const char* what) {
  const size_t begin = ub_of(machine().core->index - 1).offset_of(place), end = begin + bytes;
  if (reg.count && reg.address + reg.count != place) {
    fault("argument", what, PIPE_V, begin, "the register still holds %d bytes of another place: asc_storeunalign_post is missing",
          reg.count);
  }
  issue(PIPE_V, bytes);
  uint8_t all[32 + kVectorBytes];
  std::memcpy(all, reg.held, reg.count);
  std::memcpy(all + reg.count, from, bytes);
  uint8_t* first = place - reg.count;
  const size_t total = reg.count + bytes;
  const size_t tail = std::min(end % 32, total);
  if (total > tail) store_bytes(first, all, total - tail, what);
  std::memcpy(reg.held, all + (total - tail), tail);
  reg.count = static_cast<int>(tail);
  reg.address = first + (total - tail);
}
TWIN_OP void flush_unaligned(AlignRegister& reg, uint8_t* end, const char* what) {
  if (reg.count && reg.address + reg.count != end) {
    fault("argument", what, PIPE_V, reinterpret_cast<uintptr_t>(end), "the stream ends %td bytes from the address given",
          reg.address + reg.count - end);
  }
  issue(PIPE_V, reg.count);
  if (reg.count) store_bytes(const_cast<uint8_t*>(reg.address), reg.held, reg.count, what);
  reg.count = 0;
}
template <class Element>
TWIN_LANE uint8_t* bytes_at(Element* pointer, int64_t elements = 0) { return reinterpret_cast<uint8_t*>(pointer + elements); }

template <class Element>
TWIN_LANE size_t checked_count(uint32_t count, const char* what) {
  if (count > static_cast<uint32_t>(Register<Element>::lanes)) {
    fault("argument", what, PIPE_V, 0, "%u lanes of a register of %d", count, Register<Element>::lanes);
  }
  return count * sizeof(Element);
}

}  // namespace twin

// asc_loadunalign_pre.md, asc_loadunalign.md, asc_loadunalign_postupdate.md
template <class Element>
TWIN_OP void asc_loadunalign_pre(vector_load_unalign& dst, const Element* src) { twin::prime_load(dst, src); }
template <class Element>
TWIN_OP void asc_loadunalign_pre(vector_load_unalign&, const Element*, addr_reg) {
  twin::refuse_address_register("asc_loadunalign_pre");
}
template <class Element>
TWIN_OP void asc_loadunalign(twin::Register<Element>& dst, vector_load_unalign& src0, const Element* src1) {
  twin::load_unaligned(dst, src0, src1, "asc_loadunalign");
}
template <class Element>
TWIN_OP void asc_loadunalign_postupdate(twin::Register<Element>& dst, vector_load_unalign& src0, Element*& src1, uint32_t count) {
  twin::load_unaligned(dst, src0, src1, "asc_loadunalign_postupdate");
  src1 += count;
  src0.address = reinterpret_cast<const uint8_t*>(src1);
}
template <class Element>
TWIN_OP void asc_loadunalign_postupdate(twin::Register<Element>&, vector_load_unalign&, const Element*, addr_reg&, uint32_t) {
  twin::refuse_address_register("asc_loadunalign_postupdate");
}

// asc_storeunalign.md
template <class Element>
TWIN_OP void asc_storeunalign(Element* dst, vector_store_unalign& src0, const twin::Register<Element>& src1, uint32_t count) {
  twin::require_written(src1, "asc_storeunalign");
  twin::store_unaligned(src0, twin::bytes_at(dst), src1.lane, twin::checked_count<Element>(count, "asc_storeunalign"),
                        "asc_storeunalign");
}
// asc_storeunalign_postupdate.md: with a count; with what asc_squeeze_with_status kept; and predicates
template <class Element>
TWIN_OP void asc_storeunalign_postupdate(Element*& dst, vector_store_unalign& src0, const twin::Register<Element>& src1,
                                         uint32_t count) {
  asc_storeunalign(dst, src0, src1, count);
  dst += count;
}
template <class Element>
TWIN_OP void asc_storeunalign_postupdate(Element* dst, vector_store_unalign& src0, const twin::Register<Element>& src1) {
  const char* what = "asc_storeunalign_postupdate";
  twin::require_written(src1, what);
  twin::Core& core = *twin::machine().core;
  uint8_t* place = twin::bytes_at(dst) + core.squeezed_bytes - core.squeezed_last;
  twin::store_unaligned(src0, place, src1.lane, core.squeezed_last, what);
  core.squeezed_last = 0;  // squeezing and storing alternate (StoreUnAlign.md)
}
template <class Element>
TWIN_OP void asc_storeunalign_postupdate(Element*, vector_store_unalign&, const twin::Register<Element>&, addr_reg&) {
  twin::refuse_address_register("asc_storeunalign_postupdate");
}
template <class Element>
  requires twin::one_of<Element, uint8_t, uint16_t, uint32_t>
TWIN_OP void asc_storeunalign_postupdate(Element*& dst, vector_store_unalign& src0, const vector_bool& src1) {
  const char* what = "asc_storeunalign_postupdate";
  twin::require_written(src1, what);
  constexpr int group = sizeof(Element) == 2 ? 2 : 4;  // the form on uint8_t pointers packs 32-bit lanes
  constexpr int bytes = 32 / group;
  twin::require_aligned(dst, bytes, what);
  uint8_t out[bytes] = {};
  for (int i = 0; i < 8 * bytes; ++i) out[i / 8] |= static_cast<uint8_t>((src1.bit[group * i] & 1) << (i % 8));
  twin::store_unaligned(src0, twin::bytes_at(dst), out, bytes, what);
  twin::move_bytes(dst, bytes);
}

// asc_storeunalign_post.md, asc_storeunalign_post_postupdate.md: `dst` + `offset` is where the stream ends
template <class Element>
TWIN_OP void asc_storeunalign_post(Element* dst, vector_store_unalign& src, int32_t offset) {
  twin::flush_unaligned(src, twin::bytes_at(dst, offset), "asc_storeunalign_post");
}
template <class Element>
TWIN_OP void asc_storeunalign_post(Element* dst, vector_store_unalign& src) {
  twin::flush_unaligned(src, twin::bytes_at(dst) + twin::machine().core->squeezed_bytes, "asc_storeunalign_post");
}
template <class Element>
TWIN_OP void asc_storeunalign_post(Element*, vector_store_unalign&, addr_reg) {
  twin::refuse_address_register("asc_storeunalign_post");
}
template <class Element>
TWIN_OP void asc_storeunalign_post_postupdate(Element*& dst, vector_store_unalign& src, int32_t offset) {
  twin::flush_unaligned(src, twin::bytes_at(dst, offset), "asc_storeunalign_post_postupdate");
  dst += offset;
}

// asc_update_addr_reg.md, asc_create_iter_reg_deprecated.md: known, and refused by name
#define TWIN_ADDRESS_REGISTER(Bits)                                                                    \
  template <class... Offsets>                                                                          \
  TWIN_OP addr_reg asc_update_addr_reg_b##Bits(Offsets...) {                                           \
    twin::refuse_address_register("asc_update_addr_reg_b" #Bits);                                      \
    return {};                                                                                         \
  }                                                                                                    \
  template <class... Offsets>                                                                          \
  TWIN_OP iter_reg asc_create_iter_reg_b##Bits(Offsets...) {                                           \
    twin::refuse_address_register("asc_create_iter_reg_b" #Bits);                                      \
    return {};                                                                                         \
  }
TWIN_ADDRESS_REGISTER(8)
TWIN_ADDRESS_REGISTER(16)
TWIN_ADDRESS_REGISTER(32)
#undef TWIN_ADDRESS_REGISTER
