// Elementary functions in fp32 whose bits are the same in scalar code, in vector code and on every machine.
//
// Only + - * /, comparisons and bit moves, in the order written (the module is compiled without contraction), and no
// branches, so loops over them vectorise. NaN stays NaN. Coefficients are our own fits. exp_f32, log_f32 and log1p_f32
// are within 1 ulp, the others within 3 (measured on every 97th float), silu_f32 below -87 within 1e-43.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

// One function, several instruction sets: the arithmetic is the same, only the width of the registers differs.
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define DEEPINFER_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DEEPINFER_CLONES
#endif

// Helpers must land inside each clone: a call would return to the baseline instruction set.
#if defined(__GNUC__)
#define DEEPINFER_INLINE inline __attribute__((always_inline))
#else
#define DEEPINFER_INLINE inline
#endif

namespace deepinfer::cpu {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

DEEPINFER_INLINE std::uint32_t bits_of(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

DEEPINFER_INLINE float float_of(std::uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// 16 leading bits of ln 2 (so that a small integer times it is exact), and the rest.
constexpr float kLn2Hi = 0x1.62e4p-1F;
constexpr float kLn2Lo = 0x1.7f7d1cp-20F;

// e^x. Overflow gives inf; below -104, 0; results between are rounded once, also denormal ones.
DEEPINFER_INLINE float exp_f32(float x) {
    constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer, kept in the low bits
    float y = x < -104.0F ? -104.0F : x;
    y = y > 89.0F ? 89.0F : y;
    const float shifted = y * 0x1.715476p+0F + kRound;
    const float n = shifted - kRound;
    const float r = (y - n * kLn2Hi) - n * kLn2Lo;
    float q = 0x1.6a235p-10F;
    q = q * r + 0x1.123a6cp-7F;
    q = q * r + 0x1.5558f4p-5F;
    q = q * r + 0x1.555490p-3F;
    q = q * r + 0x1.fffffcp-2F;
    const float p = 1.0F + (r + (r * r) * q);
    // 2^n in two factors: the first product is exact, so a denormal result is rounded only once
    const std::int32_t exponent = static_cast<std::int32_t>(bits_of(shifted) - bits_of(kRound));
    const std::int32_t half = exponent >> 1;
    const float scale1 = float_of(static_cast<std::uint32_t>(half + 127) << 23);
    const float scale2 = float_of(static_cast<std::uint32_t>(exponent - half + 127) << 23);
    return p * scale1 * scale2;
}

// ln(u) + correction, for u > 0 and finite; the correction is added before the last rounding.
DEEPINFER_INLINE float log_core(float u, float correction) {
    const bool small = u < 0x1p-126F;
    const float scaled = small ? u * 0x1p23F : u;
    // m in [sqrt(1/2), sqrt(2)): move the exponent boundary to the bits of sqrt(1/2)
    const std::uint32_t offset = bits_of(scaled) - 0x3f3504f3U;
    const std::int32_t exponent = static_cast<std::int32_t>(offset) >> 23;
    const float m = float_of((offset & 0x007fffffU) + 0x3f3504f3U);
    const float e = static_cast<float>(exponent) - (small ? 23.0F : 0.0F);
    const float f = m - 1.0F;
    const float s = f / (2.0F + f);  // ln(1 + f) = 2 atanh(s)
    const float z = s * s;
    float tail = 0x1.31eap-2F;
    tail = tail * z + 0x1.995e7cp-2F;
    tail = tail * z + 0x1.55557ap-1F;
    tail = tail * z;
    return e * kLn2Hi + (f - (s * (f - tail) - (e * kLn2Lo + correction)));
}

// ln x. 0 gives -inf, negative numbers NaN, +inf itself.
DEEPINFER_INLINE float log_f32(float x) {
    float y = log_core(x, 0.0F);
    y = x == kInf ? kInf : y;
    y = x == 0.0F ? -kInf : y;
    return x >= 0.0F ? y : kNaN;  // false for NaN too
}

// ln(1 + x), accurate near 0. -1 gives -inf, below it NaN, +inf itself.
DEEPINFER_INLINE float log1p_f32(float x) {
    const float u = 1.0F + x;
    const float lost = x > 1.0F ? 1.0F - (u - x) : x - (u - 1.0F);  // what the addition dropped, exact
    float y = log_core(u, lost / u);
    y = x == kInf ? kInf : y;
    y = x == -1.0F ? -kInf : y;
    y = x == 0.0F ? x : y;  // keeps the sign of zero
    return x >= -1.0F ? y : kNaN;
}

// 1 / (1 + e^-x), in the form that cannot overflow.
DEEPINFER_INLINE float sigmoid_f32(float x) {
    const float e = exp_f32(x < 0.0F ? x : -x);
    return (x < 0.0F ? e : 1.0F) / (1.0F + e);
}

// x / (1 + e^-x); -inf gives 0, as the limit does.
DEEPINFER_INLINE float silu_f32(float x) {
    const float y = x * sigmoid_f32(x);
    return x == -kInf ? 0.0F : y;
}

// ln(1 + e^x) without overflow.
DEEPINFER_INLINE float softplus_f32(float x) {
    const float magnitude = x < 0.0F ? -x : x;
    const float y = (x > 0.0F ? x : 0.0F) + log1p_f32(exp_f32(-magnitude));
    return x == x ? y : x;
}

}  // namespace deepinfer::cpu
