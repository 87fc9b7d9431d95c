// Steps over one row in fp32, out of which the row kernels are built. Each is compiled for several instruction sets.
#pragma once

#include "common.hpp"

namespace deepinfer::cpu {

// n stored float32 or bfloat16 values as float32.
void widen(const void* src, int kind, i64 n, float* dst);

// The row itself when it is float32 already, else a copy in `scratch`.
inline const float* as_f32(const void* src, int kind, i64 n, float* scratch) {
    if (kind == kF32) return static_cast<const float*>(src);
    widen(src, kind, n, scratch);
    return scratch;
}

// n float32 values as float32 or bfloat16 (nearest even).
void narrow(const float* src, i64 n, int kind, void* dst);

// Rounding point of the model: to bfloat16 and back, in place.
void round_row(float* x, i64 n);

// Values of n codes and their scales; n may end inside a group.
void decode_row(const u8* codes, const u8* scales, int kind, i64 n, float* dst);

// Codes and scales of n values.
void encode_row(const float* x, i64 n, int kind, u8* codes, u8* scales);

float sum_of(const float* x, i64 n);
float sum_of_squares(const float* x, i64 n);

// y = x / sqrt(mean(x^2) + eps) * weight; weight may be null. y may be x.
void norm_row(const float* x, const float* weight, i64 n, float eps, float* y);

// Turn n pairs (2i, 2i+1) by the angles whose cosines and sines are given; sign -1 turns back. In place.
void rotate_pairs(float* x, const float* cos, const float* sin, i64 pairs, float sign);

// y[i] += a * x[i]
void add_scaled(float* y, float a, const float* x, i64 n);

// y[i] += x[i]
void add_row(float* y, const float* x, i64 n);

// y[i] *= a
void scale_row(float* y, float a, i64 n);

}  // namespace deepinfer::cpu
