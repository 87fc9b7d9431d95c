// Warpgroup products, and what else kernels of products and of attention need. The end of `cuda_on_cpu.h`.
//
// A product is summed when it is issued, along K in float32, by each thread its own share. Of a first operand in registers a
// warp's threads exchange what they hold, and wait for nobody else.

#pragma once

namespace simt {
inline Place3 grid;
}
#define gridDim (simt::grid)

// --- operands -----------------------------------------------------------------------------------------------------------

// Where a descriptor with the 128-byte swizzle has a row's byte; from 128 on, in the atoms behind.
inline u32 place_of_operand(u64 descriptor, int row, int byte) {
  const u32 stride = (descriptor >> 32 & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  const u32 plain = ((descriptor & 0x3FFF) << 4) + (row >> 3) * stride + (row & 7) * 128 + (byte >> 7) * leading + (byte & 127);
  return plain ^ (plain >> 7 & 7) << 4;
}
// A product of the warp reads so many bytes of rows that run along K, from the descriptor's place on.
inline void products_read_rows(u64 rows, int first, int count, int bytes) {
  if (simt::current % 32 != 0) return;
  for (int r = first; r < first + count; r++) {
    for (int k = 0; k < bytes; k += 16) order::products_read(simt::memory() + place_of_operand(rows, r, k), 16);
  }
}
// A product of the warp reads columns that run along K, sixteen deep, from the descriptor's place on.
inline void products_read_columns(u64 columns, int count) {
  if (simt::current % 32 != 0) return;
  for (int k = 0; k < 16; k++) {
    for (int c = 0; c < count; c += 8) order::products_read(simt::memory() + place_of_operand(columns, k, 2 * c), 16);
  }
}
inline const float* e4m3_values() {
  static const std::vector<float> values = [] {
    std::vector<float> made(256);
    for (u32 code = 0; code < 256; code++) made[code] = e4m3_value(code);
    return made;
  }();
  return values.data();
}
template <bool Eight>
constexpr int kDeep = Eight ? 32 : 16;  // a product's share of K

// What an operand in shared memory has along K in row r, or, where its columns run along K, in column r.
template <bool Transposed, bool Eight>
UNSEEN void read_operand(float (&values)[kDeep<Eight>], u64 descriptor, int r) {
  const u8* const memory = simt::memory();
  for (int k = 0; k < kDeep<Eight>; k++) {
    if (Eight) {
      values[k] = e4m3_values()[memory[place_of_operand(descriptor, r, k)]];
    } else {
      const u8* const two = memory + (Transposed ? place_of_operand(descriptor, k, 2 * r) : place_of_operand(descriptor, r, 2 * k));
      values[k] = bf16_value(two[0] | two[1] << 8);
    }
  }
}

// --- products -----------------------------------------------------------------------------------------------------------

// The thread's share of a product, of which it has two rows of the first operand.
template <int Width, bool Transposed, bool Eight>
void sum_product(float* d, const float (&upper)[kDeep<Eight>], const float (&lower)[kDeep<Eight>], u64 b, u32 accumulate) {
  if (Transposed) products_read_columns(b, Width);
  else products_read_rows(b, 0, Width, 32);
  for (int i = 0; i < Width / 2; i += (i & 1) == 0 ? 1 : 3) {
    float values[kDeep<Eight>], of_upper = accumulate ? d[i] : 0.f, of_lower = accumulate ? d[i + 2] : 0.f;
    read_operand<Transposed, Eight>(values, b, i / 4 * 8 + (simt::current & 3) * 2 + (i & 1));
    for (int k = 0; k < kDeep<Eight>; k++) {
      of_upper += upper[k] * values[k];
      of_lower += lower[k] * values[k];
    }
    d[i] = of_upper;
    d[i + 2] = of_lower;
  }
}
// 64 rows by so many columns, both operands in shared memory.
template <int Width, bool Transposed, bool Eight, int N>
void product(float (&d)[N], u64 a, u64 b, u32 accumulate) {
  const int row = simt::current % simt::per_block / 32 % 4 * 16;
  float upper[kDeep<Eight>], lower[kDeep<Eight>];
  products_read_rows(a, row, 16, 32);
  read_operand<false, Eight>(upper, a, row + (simt::current & 31) / 4);
  read_operand<false, Eight>(lower, a, row + (simt::current & 31) / 4 + 8);
  sum_product<Width, Transposed, Eight>(d, upper, lower, b, accumulate);
}
// The same with the first operand in registers: a thread holds neighbours along K, of rows r and r + 8 in turn.
template <int Width, bool Transposed, bool Eight, int N>
void product(float (&d)[N], const u32* a, u64 b, u32 accumulate) {
  static std::vector<u32> given;
  given.resize(simt::threads.size() * 4);
  std::memcpy(&given[simt::current * 4], a, 16);
  simt::meet(simt::exchanges[simt::current / 32], 32);
  constexpr int neighbours = Eight ? 4 : 2;
  const auto held = [&](int half, int k) -> float {
    const u32 word = given[(simt::current / 4 * 4 + k / neighbours % 4) * 4 + k / (4 * neighbours) * 2 + half];
    return Eight ? e4m3_values()[word >> k % 4 * 8 & 0xFFu] : bf16_value(word >> k % 2 * 16 & 0xFFFFu);
  };
  float upper[kDeep<Eight>], lower[kDeep<Eight>];
  for (int k = 0; k < kDeep<Eight>; k++) {
    upper[k] = held(0, k);
    lower[k] = held(1, k);
  }
  simt::meet(simt::exchanges[simt::current / 32], 32);
  sum_product<Width, Transposed, Eight>(d, upper, lower, b, accumulate);
}

// --- matrices of 8 x 8 values that a warp's lanes hold in pairs -----------------------------------------------------------

inline void store_matrices(u32 row, u32 a, u32 b, u32 c, u32 d) {
  const int own = simt::current & 31;
  const u32 values[4] = {a, b, c, d};
  for (int i = 0; i < 4; i++) simt::put(simt::lane(row, 8 * i + own / 4) + own % 4 * 4, values[i]);
}
inline u32 transpose_pairs(u32 a) {
  const int own = simt::current & 31;
  const u32 even = simt::lane(a, own % 4 * 8 + own / 8), odd = simt::lane(a, own % 4 * 8 + 4 + own / 8);
  return own / 4 % 2 == 0 ? (even & 0xFFFFu) | odd << 16 : even >> 16 | (odd & 0xFFFF0000u);
}

// --- copies, and the other blocks of a cluster ----------------------------------------------------------------------------

UNSEEN inline void copy_box_out(const TensorMap* map, int x, int y, u32 from) {
  const u64* const words = reinterpret_cast<const u64*>(map);
  order::copied_from(simt::far(from), words[4] * 128, CALLED_FROM);
  for (u32 r = 0; r < words[4]; r++) {
    for (u32 chunk = 0; chunk < 8; chunk++) {
      const u64 row = y + r, column = x + chunk * 8;
      u8* const to = reinterpret_cast<u8*>(words[0]) + row * words[1] + column * 2;
      if (row < words[2] && column < words[3]) std::memcpy(to, simt::far(from + r * 128 + (chunk ^ r % 8) * 16), 16);
    }
  }
}
UNSEEN inline void arrive_after_copies(u32 barrier) {
  order::read(simt::far(barrier), 8);
  order::give_own_copies(arrivals_at(barrier).so_far);
  shared_barrier(barrier).missing--;
  barrier_turn(barrier);
}
inline void store_far_f32(u32 far, float v) { simt::put(far, v); }
inline float load_far_f32(u32 far) { return simt::get<float>(far); }
inline void load_far_16(u32 (&v)[4], u32 far) { load_16(v, far); }

// --- numbers ------------------------------------------------------------------------------------------------------------

inline float power_of_two(float x) {
  const float r = std::exp2(x);
  return r < 0x1p-126f ? 0.f : r;
}
inline float __log2f(float x) { return std::log2(x); }
inline u32 signed_half_bits(float v) { return __float_as_uint(v) >> 16 & 0x8000u | (v != v ? 0x7FFFu : half_bits(std::fabs(v))); }
inline u32 round_half_pair(float low, float high) { return signed_half_bits(low) | signed_half_bits(high) << 16; }
inline float half_value(u32 bits) {
  const u32 exponent = bits >> 10 & 31u, mantissa = bits & 1023u;
  const float size = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.f + mantissa, static_cast<int>(exponent) - 25);
  return (exponent == 31 ? mantissa != 0 ? NAN : INFINITY : size) * (bits & 0x8000u ? -1.f : 1.f);
}
inline void widen_half_pair(float& low, float& high, u32 pair) {
  low = half_value(pair & 0xFFFFu);
  high = half_value(pair >> 16);
}
