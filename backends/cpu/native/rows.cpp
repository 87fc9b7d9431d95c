#include "rows.hpp"

#include <cmath>
#include <cstring>

#include "codes.hpp"
#include "simd.hpp"

namespace deepinfer::cpu {

DEEPINFER_CLONES static void widen_bf16(const u16* src, i64 n, float* __restrict dst) {
    for (i64 i = 0; i < n; ++i) dst[i] = bf16_value(src[i]);
}

void widen(const void* src, int kind, i64 n, float* dst) {
    if (kind == kF32) {
        std::memcpy(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    } else {
        widen_bf16(static_cast<const u16*>(src), n, dst);
    }
}

DEEPINFER_CLONES static void narrow_bf16(const float* src, i64 n, u16* __restrict dst) {
    for (i64 i = 0; i < n; ++i) dst[i] = bf16_code(src[i]);
}

void narrow(const float* src, i64 n, int kind, void* dst) {
    if (kind == kF32) {
        if (n > 0) std::memmove(dst, src, static_cast<std::size_t>(n) * sizeof(float));
    } else {
        narrow_bf16(src, n, static_cast<u16*>(dst));
    }
}

DEEPINFER_CLONES void round_row(float* x, i64 n) {
    for (i64 i = 0; i < n; ++i) x[i] = round_bf16(x[i]);
}

// Eight codes at a time (bits above a code are ignored), as `e4m3_value` and `e2m1_value` have them; written with
// vectors because the loops over the scalar forms do not vectorise well, and decoding weights is what a product with
// few rows spends its time on.
typedef std::int32_t I8 __attribute__((vector_size(32)));

// Eight bytes, one per lane: every lane gets its word and shifts its own byte down.
DEEPINFER_INLINE I8 load_bytes(const u8* codes) {
    std::int32_t words[2];
    std::memcpy(words, codes, sizeof words);
    const I8 low = I8{} + words[0], high = I8{} + words[1];
    return __builtin_shufflevector(low, high, 0, 1, 2, 3, 12, 13, 14, 15) >> I8{0, 8, 16, 24, 0, 8, 16, 24};
}

// Eight nibbles of four bytes, the low one of each byte first.
DEEPINFER_INLINE I8 load_nibbles(const u8* codes) {
    std::int32_t word;
    std::memcpy(&word, codes, sizeof word);
    return (I8{} + word) >> I8{0, 4, 8, 12, 16, 20, 24, 28};
}

DEEPINFER_INLINE V8 e4m3_values(const I8& code) {
    const I8 magnitude = code & 0x7F;
    const V8 normal = (V8)((magnitude << 20) + (120 << 23));
    const V8 value = magnitude < 8 ? (normal - 0x1p-7F) * 2.0F : normal;
    const I8 nan = I8{} + 0x7FC00000;
    return (V8)((magnitude == 0x7F ? nan : (I8)value) | ((code & 0x80) << 24));
}

DEEPINFER_INLINE V8 e2m1_values(const I8& code) {
    const I8 magnitude = code & 7;
    const V8 normal = (V8)((magnitude << 22) + (126 << 23));
    const V8 value = magnitude < 2 ? (normal - 0.5F) * 2.0F : normal;
    return (V8)((I8)value | ((code & 8) << 28));
}

// One group of codes; `count` is the group's size except at the end of a ragged row.
DEEPINFER_INLINE void decode_e4m3(const u8* codes, float scale, i64 count, float* dst) {
    i64 i = 0;
    for (; i + 8 <= count; i += 8) store8(dst + i, e4m3_values(load_bytes(codes + i)) * scale);
    for (; i < count; ++i) dst[i] = e4m3_value(codes[i]) * scale;
}

DEEPINFER_INLINE void decode_e2m1(const u8* codes, float scale, i64 count, float* dst) {
    i64 i = 0;
    for (; i + 8 <= count; i += 8) store8(dst + i, e2m1_values(load_nibbles(codes + i / 2)) * scale);
    for (; i < count; i += 2) {
        dst[i] = e2m1_value(codes[i / 2] & 15U) * scale;
        dst[i + 1] = e2m1_value(codes[i / 2] >> 4) * scale;
    }
}

DEEPINFER_CLONES void decode_row(const u8* codes, const u8* scales, int kind, i64 n, float* dst) {
    if (kind == kMxfp8) {
        for (i64 start = 0; start < n; start += 32) {
            decode_e4m3(codes + start, ue8m0_value(scales[start / 32]), n - start < 32 ? n - start : 32, dst + start);
        }
        return;
    }
    const i64 group = kind == kNvfp4 ? 16 : 32;
    for (i64 start = 0; start < n; start += group) {
        const float scale = scale_value(kind, scales[start / group]);
        decode_e2m1(codes + start / 2, scale, n - start < group ? n - start : group, dst + start);
    }
}

// Largest magnitude on the bits: above the bits of infinity stands NaN, so a fault in the group wins.
DEEPINFER_INLINE float group_amax(const float* x, i64 count) {
    u32 largest = 0;
    for (i64 i = 0; i < count; ++i) {
        const u32 magnitude = bits_of(x[i]) & 0x7FFFFFFFU;
        largest = magnitude > largest ? magnitude : largest;
    }
    return float_of(largest);
}

DEEPINFER_INLINE void encode_e4m3(const float* x, float scale, i64 count, u8* __restrict codes) {
    for (i64 i = 0; i < count; ++i) {
        float q = x[i] / scale;
        q = q > 448.0F ? 448.0F : q;
        q = q < -448.0F ? -448.0F : q;
        codes[i] = e4m3_code(q);
    }
}

DEEPINFER_INLINE void encode_e2m1(const float* x, float scale, i64 count, u8* __restrict codes) {
    for (i64 i = 0; i < count / 2; ++i) {
        codes[i] = static_cast<u8>(e2m1_code(x[2 * i], scale) | (e2m1_code(x[2 * i + 1], scale) << 4));
    }
}

DEEPINFER_CLONES void encode_row(const float* x, i64 n, int kind, u8* codes, u8* scales) {
    const i64 group = kind == kNvfp4 ? 16 : 32;
    for (i64 start = 0; start < n; start += group) {
        const bool full = start + group <= n;
        const float amax =
            full && group == 32 ? group_amax(x + start, 32) : group_amax(x + start, full ? 16 : n - start);
        const u8 code = group_scale(kind, amax);
        const float scale = scale_value(kind, code);
        scales[start / group] = code;
        if (kind == kMxfp8) {
            if (full) {
                encode_e4m3(x + start, scale, 32, codes + start);
            } else {
                encode_e4m3(x + start, scale, n - start, codes + start);
            }
        } else {
            encode_e2m1(x + start, scale, full ? group : n - start, codes + start / 2);
        }
    }
}

DEEPINFER_CLONES float sum_of(const float* x, i64 n) {
    return sum_lanes(n, [=](i64 i) { return load8(x + i); }, [=](i64 i, i64 rest) { return load_tail(x + i, rest); });
}

DEEPINFER_CLONES float sum_of_squares(const float* x, i64 n) {
    return sum_lanes(
        n,
        [=](i64 i) {
            const V8 v = load8(x + i);
            return v * v;
        },
        [=](i64 i, i64 rest) {
            const V8 v = load_tail(x + i, rest);
            return v * v;
        });
}

DEEPINFER_CLONES static void norm_scale(const float* x, const float* weight, i64 n, float factor, float* y) {
    if (weight == nullptr) {
        for (i64 i = 0; i < n; ++i) y[i] = x[i] * factor;
    } else {
        for (i64 i = 0; i < n; ++i) y[i] = x[i] * factor * weight[i];
    }
}

void norm_row(const float* x, const float* weight, i64 n, float eps, float* y) {
    const float mean = sum_of_squares(x, n) / static_cast<float>(n);
    norm_scale(x, weight, n, 1.0F / std::sqrt(mean + eps), y);
}

DEEPINFER_CLONES void rotate_pairs(float* x, const float* cos, const float* sin, i64 pairs, float sign) {
    for (i64 i = 0; i < pairs; ++i) {
        const float even = x[2 * i], odd = x[2 * i + 1], turn = sin[i] * sign;
        x[2 * i] = even * cos[i] - odd * turn;
        x[2 * i + 1] = even * turn + odd * cos[i];
    }
}

DEEPINFER_CLONES void add_scaled(float* y, float a, const float* __restrict x, i64 n) {
    for (i64 i = 0; i < n; ++i) y[i] += a * x[i];
}

DEEPINFER_CLONES void add_row(float* y, const float* __restrict x, i64 n) {
    for (i64 i = 0; i < n; ++i) y[i] += x[i];
}

DEEPINFER_CLONES void scale_row(float* y, float a, i64 n) {
    for (i64 i = 0; i < n; ++i) y[i] *= a;
}

}  // namespace deepinfer::cpu
