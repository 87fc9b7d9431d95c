// Copies into L1: from global memory with a change of layout or without, from a vector core's buffer, and fills.
#pragma once

#include "cube_operands.h"

// asc-devkit, docs: asc_channel_pad_mode.md. Only whole blocks are modelled.
enum class asc_channel_pad_mode : uint8_t { NONE = 0 };

// asc-devkit, docs: asc_fill_value_config.md; gaps and counts are of 32-byte blocks.
struct asc_fill_value_config {
  uint16_t repeat = 1;
  uint16_t blk_num = 1;
  uint16_t dst_gap = 0;
};

namespace twin {

// Copies 32-byte blocks between local memories, and with them whether they were ever written.
TWIN_UNWATCHED inline void copy_defined(const Memory& source, size_t from, const uint8_t* data, Memory& target, size_t to,
                                        uint8_t* out, size_t bytes) {
  std::memcpy(out, data, bytes);
#if TWIN_CHECKED
  for (size_t at = 0; at < bytes; at += kBlockBytes) {
    const uint32_t written = source.defined_block(from + at);
    if (written != ~uint32_t{0}) target.set_defined_block(to + at, written);
  }
#else
  (void)source, (void)from, (void)target, (void)to;
#endif
}

// Writes one row of a matrix as blocks of Nz: block g goes `group_stride` blocks after block g - 1.
struct NzTarget {
  size_t row_stride, group_stride;  // bytes
};

TWIN_UNWATCHED inline NzTarget nz_target(const char* what) {
  const CubeState& state = *machine().block->cube_state;
  if (!state.nz_set) {
    fault("argument", what, PIPE_MTE2, 0, "asc_set_gm2l1_nz_para was not called: where rows go is not known");
  }
  return {size_t{state.nz_row_stride} * kBlockBytes, size_t{state.nz_group_stride} * kBlockBytes};
}

// asc_copy_gm2l1_nd2nz and _dn2nz: `n` rows of `d` elements, a row being contiguous (ND) or a column (DN).
template <bool Columns, class T>
TWIN_UNWATCHED void to_nz(T* dst, const T* src, uint64_t line_stride, uint32_t n, uint32_t d, uint64_t matrix_stride,
                          bool small, const char* what) {
  if (!on_cube()) return;
  if (small) fault("unimplemented", what, PIPE_MTE2, 0, "the layout of four channels (small C0) is not modelled");
  const NzTarget target = nz_target(what);
  const CubeState& state = *machine().block->cube_state;
  if (n == 0 || d == 0 || n > 65535 || d >= 1u << 21) {
    fault("argument", what, PIPE_MTE2, 0, "%u rows of %u: rows are 1 to 65535 and columns 1 to 2097151", n, d);
  }
  constexpr uint32_t depth = kBlockBytes / sizeof(T);
  const uint32_t groups = (d + depth - 1) / depth;
  issue(PIPE_MTE2, static_cast<size_t>(n) * d * sizeof(T) * state.nz_matrices);
  Memory& memory = cube_memory(Space::L1, what);
  for (uint32_t matrix = 0; matrix < state.nz_matrices; ++matrix) {
    const auto* from = reinterpret_cast<const uint8_t*>(src) + matrix * matrix_stride;
    const size_t to = memory.offset_of(dst) + size_t{matrix} * state.nz_matrix_stride * kBlockBytes;
    const uint32_t lines = Columns ? d : n, length = Columns ? n : d;
    for (uint32_t line = 0; line < lines; ++line) {
      gm(from + line * line_stride, length * sizeof(T), PIPE_MTE2, Access::read, what);
    }
    for (uint32_t g = 0; g < groups; ++g) {
      const uint32_t width = std::min(depth, d - g * depth);
      const bool dense = target.row_stride == kBlockBytes;
      uint8_t* run = dense ? cube(Space::L1, place(to + g * target.group_stride), size_t{n} * kBlockBytes, PIPE_MTE2,
                                  Access::write, what, kBlockBytes)
                           : nullptr;
      for (uint32_t row = 0; row < n; ++row) {
        const size_t at = to + g * target.group_stride + row * target.row_stride;
        uint8_t* block = dense ? run + size_t{row} * kBlockBytes
                               : cube(Space::L1, place(at), kBlockBytes, PIPE_MTE2, Access::write, what, kBlockBytes);
        // the unit fills a block that the matrix does not with zeros
        if (width != depth) std::memset(block, 0, kBlockBytes);
        if constexpr (Columns) {
          for (uint32_t i = 0; i < width; ++i) {
            std::memcpy(block + i * sizeof(T), from + (g * depth + i) * line_stride + row * sizeof(T), sizeof(T));
          }
        } else {
          std::memcpy(block, from + row * line_stride + g * kBlockBytes, width * sizeof(T));
        }
      }
    }
  }
}

}  // namespace twin

// asc-devkit, docs: asc_set_gm2l1_nz_para.md; strides in blocks of 32 bytes.
TWIN_UNWATCHED inline void asc_set_gm2l1_nz_para(uint16_t matrices, uint16_t row_stride, uint16_t group_stride,
                                                 uint16_t matrix_stride) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.nz_set = true;
  state.nz_matrices = matrices;
  state.nz_row_stride = row_stride;
  state.nz_group_stride = group_stride;
  state.nz_matrix_stride = matrix_stride;
}
TWIN_UNWATCHED inline void asc_set_gm2l1_nz_para(uint64_t config) {
  asc_set_gm2l1_nz_para(static_cast<uint16_t>(config), static_cast<uint16_t>(config >> 16),
                        static_cast<uint16_t>(config >> 32), static_cast<uint16_t>(config >> 48));
}

// asc-devkit, docs: asc_copy_gm2l1_nd2nz_arch_3510.md
template <class T>
TWIN_UNWATCHED inline void asc_copy_gm2l1_nd2nz(T* dst, T* src, uint64_t row_stride, asc_load_l2_cache_mode, uint16_t n,
                                                uint32_t d, uint64_t matrix_stride, bool small_c0) {
  twin::to_nz<false>(dst, src, row_stride, n, d, matrix_stride, small_c0, "asc_copy_gm2l1_nd2nz");
}
// asc-devkit, docs: asc_copy_gm2l1_dn2nz.md: `d` lines of `n` elements, which become the columns of `n` rows.
template <class T>
TWIN_UNWATCHED inline void asc_copy_gm2l1_dn2nz(T* dst, T* src, uint64_t line_stride, asc_load_l2_cache_mode,
                                                uint16_t n, uint32_t d, uint64_t matrix_stride, bool small_c0) {
  twin::to_nz<true>(dst, src, line_stride, n, d, matrix_stride, small_c0, "asc_copy_gm2l1_dn2nz");
}

// asc-devkit, docs: asc_copy_gm2l1_highdim_split_arch_3510.md; lengths and strides (start to start) in 32-byte blocks.
TWIN_UNWATCHED inline void asc_copy_gm2l1(void* dst, void* src, uint32_t bursts, uint32_t length,
                                          asc_channel_pad_mode, uint64_t source, uint32_t target) {
  if (!twin::on_cube()) return;
  using namespace twin;
  constexpr const char* what = "asc_copy_gm2l1";
  issue(PIPE_MTE2, size_t(bursts) * length * kBlockBytes);
  const size_t to = cube_memory(Space::L1, what).offset_of(dst);
  for (uint32_t i = 0; i < bursts; ++i) {
    const auto* from = static_cast<const uint8_t*>(src) + i * source * kBlockBytes;
    const size_t bytes = size_t(length) * kBlockBytes;
    const uint8_t* data = gm(from, bytes, PIPE_MTE2, Access::read, what);
    uint8_t* out = cube(Space::L1, place(to + size_t(i) * target * kBlockBytes), bytes, PIPE_MTE2, Access::write, what,
                        kBlockBytes);
    std::memcpy(out, data, bytes);
  }
}

// asc-devkit, docs: asc_set_gm2l1_pad.md
TWIN_UNWATCHED inline void asc_set_gm2l1_pad(uint32_t value) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.pad = value;
  state.pad_set = true;
}

// asc-devkit, docs: asc_set_gm2l1_loop_size.md, asc_set_gm2l1_loop1_stride.md, asc_set_gm2l1_loop2_stride.md
TWIN_UNWATCHED inline void asc_set_gm2l1_loop_size(uint32_t loop1, uint32_t loop2) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.loop1 = loop1;
  state.loop2 = loop2;
}
TWIN_UNWATCHED inline void asc_set_gm2l1_loop1_stride(uint64_t source, uint64_t target) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.loop1_source = source;
  state.loop1_target = target;
}
TWIN_UNWATCHED inline void asc_set_gm2l1_loop2_stride(uint64_t source, uint64_t target) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.loop2_source = source;
  state.loop2_target = target;
}

// asc-devkit, docs: asc_copy_gm2l1_align.md: bursts of bytes, each filled up to 32 bytes; strides in bytes, start to
// start. Bursts that touch (dst_stride == burst_len) are filled up once, at the end of all.
template <class T>
TWIN_UNWATCHED inline void asc_copy_gm2l1_align(T* dst, T* src, uint32_t bursts, uint32_t length, uint8_t left,
                                                uint8_t right, bool constant, asc_load_l2_cache_mode, uint64_t source,
                                                uint32_t target) {
  using namespace twin;
  constexpr const char* what = "asc_copy_gm2l1_align";
  if (!on_cube()) return;
  const CubeState& state = *machine().block->cube_state;
  const bool compact = target == length && left == 0 && right == 0;
  if (!compact && target % kBlockBytes) {
    fault("alignment", what, PIPE_MTE2, target, "dst_stride is %u, not a multiple of 32", target);
  }
  if ((constant || left || right) && !state.pad_set) {
    fault("argument", what, PIPE_MTE2, 0, "pads with a value that asc_set_gm2l1_pad did not set");
  }
  issue(PIPE_MTE2, size_t(bursts) * length * state.loop1 * state.loop2);
  const size_t to = cube_memory(Space::L1, what).offset_of(dst);
  cube(Space::L1, dst, 0, PIPE_MTE2, Access::read, what, kBlockBytes);
  const size_t before = left * sizeof(T), used = before + length + right * sizeof(T);
  for (uint32_t two = 0; two < state.loop2; ++two) {
    for (uint32_t one = 0; one < state.loop1; ++one) {
      const auto* from = reinterpret_cast<const uint8_t*>(src) + one * state.loop1_source + two * state.loop2_source;
      const size_t base = to + one * state.loop1_target + two * state.loop2_target;
      for (uint32_t i = 0; i < bursts; ++i) {
        const uint8_t* data = gm(from + i * source, length, PIPE_MTE2, Access::read, what);
        const bool fills = !compact || i + 1 == bursts;
        const size_t at = base + size_t(i) * target, end = compact ? (at + length) : at + used;
        const size_t filled = fills ? (end - base + kBlockBytes - 1) / kBlockBytes * kBlockBytes + base : end;
        uint8_t* out = cube(Space::L1, place(at), filled - at, PIPE_MTE2, Access::write, what);
        const bool value = constant || left || right;
        for (size_t b = 0; b + sizeof(T) <= filled - at; b += sizeof(T)) {
          std::memcpy(out + b, value ? static_cast<const void*>(&state.pad) : data, sizeof(T));
        }
        std::memcpy(out + before, data, length);
      }
    }
  }
}

// asc-devkit, docs: asc_fill_l1.md. The value is of the element's width, or two of 16 bits in one of 32.
template <class T, class Value>
TWIN_UNWATCHED inline void asc_fill_l1(T* dst, Value value, const asc_fill_value_config& config) {
  using namespace twin;
  static_assert(sizeof(Value) == 4 || sizeof(Value) == sizeof(T), "a fill value is of the element's width, or of 32 bits");
  constexpr const char* what = "asc_fill_l1";
  if (!on_cube()) return;
  issue(PIPE_MTE2, size_t(config.repeat) * config.blk_num * kBlockBytes);
  const size_t to = cube_memory(Space::L1, what).offset_of(dst);
  for (uint32_t i = 0; i < config.repeat; ++i) {
    const size_t bytes = size_t(config.blk_num) * kBlockBytes;
    const size_t at = to + size_t(i) * (config.blk_num + config.dst_gap) * kBlockBytes;
    uint8_t* out = cube(Space::L1, place(at), bytes, PIPE_MTE2, Access::write, what, kBlockBytes);
    for (size_t b = 0; b < bytes; b += sizeof(Value)) std::memcpy(out + b, &value, sizeof(Value));
  }
}

// asc-devkit, docs: asc_copy_ub2l1.md; lengths and gaps (end to start) in 32-byte blocks.
TWIN_UNWATCHED inline void asc_copy_ub2l1(void* dst, void* src, uint16_t bursts, uint16_t length, uint16_t source_gap,
                                          uint16_t target_gap) {
  using namespace twin;
  constexpr const char* what = "asc_copy_ub2l1";
  if (on_cube()) return;
  const size_t bytes = size_t(length) * kBlockBytes;
  issue(PIPE_MTE3, bursts * bytes);
  Memory& source = ub_of(machine().core->index - 1);
  Memory& target = cube_memory(Space::L1, what);
  const size_t from = source.offset_of(src), to = target.offset_of(dst);
  for (uint32_t i = 0; i < bursts; ++i) {
    const size_t read = from + i * (size_t(length) + source_gap) * kBlockBytes;
    const size_t write = to + i * (size_t(length) + target_gap) * kBlockBytes;
    const uint8_t* data = local(source, place(read), bytes, PIPE_MTE3, Access::read, what, kBlockBytes);
    uint8_t* out = local(target, place(write), bytes, PIPE_MTE3, Access::write, what, kBlockBytes);
    copy_defined(source, read, data, target, write, out, bytes);
  }
}
TWIN_UNWATCHED inline void asc_copy_ub2l1(void* dst, void* src, uint32_t bytes) {
  if (!twin::on_cube() && bytes % 32) {
    twin::fault("alignment", "asc_copy_ub2l1", PIPE_MTE3, bytes, "%u bytes are not a multiple of 32", bytes);
  }
  asc_copy_ub2l1(dst, src, 1, static_cast<uint16_t>(bytes / 32), 0, 0);
}
