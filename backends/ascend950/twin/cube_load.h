// Copies out of L1: to the operands of the Cube, their scales and the bias, and to a vector core's buffer.
#pragma once

#include "cube_l1.h"

namespace twin {

// Fractals of L1 to an operand, as they are: fractal (g, r) of the source is `source` after fractal (g - 1, r).
TWIN_UNWATCHED inline void load_fractals(Space space, const void* dst, const void* src, int row, int group, int rows,
                                         int groups, int source, int target, const char* what) {
  if (!on_cube() || rows == 0 || groups == 0) return;
  constexpr size_t fractal = 512;
  issue(PIPE_MTE1, size_t(rows) * groups * fractal);
  Memory& l1 = cube_memory(Space::L1, what);
  Memory& operand = cube_memory(space, what);
  if (target < 1) fault("argument", what, PIPE_MTE1, 0, "dst_stride is %d; it counts fractals from 1", target);
  const size_t from = l1.offset_of(src), to = operand.offset_of(dst);
  cube(Space::L1, src, 0, PIPE_MTE1, Access::read, what, kBlockBytes);
  cube(space, dst, 0, PIPE_MTE1, Access::read, what, fractal);
  for (int g = 0; g < groups; ++g) {
    const int64_t first = int64_t{group} * std::abs(source) + row + int64_t{g} * source;
    const size_t source_at = from + static_cast<size_t>(first) * fractal, target_at = to + size_t(g) * target * fractal;
    const size_t bytes = size_t(rows) * fractal;
    const uint8_t* data = cube(Space::L1, place(source_at), bytes, PIPE_MTE1, Access::read, what);
    uint8_t* out = cube(space, place(target_at), bytes, PIPE_MTE1, Access::write, what);
    copy_defined(l1, source_at, data, operand, target_at, out, bytes);
  }
}

// The same with rows and columns exchanged: element (r, c) of the source becomes element r of row c.
template <class T>
TWIN_UNWATCHED void load_transposed(Space space, const void* dst, const void* src, int row, int group, int rows,
                                    int groups, int source, int target, const char* what) {
  if (!on_cube() || rows == 0 || groups == 0) return;
  constexpr int bits = Element<T>::bits, depth = elements_per_block<T>;
  if (bits == 4) fault("unimplemented", what, PIPE_MTE1, 0, "a transposed load of 4-bit elements is not modelled");
  if ((bits == 8 && rows % 2) || (bits == 32 && groups % 2)) {
    fault("argument", what, PIPE_MTE1, 0, "%d x %d fractals of %d-bit elements cannot be transposed", rows, groups,
          bits);
  }
  constexpr size_t fractal = 512;
  issue(PIPE_MTE1, size_t(rows) * groups * fractal);
  Memory& l1 = cube_memory(Space::L1, what);
  Memory& operand = cube_memory(space, what);
  const size_t from = l1.offset_of(src), to = operand.offset_of(dst);
  cube(Space::L1, src, 0, PIPE_MTE1, Access::read, what, kBlockBytes);
  cube(space, dst, 0, PIPE_MTE1, Access::read, what, fractal);
  for (int g = 0; g < groups; ++g) {
    const int64_t first = int64_t{group} * std::abs(source) + row + int64_t{g} * source;
    const size_t source_at = from + static_cast<size_t>(first) * fractal;
    const uint8_t* data = cube(Space::L1, place(source_at), size_t(rows) * fractal, PIPE_MTE1, Access::read, what);
    for (int r = 0; r < rows * kFractalRows; ++r) {
      const uint32_t written = l1.defined_block(source_at + size_t(r) * kBlockBytes);
      for (int i = 0; i < depth; ++i) {
        const int column = g * depth + i;
        const size_t out_fractal = size_t(r / depth) * target + column / kFractalRows;
        const size_t block = to + out_fractal * fractal + size_t(column % kFractalRows) * kBlockBytes;
        const size_t inside = size_t(r % depth) * sizeof(T);
        uint8_t* out = cube(space, place(block + inside), sizeof(T), PIPE_MTE1, Access::write, what);
        std::memcpy(out, data + size_t(r) * kBlockBytes + i * sizeof(T), sizeof(T));
        if ((written >> (i * sizeof(T)) & 1) == 0) {
          const uint32_t bits = ((uint32_t{1} << sizeof(T)) - 1) << inside;
          operand.set_defined_block(block, operand.defined_block(block) & ~bits);
        }
      }
    }
  }
}

// Block scales: fractals of 16 x 2 codes, `x` of them along the rows and `y` along K.
TWIN_UNWATCHED inline void load_scales(Space space, uint64_t dst, const void* src, int x_start, int y_start, int x,
                                       int y, int source, int target, const char* what) {
  if (!on_cube() || x == 0 || y == 0) return;
  issue(PIPE_MTE1, size_t(x) * y * kBlockBytes);
  Memory& l1 = cube_memory(Space::L1, what);
  Memory& scales = cube_memory(space, what);
  cube(Space::L1, src, 0, PIPE_MTE1, Access::read, what, kBlockBytes);
  cube(space, place(dst), 0, PIPE_MTE1, Access::read, what, kBlockBytes);
  for (int i = 0; i < x; ++i) {
    const size_t from = l1.offset_of(src) + (size_t(x_start + i) * source + y_start) * kBlockBytes;
    const size_t to = scales.offset_of(place(dst)) + size_t(i) * target * kBlockBytes, bytes = size_t(y) * kBlockBytes;
    const uint8_t* data = cube(Space::L1, place(from), bytes, PIPE_MTE1, Access::read, what);
    uint8_t* out = cube(space, place(to), bytes, PIPE_MTE1, Access::write, what);
    copy_defined(l1, from, data, scales, to, out, bytes);
  }
}

}  // namespace twin

// asc-devkit, docs: asc_copy_l12ub.md; the cube core writes to the unified buffer of the vector core that it names.
TWIN_UNWATCHED inline void asc_copy_l12ub(void* dst, void* src, int8_t vector, uint16_t bursts, uint16_t length,
                                          uint16_t source_gap, uint16_t target_gap) {
  using namespace twin;
  constexpr const char* what = "asc_copy_l12ub";
  if (!on_cube()) return;
  const size_t bytes = size_t(length) * kBlockBytes;
  issue(PIPE_MTE1, bursts * bytes);
  Memory& source = cube_memory(Space::L1, what);
  Memory& target = ub_of(vector);
  const size_t from = source.offset_of(src), to = target.offset_of(dst);
  for (uint32_t i = 0; i < bursts; ++i) {
    const size_t read = from + i * (size_t(length) + source_gap) * kBlockBytes;
    const size_t write = to + i * (size_t(length) + target_gap) * kBlockBytes;
    const uint8_t* data = local(source, place(read), bytes, PIPE_MTE1, Access::read, what, kBlockBytes);
    uint8_t* out = local(target, place(write), bytes, PIPE_MTE1, Access::write, what, kBlockBytes);
    copy_defined(source, read, data, target, write, out, bytes);
  }
}

// asc-devkit, docs: asc_copy_l12l0a_2d_arch_3510.md, asc_copy_l12l0b_2d_arch_3510.md. Starts count 16 rows and 32 bytes
// of K; strides count fractals of 512 bytes between neighbours along K. A transposed load exchanges the two.
#define TWIN_LOAD(Name, Target)                                                                                     \
  template <class T>                                                                                                \
  TWIN_UNWATCHED inline void Name(T* dst, T* src, uint16_t row, uint16_t group, uint8_t rows, uint8_t groups,        \
                                  int16_t source, uint16_t target) {                                                \
    twin::load_fractals(twin::Space::Target, dst, src, row, group, rows, groups, source, target, #Name);             \
  }                                                                                                                 \
  template <class T>                                                                                                \
  TWIN_UNWATCHED inline void Name##_transpose(T* dst, T* src, uint16_t row, uint16_t group, uint8_t rows,            \
                                              uint8_t groups, int16_t source, uint16_t target) {                    \
    twin::load_transposed<T>(twin::Space::Target, dst, src, row, group, rows, groups, source, target,                \
                             #Name "_transpose");                                                                   \
  }
TWIN_LOAD(asc_copy_l12l0a, L0A)
TWIN_LOAD(asc_copy_l12l0b, L0B)
#undef TWIN_LOAD

// asc-devkit, docs: asc_copy_l12l0a_mx.md, asc_copy_l12l0b_mx.md; everything counts fractals of 32 bytes.
TWIN_UNWATCHED inline void asc_copy_l12l0a_mx(uint64_t dst, float8_e8m0_t* src, uint16_t x_start, uint16_t y_start,
                                              uint8_t x_step, uint8_t y_step, uint16_t source, uint16_t target) {
  twin::load_scales(twin::Space::L0A_MX, dst, src, x_start, y_start, x_step, y_step, source, target,
                    "asc_copy_l12l0a_mx");
}
TWIN_UNWATCHED inline void asc_copy_l12l0b_mx(uint64_t dst, float8_e8m0_t* src, uint16_t x_start, uint16_t y_start,
                                              uint8_t x_step, uint8_t y_step, uint16_t source, uint16_t target) {
  twin::load_scales(twin::Space::L0B_MX, dst, src, x_start, y_start, x_step, y_step, source, target,
                    "asc_copy_l12l0b_mx");
}

// asc-devkit, docs: asc_copy_l12bt_arch_3510.md, continuous form; 16-bit floats arrive as float32.
template <class T>
TWIN_UNWATCHED inline void asc_copy_l12bt(uint64_t dst, T* src, uint32_t bytes) {
  using namespace twin;
  constexpr const char* what = "asc_copy_l12bt";
  if (!on_cube()) return;
  bytes = bytes / kBlockBytes * kBlockBytes;
  if (sizeof(T) == 4 && bytes % 64) fault("argument", what, PIPE_MTE1, bytes, "%u bytes are not a multiple of 64", bytes);
  issue(PIPE_MTE1, bytes);
  const size_t count = bytes / sizeof(T);
  const uint8_t* data = cube(Space::L1, src, bytes, PIPE_MTE1, Access::read, what, kBlockBytes);
  require_defined(cube_memory(Space::L1, what), src, bytes, PIPE_MTE1, what);
  uint8_t* out = cube(Space::BIAS, place(dst), count * 4, PIPE_MTE1, Access::write, what, 64);
  for (size_t i = 0; i < count; ++i) {
    if constexpr (sizeof(T) == 4) {
      std::memcpy(out + i * 4, data + i * 4, 4);
    } else {
      T value;
      std::memcpy(&value, data + i * sizeof(T), sizeof(T));
      const float wide = static_cast<float>(value);
      std::memcpy(out + i * 4, &wide, 4);
    }
  }
}
