// Products of the Cube: asc_mmad and, with block scales, asc_mmad_mx.
//
// Sums are kept in float32 (int32 for int8) and grow one product at a time, in the order of K. The device adds the
// products of a block in a tree of its own; how it rounds there is not public (README.md).
#pragma once

#include "cube_operands.h"

// asc-devkit, docs: asc_unit_flag_mode.md
enum class asc_unit_flag_mode : uint8_t { DISABLE = 0, ENABLE_KEEP = 2, ENABLE_UPDATE = 3 };

namespace twin {

// What an operand's block scales multiply: nothing, or 32 elements each.
struct NoScale {
  static constexpr bool used = false;
};
struct BlockScale {
  static constexpr bool used = true;
  Space space;
};

// asc-devkit, docs: UnitFlag.md. A block of L0C is written while its flag is clear and copied out while it is set.
TWIN_UNWATCHED inline void pass_unit_flags(size_t offset, size_t bytes, pipe_t pipe, asc_unit_flag_mode mode,
                                           const char* what) {
  if (mode == asc_unit_flag_mode::DISABLE || bytes == 0) return;
  const bool writes = pipe == PIPE_M;
  CubeState& state = *machine().block->cube_state;
  Core& core = *machine().core;
  for (size_t unit = offset / 1024; unit <= (offset + bytes - 1) / 1024; ++unit) {
    if (state.full[unit] == writes) {
      fault("deadlock", what, pipe, unit * 1024, "waits for ever: the unit flag of L0C+%zu is %s", unit * 1024,
            writes ? "still set, nothing copied the block out" : "clear, no mmad has finished the block");
    }
    core.learn(slot_of(pipe), state.unit[unit]);
  }
}
TWIN_UNWATCHED inline void turn_unit_flags(size_t offset, size_t bytes, pipe_t pipe, asc_unit_flag_mode mode) {
  if (mode != asc_unit_flag_mode::ENABLE_UPDATE || bytes == 0) return;
  CubeState& state = *machine().block->cube_state;
  const Clock now = machine().core->publish(slot_of(pipe));
  for (size_t unit = offset / 1024; unit <= (offset + bytes - 1) / 1024; ++unit) {
    state.full[unit] = pipe == PIPE_M;
    state.unit[unit] = now;
  }
}

// Rows of an operand, 32 bytes each, of which `bytes` take part in the product.
TWIN_UNWATCHED inline void require_rows(Memory& memory, size_t offset, int rows, int bytes, const char* what) {
#if TWIN_CHECKED
  const int step = bytes == kBlockBytes ? rows : 1;
  for (int r = 0; r < rows; r += step) {
    const size_t count = step == 1 ? bytes : static_cast<size_t>(rows) * kBlockBytes;
    require_defined(memory, place(offset + static_cast<size_t>(r) * kBlockBytes), count, PIPE_M,
                    what);
  }
#else
  (void)memory, (void)offset, (void)rows, (void)bytes, (void)what;
#endif
}

// One operand as values: [rows][k] for A, [k][rows] for B.
template <bool Transposed, class T, class Sum, class Scale>
TWIN_UNWATCHED void read_operand(Space space, const void* pointer, int rows, int k, Scale scale, Sum* out,
                                 const char* what) {
  constexpr int depth = elements_per_block<T>;
  const int groups = round_up(k, depth) / depth, padded = round_up(rows, kFractalRows);
  const size_t align = Scale::used && Element<T>::bits == 8 ? 1024 : 512;
  const uint8_t* data = cube(space, pointer, static_cast<size_t>(groups) * padded * kBlockBytes, PIPE_M, Access::read,
                             what, align);
  Memory& memory = cube_memory(space, what);
  const size_t offset = memory.offset_of(pointer);
  const uint8_t* scales = nullptr;
  if constexpr (Scale::used) {
    const size_t bytes = static_cast<size_t>(padded) * (k / 32);
    scales = cube(scale.space, place(offset / 16), bytes, PIPE_M, Access::read, what, 32);
    for (int fractal = 0; fractal < padded / kFractalRows; ++fractal) {
      const size_t at = offset / 16 + static_cast<size_t>(fractal) * (k / 64) * kBlockBytes;
      const int valid = std::min(rows - fractal * kFractalRows, kFractalRows);
      for (int pair = 0; pair < k / 64; ++pair) {
        require_defined(cube_memory(scale.space, what), place(at + pair * kBlockBytes),
                        valid * 2, PIPE_M, what);
      }
    }
  }
  const bool saturate = !Element<T>::integer && asc_get_saturation_flag(asc_saturation_mode::FLOAT);
  Sum block[64];
  for (int g = 0; g < groups; ++g) {
    const size_t line = static_cast<size_t>(g) * padded * kBlockBytes;
    const int count = std::min(depth, k - g * depth);
    require_rows(memory, offset + line, rows, count * Element<T>::bits / 8, what);
    for (int r = 0; r < rows; ++r) {
      decode(data + line + static_cast<size_t>(r) * kBlockBytes, block, T{});
      if constexpr (Scale::used) {
        for (int part = 0; part < depth / 32; ++part) {
          const int group = g * (depth / 32) + part;
          const size_t pair = static_cast<size_t>(r / 16) * (k / 64) + group / 2;
          const float factor = e8m0_value(scales[pair * kBlockBytes + r % 16 * 2 + group % 2]);
          for (int i = 0; i < 32; ++i) block[part * 32 + i] *= factor;
        }
      }
      if constexpr (!Element<T>::integer) {
        if (saturate) {
          for (int i = 0; i < count; ++i) block[i] = saturated<T>(block[i]);
        }
      }
      for (int i = 0; i < count; ++i) {
        const size_t column = static_cast<size_t>(g) * depth + i;
        out[Transposed ? column * rows + r : static_cast<size_t>(r) * k + column] = block[i];
      }
    }
  }
}

enum class Start { zero, sums, bias };

// Sums of L0C as [m][n] values, from where the instruction says that they begin.
template <class Sum>
TWIN_UNWATCHED void read_sums(const void* c, size_t bias, Start start, int m, int n, Sum* out, const char* what) {
  if (start == Start::zero) {
    std::memset(static_cast<void*>(out), 0, sizeof(Sum) * m * n);
    return;
  }
  if (start == Start::bias) {
    const auto* table = place(bias);
    const uint8_t* row = cube(Space::BIAS, table, round_up(n * 4, 64), PIPE_M, Access::read, what, 64);
    require_defined(cube_memory(Space::BIAS, what), table, n * 4, PIPE_M, what);
    for (int r = 0; r < m; ++r) std::memcpy(out + static_cast<size_t>(r) * n, row, sizeof(Sum) * n);
    return;
  }
  Memory& memory = cube_memory(Space::L0C, what);
  const size_t offset = memory.offset_of(c), padded = round_up(m, kFractalRows);
  for (int first = 0; first < n; first += 16) {
    const int width = std::min(16, n - first);
    const size_t at = offset + first / 16 * padded * 64;
    const uint8_t* column = cube(Space::L0C, place(at), static_cast<size_t>(m) * 64, PIPE_M,
                                 Access::read, what);
    for (int r = 0; r < m; ++r) {
      require_defined(memory, place(at + r * 64), width * 4, PIPE_M, what);
      std::memcpy(out + static_cast<size_t>(r) * n + first, column + r * 64, width * 4);
    }
  }
}

template <class Sum>
TWIN_UNWATCHED void write_sums(const void* c, int m, int n, const Sum* sums, const char* what) {
  const size_t offset = cube_memory(Space::L0C, what).offset_of(c), padded = round_up(m, kFractalRows);
  for (int first = 0; first < n; first += 16) {
    const int width = std::min(16, n - first);
    const size_t at = offset + first / 16 * padded * 64;
    uint8_t* column = cube(Space::L0C, place(at), static_cast<size_t>(m) * 64, PIPE_M,
                           Access::write, what);
    for (int r = 0; r < m; ++r) {
      std::memcpy(column + r * 64, sums + static_cast<size_t>(r) * n + first, width * 4);
      if (width == 16) continue;
      std::memset(column + r * 64 + width * 4, kPoison, (16 - width) * 4);
      for (int part = 0; part < 2; ++part) {
        const int valid = std::clamp(width - 8 * part, 0, 8) * 4;
        const auto bits = static_cast<uint32_t>((uint64_t{1} << valid) - 1);
        cube_memory(Space::L0C, what).set_defined_block(at + r * 64 + part * kBlockBytes, bits);
      }
    }
  }
}

// asc-devkit, docs: asc_mmad.md, constraints of synchronisation.
TWIN_UNWATCHED inline void require_apart(const void* c, int m, int n, const char* what) {
#if TWIN_CHECKED
  if ((m / 16) * (n / 16) >= 10) return;
  Core& core = *machine().core;
  Memory& memory = cube_memory(Space::L0C, what);
  const size_t offset = memory.offset_of(c);
  if (offset >= memory.bytes) return;
  const Cell& cell = memory.cell(offset / kCell);
  const int slot = slot_of(PIPE_M);
  if (cell.writer == core.thread(slot) && cell.write_clock > core.known[slot]) {
    fault("race", what, PIPE_M, offset,
          "adds to L0C+%zu, which the mmad before wrote: a product of %d x %d needs asc_sync_pipe(PIPE_M) between",
          offset, m, n);
  }
#else
  (void)c, (void)m, (void)n, (void)what;
#endif
}

template <class A, class B, class C, class ScaleA, class ScaleB>
TWIN_UNWATCHED void multiply(C* c, const A* a, const B* b, int m, int k, int n, asc_unit_flag_mode unit, bool gemv,
                             Start start, size_t bias, ScaleA scale_a, ScaleB scale_b, const char* what) {
  if (!on_cube() || m == 0 || k == 0 || n == 0) return;
  using Sum = C;
  issue(PIPE_M);
  if (m > 4095 || k > 4095 || n > 4095) {
    fault("argument", what, PIPE_M, 0, "%d x %d x %d: the sizes of a product end at 4095", m, k, n);
  }
  if (ScaleA::used && k % 64) fault("argument", what, PIPE_M, 0, "k is %d, not a multiple of 64", k);
  const size_t bytes = static_cast<size_t>(round_up(n, 16)) / 16 * round_up(m, kFractalRows) * 64;
  const size_t offset = checked_sums(c, bytes, PIPE_M, 1024, what);
  static Values<Sum> left, right, sums;
  Sum* x = left.at_least(static_cast<size_t>(m) * k);
  Sum* w = right.at_least(static_cast<size_t>(n) * k);
  Sum* y = sums.at_least(static_cast<size_t>(m) * n);
  // As a vector A lies row by row, in blocks that follow one another; with one row that is where Nz puts every 16th.
  if (gemv && m == 1) fault("unimplemented", what, PIPE_M, 0, "m is 1 and disable_gemv is false: set it");
  read_operand<false, A>(Space::L0A, a, m, k, scale_a, x, what);
  read_operand<true, B>(Space::L0B, b, n, k, scale_b, w, what);
  pass_unit_flags(offset, bytes, PIPE_M, unit, what);
  if (start == Start::sums) require_apart(c, m, n, what);
  read_sums(c, bias, start, m, n, y, what);
  Product<Sum>::add(x, w, y, m, k, n);
  if constexpr (!Element<A>::integer) {
    if (asc_get_saturation_flag(asc_saturation_mode::FLOAT)) {
      for (size_t i = 0; i < static_cast<size_t>(m) * n; ++i) y[i] = saturated<float>(y[i]);
    }
  }
  write_sums(c, m, n, y, what);
  turn_unit_flags(offset, bytes, PIPE_M, unit);
  const uint64_t steps = static_cast<uint64_t>(round_up(k, depth_per_cycle<A>)) / depth_per_cycle<A>;
  machine().counters.cube_cycles += steps * (round_up(m, 16) / 16) * (round_up(n, 16) / 16);
}

TWIN_UNWATCHED constexpr Start start_of(bool from_bias, bool zero) {
  return zero ? Start::zero : (from_bias ? Start::bias : Start::sums);
}

// Pairs of types that the instructions take. asc-devkit, docs: asc_mmad.md and asc_mmad_mx.md, tables of types.
template <class T>
inline constexpr bool is_fp8 = std::is_same_v<T, float8_e4m3_t> || std::is_same_v<T, float8_e5m2_t>;
template <class T>
inline constexpr bool is_fp4 = std::is_same_v<T, float4_e2m1x2_t> || std::is_same_v<T, float4_e1m2x2_t>;
template <class A, class B, class C>
concept PlainProduct = (std::is_same_v<C, int32_t> && std::is_same_v<A, int8_t> && std::is_same_v<B, int8_t>) ||
                       (std::is_same_v<C, float> &&
                        ((std::is_same_v<A, B> && (std::is_same_v<A, bfloat16_t> || std::is_same_v<A, half> ||
                                                   std::is_same_v<A, float>)) ||
                         (is_fp8<A> && is_fp8<B>)));
template <class A, class B>
concept ScaledProduct = (is_fp8<A> && is_fp8<B>) || (is_fp4<A> && is_fp4<B>);

}  // namespace twin

// asc-devkit, docs: asc_mmad.md (NPU architecture 3510)
template <class C, class A, class B>
  requires twin::PlainProduct<A, B, C>
TWIN_UNWATCHED inline void asc_mmad(C* c, A* a, B* b, uint16_t m, uint16_t k, uint16_t n, asc_unit_flag_mode unit_flag,
                                    bool disable_gemv, bool from_bias, bool zero) {
  twin::multiply(c, a, b, m, k, n, unit_flag, !disable_gemv, twin::start_of(from_bias, zero), 0, twin::NoScale{},
                 twin::NoScale{}, "asc_mmad");
}
template <class C, class A, class B>
  requires twin::PlainProduct<A, B, C>
TWIN_UNWATCHED inline void asc_mmad(C* c, A* a, B* b, uint64_t bias, uint16_t m, uint16_t k, uint16_t n,
                                    asc_unit_flag_mode unit_flag, bool disable_gemv) {
  twin::multiply(c, a, b, m, k, n, unit_flag, !disable_gemv, twin::Start::bias, bias, twin::NoScale{},
                 twin::NoScale{}, "asc_mmad");
}
// Generated text gives the unit flag as a number.
template <class C, class A, class B>
  requires twin::PlainProduct<A, B, C>
TWIN_UNWATCHED inline void asc_mmad(C* c, A* a, B* b, uint16_t m, uint16_t k, uint16_t n, uint32_t unit_flag,
                                    bool disable_gemv, bool from_bias, bool zero) {
  asc_mmad(c, a, b, m, k, n, static_cast<asc_unit_flag_mode>(unit_flag), disable_gemv, from_bias, zero);
}

// asc-devkit, docs: asc_mmad_mx.md. Scales of A lie in L0A_MX at the address of A divided by 16, those of B likewise.
template <class A, class B>
  requires twin::ScaledProduct<A, B>
TWIN_UNWATCHED inline void asc_mmad_mx(float* c, A* a, B* b, uint16_t m, uint16_t k, uint16_t n,
                                       asc_unit_flag_mode unit_flag, bool disable_gemv, bool from_bias, bool zero) {
  twin::multiply(c, a, b, m, k, n, unit_flag, !disable_gemv, twin::start_of(from_bias, zero), 0,
                 twin::BlockScale{twin::Space::L0A_MX}, twin::BlockScale{twin::Space::L0B_MX}, "asc_mmad_mx");
}
template <class A, class B>
  requires twin::ScaledProduct<A, B>
TWIN_UNWATCHED inline void asc_mmad_mx(float* c, A* a, B* b, uint64_t bias, uint16_t m, uint16_t k, uint16_t n,
                                       asc_unit_flag_mode unit_flag, bool disable_gemv) {
  twin::multiply(c, a, b, m, k, n, unit_flag, !disable_gemv, twin::Start::bias, bias,
                 twin::BlockScale{twin::Space::L0A_MX}, twin::BlockScale{twin::Space::L0B_MX}, "asc_mmad_mx");
}
template <class A, class B>
  requires twin::ScaledProduct<A, B>
TWIN_UNWATCHED inline void asc_mmad_mx(float* c, A* a, B* b, uint16_t m, uint16_t k, uint16_t n, uint32_t unit_flag,
                                       bool disable_gemv, bool from_bias, bool zero) {
  asc_mmad_mx(c, a, b, m, k, n, static_cast<asc_unit_flag_mode>(unit_flag), disable_gemv, from_bias, zero);
}

// asc-devkit, docs: asc_set_mmad_direction_m.md, _n.md: in which order blocks of L0C are finished, never their values.
TWIN_UNWATCHED inline void asc_set_mmad_direction_m() { asc_set_ctrl(asc_get_ctrl() & ~(int64_t{1} << 51)); }
TWIN_UNWATCHED inline void asc_set_mmad_direction_n() { asc_set_ctrl(asc_get_ctrl() | int64_t{1} << 51); }

// asc-devkit, docs: asc_disable_hf32.md, asc_disable_hif8.md: what holds here anyway.
TWIN_UNWATCHED inline void asc_disable_hf32() {}
TWIN_UNWATCHED inline void asc_disable_hif8() {}
