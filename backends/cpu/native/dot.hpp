// Products of rows with rows: c[i][j] = x_i . w_j, both contiguous along the summed axis.
//
// The order of additions of one output: chunks of kChunk elements; in a chunk, eight running sums joined by `join`;
// chunk sums added in order. How outputs are tiled for registers and caches is not part of it.
#pragma once

#include "common.hpp"

namespace deepinfer::cpu {

constexpr i64 kChunk = 512;

// One chunk (k <= kChunk) of m x n outputs; `add` adds to c instead of writing it. Strides are in floats.
void dot_chunk(const float* x, i64 ldx, i64 m, const float* w, i64 ldw, i64 n, i64 k, float* c, i64 ldc, bool add);

// All chunks.
inline void dot_rows(const float* x, i64 ldx, i64 m, const float* w, i64 ldw, i64 n, i64 k, float* c, i64 ldc) {
    i64 start = 0;
    do {
        const i64 width = k - start < kChunk ? k - start : kChunk;
        dot_chunk(x + start, ldx, m, w + start, ldw, n, width, c, ldc, start > 0);
        start += width;
    } while (start < k);
}

// o[i][0..d) += sum_j p[i][j] v[j][0..d), j ascending and one after the other.
void weighted_sum(const float* p, i64 ldp, i64 m, const float* v, i64 ldv, i64 n, i64 d, float* o, i64 ldo);

}  // namespace deepinfer::cpu
