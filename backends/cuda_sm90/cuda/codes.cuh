// Codes of rows of bfloat16 without divisions and comparisons: eight significant bits allow it. A value over a scale that is
// an e4m3 number or a power of two is a tie between two codes exactly, or is away from it by 2^-8 of itself, which the nearest
// half-precision number still shows. Kinds: 1 e4m3 under ue8m0 scales, 2 e2m1 under such scales, 3 e2m1 under e4m3 scales.

constexpr u32 kWhole = 0xFFFFFFFFu;  // all lanes of a warp

__device__ __forceinline__ void load_four(float* v, const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  v[0] = four.x;
  v[1] = four.y;
  v[2] = four.z;
  v[3] = four.w;
}
__device__ __forceinline__ u32 e4m3_codes(float low, float high) {
  u16 r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ float e4m3_value(u32 code) {
  u32 r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<u16>(code)));
  float v;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}" : "=f"(v) : "r"(r));
  return v;
}
__device__ __forceinline__ float power_value(u32 code) {  // of a ue8m0 code
  return __uint_as_float(code == 0u ? 0x00400000u : code == 255u ? 0x7FC00000u : code << 23);
}

// The scale code of a group from the bits of its largest magnitude, a bfloat16; NaN sorts above every number. The least power
// of two that is not below amax / 448 or amax / 6 follows from the mantissa: 448 is 1.75 * 2^8, and 6 is 1.5 * 2^2.
template <int kind>
__device__ __forceinline__ u32 scale_code(u32 largest) {
  const float amax = __uint_as_float(largest);
  if (kind == 3) {  // amax times the float next to 1 / 6 rounds to the quotient where that is a tie of e4m3
    const u32 code = e4m3_codes(fminf(fmaxf(__fmul_rn(amax, 0x1.555556p-3f), 0x1p-9f), 448.f), 0.f) & 0xFFu;
    return largest < 0x7F800000u ? code : 0x7Fu;
  }
  const u32 code = kind == 1 ? ((max(largest, __float_as_uint(1e-4f)) + 0x1FFFFFu) >> 23) - 8u
                             : ((max(largest, __float_as_uint(6.f * 0x1p-126f)) + 0x3FFFFFu) >> 23) - 2u;
  return largest < 0x7F800000u ? code : 255u;
}

// Two numbers that are not negative as half precision, and the smaller ones of two such pairs.
__device__ __forceinline__ u32 half_pair(float low, float high) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}
__device__ __forceinline__ u32 smaller_halves(u32 a, u32 b) {
  u32 r;
  asm("min.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}
// Codes of a bfloat16 pair, bits 0 to 3 and 16 to 19. Times 2^-14 the exponents of e2m1 are the lowest of half precision,
// subnormal numbers included, so rounding to the code's one bit of mantissa, ties to even, is an addition to the bits.
__device__ __forceinline__ u32 e2m1_pair(u32 pair, float factor) {
  const u32 sizes = half_pair(fabsf(low_value(pair)) * factor, fabsf(high_value(pair)) * factor);
  const u32 kept = smaller_halves(sizes, 0x0E000E00u);  // 6, the largest code
  return (kept + 0x00FF00FFu + (kept >> 9 & 0x00010001u)) >> 9 & 0x00070007u | (pair >> 12 & 0x00080008u);
}
// Eight codes of such pairs, the first in the lowest bits.
__device__ __forceinline__ u32 eight_codes(const u32 (&pairs)[4], float factor) {
  const u32 first = e2m1_pair(pairs[0], factor) | e2m1_pair(pairs[1], factor) << 8;
  const u32 second = e2m1_pair(pairs[2], factor) | e2m1_pair(pairs[3], factor) << 8;
  return __byte_perm(first, second, 0x5410) | __byte_perm(first, second, 0x7632) << 4;
}

// --- e2m1 under a power of two, in packed bfloat16 ---------------------------------------------------------------------------

__device__ __forceinline__ u32 add_product_pair(u32 a, u32 b, u32 c) {  // a b + c, rounded once, with subnormals
  u32 r;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}
constexpr u32 kWholeSteps = 0x43004300u;  // 128 twice: what is added to it rounds to whole numbers, ties to even, its lowest bits

// The magnitudes' codes of a pair, above `kWholeSteps`. Over its scale a size of at most 6 has steps of a half up to 2, of 1
// up to 4 and of 2 from there: the code is the least of what sizes rounded to each of the three would have.
__device__ __forceinline__ u32 size_codes(u32 pair, u32 twice, u32 once, u32 half) {
  const u32 size = pair & 0x7FFF7FFFu;
  return __vimin3_u16x2(add_product_pair(size, twice, kWholeSteps), add_product_pair(size, once, kWholeSteps + 0x00020002u),
                        add_product_pair(size, half, kWholeSteps + 0x00040004u));
}
// Four codes, signs included, in the upper half. `a` and `b` are the `size_codes` of the first and of the second pair. Sums
// and products, as whole registers wrap around, are those of shifts: multipliers have time where the units of bits have none.
__device__ __forceinline__ u32 four_codes(u32 a, u32 b, u32 first, u32 second) {
  const u32 sizes = a * 16u + (b * 4096u - kWholeSteps * (16u + 4096u));  // of values 0, 2, 1 and 3, in upper halves of bytes
  return (sizes | (__byte_perm(first, second, 0x7351) & 0x80808080u)) * (1u + 4096u);
}
// As `eight_codes`, with one over the scale, a power of two, as a pair; half of it may be subnormal.
__device__ __forceinline__ u32 eight_codes_by_power(const u32 (&pairs)[4], u32 factor) {
  const u32 twice = multiply_pair(factor, 0x40004000u), half = multiply_pair(factor, 0x3F003F00u);
  u32 sizes[4];
#pragma unroll
  for (int i = 0; i < 4; i++) sizes[i] = size_codes(pairs[i], twice, factor, half);
  return __byte_perm(four_codes(sizes[0], sizes[1], pairs[0], pairs[1]), four_codes(sizes[2], sizes[3], pairs[2], pairs[3]), 0x7632);
}

// Turns four neighbouring pairs, each rounded to bfloat16 afterwards.
__device__ __forceinline__ void rotate(u32 (&pairs)[4], const float (&cosine)[4], const float (&sine)[4]) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const float even = low_value(pairs[i]), odd = high_value(pairs[i]);
    const float turned = __fsub_rn(__fmul_rn(even, cosine[i]), __fmul_rn(odd, sine[i]));
    pairs[i] = round_pair(turned, __fadd_rn(__fmul_rn(even, sine[i]), __fmul_rn(odd, cosine[i])));
  }
}
// Bits of the largest magnitudes of four pairs, one among the first values and one among the second.
__device__ __forceinline__ u32 largest_pair(const u32 (&pairs)[4]) {
  u32 largest = 0;
#pragma unroll
  for (int i = 0; i < 4; i++) largest = __vmaxu2(largest, pairs[i] & 0x7FFF7FFFu);
  return largest;
}
// Of the largest magnitude among the pairs of so many neighbouring lanes.
template <int lanes>
__device__ __forceinline__ u32 largest_of(const u32 (&pairs)[4]) {
  u32 largest = largest_pair(pairs);
#pragma unroll
  for (int step = 1; step < lanes; step *= 2) largest = __vmaxu2(largest, __shfl_xor_sync(kWhole, largest, step));
  return max(largest << 16, largest & 0xFFFF0000u);
}
