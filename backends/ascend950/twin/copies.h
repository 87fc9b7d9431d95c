// Copies of a vector core: global memory to UB on MTE2, back on MTE3, and within UB on V.
//
// asc-devkit, docs: vector_datamove/. A burst is a row; strides lead from the start of a row to that of the next and,
// like everything here, are in bytes. Rows in UB start at multiples of 32 bytes, or follow one another without a gap.
#pragma once

#include <cstring>

#include "machine.h"
#include "sync.h"

namespace twin {

struct Rows {
  uint32_t count;
  uint32_t bytes;
  uint64_t source_stride;
  uint64_t target_stride;
};

TWIN_UNWATCHED inline void check_rows(const Rows& rows, uint64_t ub_stride, pipe_t pipe, const char* what) {
  if (rows.count > 4095) fault("argument", what, pipe, 0, "%u bursts: at most 4095", rows.count);
  if (rows.bytes > 2097151) fault("argument", what, pipe, 0, "a burst of %u bytes: at most 2097151", rows.bytes);
  if (rows.count > 1 && ub_stride != rows.bytes && ub_stride % kCell) {
    fault("alignment", what, pipe, ub_stride, "a stride of %llu bytes in UB is neither the burst's %u nor a multiple of 32",
          static_cast<unsigned long long>(ub_stride), rows.bytes);
  }
}

// Bytes beside a row that an aligned copy fills: at most 32 on each side.
struct Padding {
  uint32_t left = 0;
  uint32_t right = 0;
  bool constant = false;
  uint32_t element = 1;
};

TWIN_UNWATCHED inline void pad(uint8_t* target, uint32_t bytes, const Padding& padding, const uint8_t* row) {
  const uint32_t bits = machine().core->pad_bits;
  const uint8_t* pattern = padding.constant ? reinterpret_cast<const uint8_t*>(&bits) : row;
  for (uint32_t i = 0; i < bytes; i += padding.element) std::memcpy(target + i, pattern, padding.element);
}

TWIN_UNWATCHED inline void to_ub(void* target, const void* source, const Rows& rows, const Padding& padding,
                                 const char* what) {
  constexpr pipe_t pipe = PIPE_MTE2;
  check_rows(rows, rows.target_stride, pipe, what);
  if (padding.left > 32 || padding.right > 32) {
    fault("argument", what, pipe, 0, "padding of %u and %u bytes: at most 32 each", padding.left, padding.right);
  }
  const CopyLoops& loops = machine().core->to_ub;
  issue(pipe, loops.size1 * loops.size2 * rows.count * rows.bytes);
  const bool packed = rows.count > 1 && rows.target_stride == rows.bytes && rows.bytes % kCell;
  for (uint64_t outer = 0; outer < loops.size2; ++outer) {
    for (uint64_t inner = 0; inner < loops.size1; ++inner) {
      auto* to = static_cast<uint8_t*>(target) + outer * loops.target2 + inner * loops.target1;
      const auto* from = static_cast<const uint8_t*>(source) + outer * loops.source2 + inner * loops.source1;
      for (uint32_t row = 0; row < rows.count && rows.bytes; ++row) {
        const uint8_t* read = gm(from, rows.bytes, pipe, Access::read, what);
        const uint32_t filled = padding.left + rows.bytes + padding.right;
        uint8_t* written = ub(to, filled, pipe, Access::write, what, packed && row ? 1 : kCell);
        pad(written, padding.left, padding, read);
        std::memcpy(written + padding.left, read, rows.bytes);
        pad(written + padding.left + rows.bytes, padding.right, padding, read);
        from += rows.source_stride;
        to += rows.target_stride;
      }
    }
  }
}

template <class T, class F>
TWIN_UNWATCHED void combine(uint8_t* target, const uint8_t* source, size_t bytes, F f) {
  for (size_t i = 0; i + sizeof(T) <= bytes; i += sizeof(T)) {
    T a, b;
    std::memcpy(&a, target + i, sizeof a);
    std::memcpy(&b, source + i, sizeof b);
    a = f(a, b);
    std::memcpy(target + i, &a, sizeof a);
  }
}

TWIN_UNWATCHED inline void store_row(uint8_t* target, const uint8_t* source, size_t bytes, StoreMode mode) {
  const auto add = [](auto a, auto b) { return static_cast<decltype(a)>(a + b); };
  const auto max = [](auto a, auto b) { return a > b ? a : b; };
  const auto min = [](auto a, auto b) { return a < b ? a : b; };
  switch (mode) {
    case StoreMode::replace: std::memcpy(target, source, bytes); break;
    case StoreMode::add_f32: combine<float>(target, source, bytes, add); break;
    case StoreMode::add_s32: combine<int32_t>(target, source, bytes, add); break;
    case StoreMode::add_s16: combine<int16_t>(target, source, bytes, add); break;
    case StoreMode::add_s8: combine<int8_t>(target, source, bytes, add); break;
    case StoreMode::max_f32: combine<float>(target, source, bytes, max); break;
    case StoreMode::max_s32: combine<int32_t>(target, source, bytes, max); break;
    case StoreMode::min_f32: combine<float>(target, source, bytes, min); break;
    case StoreMode::min_s32: combine<int32_t>(target, source, bytes, min); break;
  }
}

TWIN_UNWATCHED inline void to_gm(void* target, const void* source, const Rows& rows, const char* what) {
  constexpr pipe_t pipe = PIPE_MTE3;
  check_rows(rows, rows.source_stride, pipe, what);
  Machine& m = machine();
  const CopyLoops& loops = m.core->to_gm;
  issue(pipe, loops.size1 * loops.size2 * rows.count * rows.bytes);
  const bool packed = rows.count > 1 && rows.source_stride == rows.bytes && rows.bytes % kCell;
  for (uint64_t outer = 0; outer < loops.size2; ++outer) {
    for (uint64_t inner = 0; inner < loops.size1; ++inner) {
      auto* to = static_cast<uint8_t*>(target) + outer * loops.target2 + inner * loops.target1;
      const auto* from = static_cast<const uint8_t*>(source) + outer * loops.source2 + inner * loops.source1;
      for (uint32_t row = 0; row < rows.count && rows.bytes; ++row) {
        const uint8_t* read = ub(from, rows.bytes, pipe, Access::read, what, packed && row ? 1 : kCell);
        require_defined(ub_of(m.core->index - 1), from, rows.bytes, pipe, what);
        store_row(gm(to, rows.bytes, pipe, Access::write, what), read, rows.bytes, m.core->store);
        from += rows.source_stride;
        to += rows.target_stride;
      }
    }
  }
}

TWIN_UNWATCHED inline void require_blocks(uint32_t bytes, pipe_t pipe, const char* what) {
  if (bytes % kCell) fault("alignment", what, pipe, bytes, "a plain copy of %u bytes: a multiple of 32 is needed", bytes);
}

TWIN_UNWATCHED inline void within_ub(void* target, const void* source, uint32_t count, uint32_t bytes,
                                     uint32_t source_gap, uint32_t target_gap, const char* what) {
  issue(PIPE_V, static_cast<size_t>(count) * bytes);
  auto* to = static_cast<uint8_t*>(target);
  const auto* from = static_cast<const uint8_t*>(source);
  for (uint32_t row = 0; row < count && bytes; ++row) {
    const uint8_t* read = ub(from, bytes, PIPE_V, Access::read, what, kCell);
    std::memmove(ub(to, bytes, PIPE_V, Access::write, what, kCell), read, bytes);
    from += bytes + source_gap;
    to += bytes + target_gap;
  }
}

}  // namespace twin

// asc-devkit, docs: vector_datamove/asc_copy_gm2ub_align/asc_copy_gm2ub_align_arch_3510.md
template <class T, class Mode>
__aicore__ inline void asc_copy_gm2ub_align(__ubuf__ T* dst, __gm__ T* src, uint16_t n_burst, uint32_t len_burst,
                                            uint8_t left_padding_num, uint8_t right_padding_num,
                                            bool enable_constant_pad, Mode, uint64_t src_stride, uint32_t dst_stride) {
  constexpr uint32_t size = sizeof(T);
  twin::to_ub(dst, src, {n_burst, len_burst, src_stride, dst_stride},
              {left_padding_num * size, right_padding_num * size, enable_constant_pad, size}, "asc_copy_gm2ub_align");
}
template <class T>
__aicore__ inline void asc_copy_gm2ub_align(__ubuf__ T* dst, __gm__ T* src, uint32_t size) {
  twin::require_blocks(size, PIPE_MTE2, "asc_copy_gm2ub_align");
  twin::to_ub(dst, src, {1, size, 0, 0}, {}, "asc_copy_gm2ub_align");
}
template <class T>
__aicore__ inline void asc_copy_gm2ub_align_sync(__ubuf__ T* dst, __gm__ T* src, uint32_t size) {
  asc_copy_gm2ub_align(dst, src, size);
  asc_sync();
}

// asc-devkit, docs: vector_datamove/asc_copy_gm2ub/asc_copy_gm2ub_arch_3510.md
__aicore__ inline void asc_copy_gm2ub(__ubuf__ void* dst, __gm__ void* src, uint16_t n_burst, uint16_t len_burst,
                                      uint16_t src_stride, uint16_t dst_stride) {
  twin::to_ub(dst, src, {n_burst, len_burst, src_stride, dst_stride}, {}, "asc_copy_gm2ub");
}
__aicore__ inline void asc_copy_gm2ub(__ubuf__ void* dst, __gm__ void* src, uint32_t size) {
  twin::require_blocks(size, PIPE_MTE2, "asc_copy_gm2ub");
  twin::to_ub(dst, src, {1, size, 0, 0}, {}, "asc_copy_gm2ub");
}
__aicore__ inline void asc_copy_gm2ub_sync(__ubuf__ void* dst, __gm__ void* src, uint32_t size) {
  asc_copy_gm2ub(dst, src, size);
  asc_sync();
}

// asc-devkit, docs: vector_datamove/asc_copy_ub2gm_align/asc_copy_ub2gm_align_arch_3510.md
template <class T, class Mode>
__aicore__ inline void asc_copy_ub2gm_align(__gm__ T* dst, __ubuf__ T* src, uint16_t n_burst, uint32_t len_burst, Mode,
                                            uint64_t dst_stride, uint32_t src_stride) {
  twin::to_gm(dst, src, {n_burst, len_burst, src_stride, dst_stride}, "asc_copy_ub2gm_align");
}
template <class T>
__aicore__ inline void asc_copy_ub2gm_align(__gm__ T* dst, __ubuf__ T* src, uint32_t size) {
  twin::require_blocks(size, PIPE_MTE3, "asc_copy_ub2gm_align");
  twin::to_gm(dst, src, {1, size, 0, 0}, "asc_copy_ub2gm_align");
}
template <class T>
__aicore__ inline void asc_copy_ub2gm_align_sync(__gm__ T* dst, __ubuf__ T* src, uint32_t size) {
  asc_copy_ub2gm_align(dst, src, size);
  asc_sync();
}

// asc-devkit, docs: vector_datamove/asc_copy_ub2gm/asc_copy_ub2gm_arch_3510.md
__aicore__ inline void asc_copy_ub2gm(__gm__ void* dst, __ubuf__ void* src, uint16_t n_burst, uint16_t len_burst,
                                      uint16_t dst_stride, uint16_t src_stride) {
  twin::to_gm(dst, src, {n_burst, len_burst, src_stride, dst_stride}, "asc_copy_ub2gm");
}
__aicore__ inline void asc_copy_ub2gm(__gm__ void* dst, __ubuf__ void* src, uint32_t size) {
  twin::require_blocks(size, PIPE_MTE3, "asc_copy_ub2gm");
  twin::to_gm(dst, src, {1, size, 0, 0}, "asc_copy_ub2gm");
}
__aicore__ inline void asc_copy_ub2gm_sync(__gm__ void* dst, __ubuf__ void* src, uint32_t size) {
  asc_copy_ub2gm(dst, src, size);
  asc_sync();
}

// asc-devkit, docs: vector_datamove/asc_copy_ub2ub.md. Lengths and gaps of the first form are in blocks of 32 bytes.
__aicore__ inline void asc_copy_ub2ub(__ubuf__ void* dst, __ubuf__ void* src, uint16_t n_burst, uint16_t len_burst,
                                      uint16_t src_gap, uint16_t dst_gap) {
  twin::within_ub(dst, src, n_burst, len_burst * 32u, src_gap * 32u, dst_gap * 32u, "asc_copy_ub2ub");
}
__aicore__ inline void asc_copy_ub2ub(__ubuf__ void* dst, __ubuf__ void* src, uint32_t size) {
  twin::require_blocks(size, PIPE_V, "asc_copy_ub2ub");
  twin::within_ub(dst, src, 1, size, 0, 0, "asc_copy_ub2ub");
}
__aicore__ inline void asc_copy_ub2ub_sync(__ubuf__ void* dst, __ubuf__ void* src, uint32_t size) {
  asc_copy_ub2ub(dst, src, size);
  asc_sync();
}

// asc-devkit, docs: vector_datamove/asc_set_gm2ub_loop_size.md and its five companions
__aicore__ inline void asc_set_gm2ub_loop_size(uint64_t loop1_size, uint64_t loop2_size) {
  twin::machine().core->to_ub.size1 = loop1_size;
  twin::machine().core->to_ub.size2 = loop2_size;
}
__aicore__ inline void asc_set_gm2ub_loop1_stride(uint64_t src_stride, uint64_t dst_stride) {
  twin::machine().core->to_ub.source1 = src_stride;
  twin::machine().core->to_ub.target1 = dst_stride;
}
__aicore__ inline void asc_set_gm2ub_loop2_stride(uint64_t src_stride, uint64_t dst_stride) {
  twin::machine().core->to_ub.source2 = src_stride;
  twin::machine().core->to_ub.target2 = dst_stride;
}
__aicore__ inline void asc_set_ub2gm_loop_size(uint32_t loop1_size, uint32_t loop2_size) {
  twin::machine().core->to_gm.size1 = loop1_size;
  twin::machine().core->to_gm.size2 = loop2_size;
}
__aicore__ inline void asc_set_ub2gm_loop1_stride(uint64_t src_stride, uint64_t dst_stride) {
  twin::machine().core->to_gm.source1 = src_stride;
  twin::machine().core->to_gm.target1 = dst_stride;
}
__aicore__ inline void asc_set_ub2gm_loop2_stride(uint64_t src_stride, uint64_t dst_stride) {
  twin::machine().core->to_gm.source2 = src_stride;
  twin::machine().core->to_gm.target2 = dst_stride;
}

// asc-devkit, docs: vector_datamove/asc_set_copy_pad_val.md
template <class T>
__aicore__ inline void asc_set_copy_pad_val(T pad_value) {
  static_assert(sizeof(T) <= 4);
  twin::machine().core->pad_bits = 0;
  std::memcpy(&twin::machine().core->pad_bits, &pad_value, sizeof(T));
}

// asc-devkit, docs: simd_atomic/*.md
__aicore__ inline void asc_set_atomic_none() { twin::machine().core->store = twin::StoreMode::replace; }
__aicore__ inline void asc_set_atomic_add_float() { twin::machine().core->store = twin::StoreMode::add_f32; }
__aicore__ inline void asc_set_atomic_add_int() { twin::machine().core->store = twin::StoreMode::add_s32; }
__aicore__ inline void asc_set_atomic_add_int16() { twin::machine().core->store = twin::StoreMode::add_s16; }
__aicore__ inline void asc_set_atomic_add_int8() { twin::machine().core->store = twin::StoreMode::add_s8; }
__aicore__ inline void asc_set_atomic_max_float() { twin::machine().core->store = twin::StoreMode::max_f32; }
__aicore__ inline void asc_set_atomic_max_int() { twin::machine().core->store = twin::StoreMode::max_s32; }
__aicore__ inline void asc_set_atomic_min_float() { twin::machine().core->store = twin::StoreMode::min_f32; }
__aicore__ inline void asc_set_atomic_min_int() { twin::machine().core->store = twin::StoreMode::min_s32; }
