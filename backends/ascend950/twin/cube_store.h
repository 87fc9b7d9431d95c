// Copies out of L0C: to global memory, to the unified buffers of the vector cores; cast, scaled, rectified on the way.
#pragma once

#include "cube_compute.h"
#include "cube_load.h"

// asc-devkit, docs: asc_dual_dst_mode.md, asc_relu_pre_mode.md
enum class asc_dual_dst_mode : uint8_t { DUAL_DST_DISABLE = 0, DUAL_DST_SPLIT_M = 1, DUAL_DST_SPLIT_N = 2 };
enum class asc_relu_pre_mode : uint8_t { NONE = 0, NORMAL = 1, SCALAR = 2, VECTOR = 3 };

// The compiler's enumeration for this architecture; only modes that asc-devkit documents for it are named.
enum QuantMode_t : uint64_t {
  NoQuant = 0,
  F322F16 = 1,
  REQ8 = 9,
  DEQF16 = 11,
  QF322FP8_PRE = 13,
  QF322F32_PRE = 15,
  F322BF16 = 16,
  QF322B8_PRE = 24,
  QF322F16_PRE = 32,
  QF322BF16_PRE = 34,
};
using asc_quant_mode = QuantMode_t;

namespace twin {

// How a sum leaves L0C. asc-devkit, docs: asc_copy_l0c2ub.md, list of modes.
struct Outlet {
  QuantMode_t quant;
  bool relu;
  float scale;
};

template <class T>
TWIN_UNWATCHED inline bool fits(QuantMode_t mode, bool integer) {
  switch (mode) {
    case NoQuant: return integer ? std::is_same_v<T, int32_t> : std::is_same_v<T, float>;
    case F322F16: case QF322F16_PRE: return !integer && std::is_same_v<T, half>;
    case F322BF16: case QF322BF16_PRE: return !integer && std::is_same_v<T, bfloat16_t>;
    case QF322F32_PRE: return !integer && std::is_same_v<T, float>;
    case QF322FP8_PRE: return !integer && std::is_same_v<T, float8_e4m3_t>;
    case DEQF16: return integer && std::is_same_v<T, half>;
    default: return false;
  }
}

template <class T, class Sum>
TWIN_UNWATCHED inline T leave(Sum sum, const Outlet& outlet) {
  if (outlet.relu && sum < Sum{0}) sum = Sum{0};
  if constexpr (std::is_same_v<T, Sum>) {
    if (outlet.quant == NoQuant) return sum;
  }
  float value = static_cast<float>(sum);
  if (outlet.quant != F322F16 && outlet.quant != F322BF16) value *= outlet.scale;
  const bool saturate = asc_get_saturation_flag(asc_saturation_mode::FLOAT);
  T out;
  if constexpr (std::is_same_v<T, bfloat16_t>) {
    const uint32_t code = saturate ? BFloat16::encode(read_binary32(value), Round::even, true) : bfloat16_even(value);
    out.bits = static_cast<uint16_t>(code);
  } else if constexpr (std::is_same_v<T, half>) {
    const auto code = static_cast<uint16_t>(Binary16::encode(read_binary32(value), Round::even, saturate));
    std::memcpy(&out, &code, sizeof out);
  } else if constexpr (std::is_same_v<T, float8_e4m3_t>) {
    out.bits = static_cast<uint8_t>(E4M3::encode(read_binary32(value), Round::even, saturate));
  } else {
    out = static_cast<T>(value);
  }
  return out;
}

// The shape of one copy: rows and columns of the source, elements between rows (ND), columns (DN) or columns of 16 (Nz).
struct Window {
  int m, n;
  size_t source_stride, target_stride;
  bool rows, columns;
};

// Where element (r, c) of a window goes, in elements.
TWIN_UNWATCHED inline size_t target_of(const Window& w, int r, int c, int width) {
  if (w.rows) return size_t(r) * w.target_stride + c;
  if (w.columns) return size_t(c) * w.target_stride + r;
  return size_t(c / width) * w.target_stride + size_t(r) * width + c % width;
}

// Copies `w` from L0C+from through `put(index, value)`, which stores one element.
template <class T, class Sum, class Put>
TWIN_UNWATCHED void drain(size_t from, const Window& w, int first_row, int first_column, const Outlet& outlet, int width,
                          const char* what, Put put) {
  Memory& memory = cube_memory(Space::L0C, what);
  for (int c = 0; c < w.n; c += 16) {
    const int count = std::min(16, w.n - c), column = first_column + c;
    const size_t at = from + (size_t(column / 16) * w.source_stride + first_row) * 64;
    const uint8_t* data = cube(Space::L0C, place(at), size_t(w.m) * 64, PIPE_FIX, Access::read, what, 64);
    for (int r = 0; r < w.m; ++r) {
      require_defined(memory, place(at + size_t(r) * 64), size_t(count) * 4, PIPE_FIX, what);
      for (int i = 0; i < count; ++i) {
        Sum sum;
        std::memcpy(&sum, data + size_t(r) * 64 + i * 4, 4);
        put(target_of(w, r, c + i, width), leave<T>(sum, outlet));
      }
    }
  }
}

template <class T, class Sum>
TWIN_UNWATCHED Outlet outlet_of(QuantMode_t quant, asc_relu_pre_mode relu, bool clip, const char* what) {
  const CubeState& state = *machine().block->cube_state;
  if (!fits<T>(quant, std::is_same_v<Sum, int32_t>)) {
    fault("argument", what, PIPE_FIX, 0, "quantisation mode %d does not give the type of the destination",
          static_cast<int>(quant));
  }
  if (relu == asc_relu_pre_mode::SCALAR || relu == asc_relu_pre_mode::VECTOR || clip) {
    fault("unimplemented", what, PIPE_FIX, 0, "of the rectifiers only the normal one is modelled");
  }
  const bool scaled = quant != NoQuant && quant != F322F16 && quant != F322BF16;
  if (scaled && !state.quant_set) {
    fault("argument", what, PIPE_FIX, 0, "asc_set_l0c_copy_prequant was not called: the scale is not known");
  }
  return {quant, relu == asc_relu_pre_mode::NORMAL, state.quant_scale};
}

TWIN_UNWATCHED inline void require_shape(int m, int n, bool rows, bool columns, bool split, const char* what) {
  if (n < 1 || n > 4095 || m < 1) fault("argument", what, PIPE_FIX, 0, "%d x %d: n is 1 to 4095 and m from 1", m, n);
  if (rows && columns) fault("argument", what, PIPE_FIX, 0, "rows (nz2nd) and columns (nz2dn) at once");
  if (!rows && !columns && n % (split ? 8 : 16)) {
    fault("argument", what, PIPE_FIX, 0, "n is %d; without nz2nd it is a multiple of %d", n, split ? 8 : 16);
  }
  const CubeState& state = *machine().block->cube_state;
  if ((rows || columns) && !state.out_set) {
    fault("argument", what, PIPE_FIX, 0, "asc_set_l0c_copy_nz_para was not called: nz2nd and nz2dn need it");
  }
  if (columns && state.out_row_stride != 1) {
    fault("unimplemented", what, PIPE_FIX, 0, "nz2dn is modelled with asc_set_l0c_copy_channel_para(1), set %d",
          state.out_row_stride);
  }
}

// Bytes that a window of `T` covers from its first element, for one check of bounds and order per run.
template <class T, class Sum, class Open>
TWIN_UNWATCHED void store(size_t from, const Window& w, int first_row, int first_column, const Outlet& outlet, bool split,
                          const char* what, Open open) {
  const int width = split ? 8 : 16;
  const CubeState& state = *machine().block->cube_state;
  const int matrices = w.rows || w.columns ? state.out_matrices : 1;
  for (int matrix = 0; matrix < matrices; ++matrix) {
    const size_t source = from + size_t(matrix) * state.out_source_stride * 64;
    const size_t target = size_t(matrix) * state.out_target_stride;
    const int runs = w.rows ? w.m : (w.columns ? w.n : w.n / width);
    const size_t run = w.rows ? w.n : (w.columns ? size_t(w.m) : size_t(w.m) * width);
    for (int i = 0; i < runs; ++i) open(target + size_t(i) * w.target_stride, run);
    drain<T, Sum>(source, w, first_row, first_column, outlet, width, what,
                  [&](size_t index, T value) TWIN_UNWATCHED { open.put(target + index, value); });
  }
}

template <class T>
struct GlobalTarget {
  T* base;
  const char* what;
  TWIN_UNWATCHED void operator()(size_t index, size_t count) const {
    gm(base + index, count * sizeof(T), PIPE_FIX, Access::write, what);
  }
  TWIN_UNWATCHED void put(size_t index, T value) const {
    std::memcpy(static_cast<void*>(base + index), &value, sizeof(T));
  }
};

template <class T>
struct BufferTarget {
  Memory* memory;
  size_t base;
  const char* what;
  TWIN_UNWATCHED void operator()(size_t index, size_t count) const {
    local(*memory, place(base + index * sizeof(T)), count * sizeof(T), PIPE_FIX, Access::write, what);
  }
  TWIN_UNWATCHED void put(size_t index, T value) const {
    std::memcpy(memory->at(base + index * sizeof(T)), &value, sizeof(T));
  }
};

TWIN_UNWATCHED inline size_t l0c_bytes(const Window& w) {
  return (size_t(w.n - 1) / 16 * w.source_stride + w.m) * 64;
}

}  // namespace twin

// asc-devkit, docs: asc_set_l0c_copy_nz_para.md; the source's stride in 64 bytes, the destination's in elements.
TWIN_UNWATCHED inline void asc_set_l0c_copy_nz_para(uint16_t matrices, uint16_t source, uint32_t target) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.out_set = true;
  state.out_matrices = matrices;
  state.out_source_stride = source;
  state.out_target_stride = target;
}
// asc-devkit, docs: asc_set_l0c_copy_channel_para.md
TWIN_UNWATCHED inline void asc_set_l0c_copy_channel_para(uint16_t row_stride) {
  if (twin::on_cube()) twin::machine().block->cube_state->out_row_stride = row_stride;
}
// asc-devkit, docs: asc_set_l0c_copy_prequant.md: the scale keeps ten bits of its fraction.
TWIN_UNWATCHED inline void asc_set_l0c_copy_prequant(float scale, uint16_t, bool) {
  if (!twin::on_cube()) return;
  twin::CubeState& state = *twin::machine().block->cube_state;
  state.quant_set = true;
  state.quant_scale = std::bit_cast<float>(std::bit_cast<uint32_t>(scale) & ~uint32_t{0x1fff});
}

// asc-devkit, docs: asc_copy_l0c2gm_arch_3510.md
template <class T, class Sum>
TWIN_UNWATCHED inline void asc_copy_l0c2gm(T* dst, Sum* src, uint16_t n, uint16_t m, uint32_t dst_stride,
                                           uint16_t src_stride, asc_store_l2_cache_mode, asc_unit_flag_mode unit_flag,
                                           asc_quant_mode quant, asc_relu_pre_mode relu, bool split, bool nz2nd,
                                           bool nz2dn, bool clip) {
  using namespace twin;
  constexpr const char* what = "asc_copy_l0c2gm";
  if (!on_cube()) return;
  require_shape(m, n, nz2nd, nz2dn, split, what);
  const Outlet outlet = outlet_of<T, Sum>(quant, relu, clip, what);
  const Window window{m, n, src_stride, dst_stride, nz2nd, nz2dn};
  const size_t from = checked_sums(src, l0c_bytes(window), PIPE_FIX, 64, what);
  issue(PIPE_FIX, size_t(m) * n * sizeof(T));
  pass_unit_flags(from, l0c_bytes(window), PIPE_FIX, unit_flag, what);
  store<T, Sum>(from, window, 0, 0, outlet, split, what, GlobalTarget<T>{dst, what});
  turn_unit_flags(from, l0c_bytes(window), PIPE_FIX, unit_flag);
}

// asc-devkit, docs: asc_copy_l0c2ub.md. Split in two, each vector core gets its half at the same address of its buffer.
template <class T, class Sum>
TWIN_UNWATCHED inline void asc_copy_l0c2ub(T* dst, Sum* src, uint16_t n, uint16_t m, uint32_t dst_stride,
                                           uint16_t src_stride, int8_t vector, asc_dual_dst_mode dual,
                                           asc_unit_flag_mode unit_flag, asc_quant_mode quant, asc_relu_pre_mode relu,
                                           bool split, bool nz2nd, bool nz2dn, bool clip) {
  using namespace twin;
  constexpr const char* what = "asc_copy_l0c2ub";
  if (!on_cube()) return;
  require_shape(m, n, nz2nd, nz2dn, split, what);
  const Outlet outlet = outlet_of<T, Sum>(quant, relu, clip, what);
  if ((nz2nd && n * sizeof(T) % kBlockBytes) || (nz2dn && m * sizeof(T) % kBlockBytes) ||
      dst_stride * sizeof(T) % kBlockBytes) {
    fault("alignment", what, PIPE_FIX, 0, "lines of %d x %d and a stride of %u elements are not whole 32-byte blocks", m,
          n, dst_stride);
  }
  const bool by_rows = dual == asc_dual_dst_mode::DUAL_DST_SPLIT_M, by_columns = dual == asc_dual_dst_mode::DUAL_DST_SPLIT_N;
  if ((by_rows && m % 2) || (by_columns && n % 32) || ((by_rows || by_columns) && nz2dn)) {
    fault("argument", what, PIPE_FIX, 0, "%d x %d cannot be split for two vector cores that way", m, n);
  }
  const Window whole{m, n, src_stride, dst_stride, nz2nd, nz2dn};
  Window window = whole;
  if (by_rows) window.m = m / 2;
  if (by_columns) window.n = n / 2;
  const size_t from = checked_sums(src, l0c_bytes(whole), PIPE_FIX, 64, what);
  issue(PIPE_FIX, size_t(m) * n * sizeof(T));
  pass_unit_flags(from, l0c_bytes(whole), PIPE_FIX, unit_flag, what);
  for (int half_index = 0; half_index < (by_rows || by_columns ? 2 : 1); ++half_index) {
    Memory& memory = ub_of(by_rows || by_columns ? half_index : vector);
    local(memory, dst, 0, PIPE_FIX, Access::read, what, kBlockBytes);
    const BufferTarget<T> target{&memory, memory.offset_of(dst), what};
    store<T, Sum>(from, window, by_rows ? half_index * window.m : 0, by_columns ? half_index * window.n : 0, outlet, split,
                  what, target);
  }
  turn_unit_flags(from, l0c_bytes(whole), PIPE_FIX, unit_flag);
}
