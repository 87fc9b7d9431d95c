// Operands of the Cube: where an element of a matrix lies in L0A, L0B and L0C, and its value.
//
// A matrix comes in blocks of 32 bytes along K, `depth` elements each; 16 blocks of neighbouring rows are a fractal, and
// fractals follow one another along the rows first (Nz). L0B holds B as Zn, whose bytes are those of B^T as Nz, so both
// operands have the same addresses here: block (g, r) of `rows` rows lies at (g * round_up(rows, 16) + r) * 32.
#pragma once

#include "control.h"
#include "numbers.h"

namespace twin {

inline constexpr int kFractalRows = 16;
inline constexpr int kBlockBytes = 32;

TWIN_UNWATCHED constexpr int round_up(int value, int unit) { return (value + unit - 1) / unit * unit; }

// An offset as a pointer, which is what intrinsics take.
TWIN_UNWATCHED inline const void* place(size_t offset) { return reinterpret_cast<const void*>(offset); }

// Sums in L0C are within it and aligned; whether they may be touched yet is asked when they are.
TWIN_UNWATCHED inline size_t checked_sums(const void* pointer, size_t bytes, pipe_t pipe, size_t align, const char* what) {
  Memory& memory = cube_memory(Space::L0C, what);
  local(memory, pointer, 0, pipe, Access::read, what, align);
  const size_t offset = memory.offset_of(pointer);
  if (offset + bytes > memory.bytes) {
    fault("bounds", what, pipe, offset, "sums of %zu bytes from L0C+%zu end past its %zu bytes", bytes, offset,
          memory.bytes);
  }
  return offset;
}

// Bits of an element, and whether a sum of its products is kept in int32 (else in float32).
template <class T>
struct Element {
  static constexpr int bits = sizeof(T) * 8;
  static constexpr bool integer = false;
};
template <>
struct Element<int8_t> {
  static constexpr int bits = 8;
  static constexpr bool integer = true;
};
template <>
struct Element<float4_e2m1x2_t> {
  static constexpr int bits = 4;
  static constexpr bool integer = false;
};
template <>
struct Element<float4_e1m2x2_t> {
  static constexpr int bits = 4;
  static constexpr bool integer = false;
};
template <class T>
inline constexpr int elements_per_block = kBlockBytes * 8 / Element<T>::bits;

// Products a core finishes per cycle along K, for a 16 x 16 result: 4096 of bfloat16 in all. Of float32 the documents do
// not say; a quarter is what the generation before does.
template <class T>
inline constexpr int depth_per_cycle = Element<T>::bits == 32 ? 4 : 256 / Element<T>::bits;

template <class Format>
struct NibbleTable {
  float value[16] = {};
  constexpr NibbleTable() {
    for (int code = 0; code < 16; ++code) value[code] = decode_float<Format>(code);
  }
};
template <class Format>
inline constexpr NibbleTable<Format> nibble_table{};

// The values of one 32-byte block.
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, float) { std::memcpy(out, block, kBlockBytes); }
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, bfloat16_t) {
  for (int i = 0; i < 16; ++i) {
    uint16_t bits;
    std::memcpy(&bits, block + 2 * i, 2);
    out[i] = bfloat16_value(bits);
  }
}
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, half) {
  for (int i = 0; i < 16; ++i) {
    half value;
    std::memcpy(&value, block + 2 * i, 2);
    out[i] = static_cast<float>(value);
  }
}
TWIN_UNWATCHED inline void decode(const uint8_t* block, int32_t* out, int8_t) {
  for (int i = 0; i < 32; ++i) out[i] = static_cast<int8_t>(block[i]);
}
TWIN_UNWATCHED inline void decode_bytes(const uint8_t* block, float* out, const float* table) {
  for (int i = 0; i < 32; ++i) out[i] = table[block[i]];
}
TWIN_UNWATCHED inline void decode_nibbles(const uint8_t* block, float* out, const float* table) {
  for (int i = 0; i < 32; ++i) {
    out[2 * i] = table[block[i] & 15];
    out[2 * i + 1] = table[block[i] >> 4];
  }
}
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, float8_e4m3_t) {
  decode_bytes(block, out, byte_table<E4M3>.value);
}
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, float8_e5m2_t) {
  decode_bytes(block, out, byte_table<E5M2>.value);
}
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, float4_e2m1x2_t) {
  decode_nibbles(block, out, nibble_table<E2M1>.value);
}
TWIN_UNWATCHED inline void decode(const uint8_t* block, float* out, float4_e1m2x2_t) {
  decode_nibbles(block, out, nibble_table<E1M2>.value);
}

// Room for the operands of one instruction as values; kept, since every mmad needs it.
template <class Sum>
class Values {
 public:
  TWIN_UNWATCHED Sum* at_least(size_t count) {
    if (count > size_) {
      delete[] data_;
      data_ = new Sum[count];
      size_ = count;
    }
    return data_;
  }

 private:
  Sum* data_ = nullptr;
  size_t size_ = 0;
};

// c[m][n] += a[m][k] b[k][n]; each sum grows in the order of k. Four rows share what is read of b.
template <class Sum>
struct Product {
  static __attribute__((optimize("O3"))) TWIN_UNWATCHED void add(const Sum* a, const Sum* b, Sum* c, int m, int k,
                                                                int n) {
    int row = 0;
    for (; row + 4 <= m; row += 4) {
      const Sum* x = a + static_cast<size_t>(row) * k;
      Sum* y = c + static_cast<size_t>(row) * n;
      for (int i = 0; i < k; ++i) {
        const Sum x0 = x[i], x1 = x[k + i], x2 = x[2 * k + i], x3 = x[3 * k + i];
        const Sum* line = b + static_cast<size_t>(i) * n;
        for (int j = 0; j < n; ++j) {
          y[j] += x0 * line[j];
          y[n + j] += x1 * line[j];
          y[2 * n + j] += x2 * line[j];
          y[3 * n + j] += x3 * line[j];
        }
      }
    }
    for (; row < m; ++row) {
      const Sum* x = a + static_cast<size_t>(row) * k;
      Sum* y = c + static_cast<size_t>(row) * n;
      for (int i = 0; i < k; ++i) {
        const Sum value = x[i];
        const Sum* line = b + static_cast<size_t>(i) * n;
        for (int j = 0; j < n; ++j) y[j] += value * line[j];
      }
    }
  }
};

// CTRL[48] is 0: before a product NaN becomes 0 and infinity the largest value of its format.
template <class T>
TWIN_UNWATCHED inline float saturated(float value) {
  if (value != value) return 0.0f;
  constexpr float largest = std::is_same_v<T, float8_e5m2_t>  ? 57344.0f
                            : std::is_same_v<T, half>         ? 65504.0f
                            : std::is_same_v<T, bfloat16_t>   ? 0x1.fep127f
                                                              : std::numeric_limits<float>::max();
  return value > largest ? largest : (value < -largest ? -largest : value);
}

}  // namespace twin
