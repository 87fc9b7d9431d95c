// Eight lanes of float with a fixed order of additions.
//
// GCC's vector type rather than intrinsics: one source, lowered to whatever registers a clone has. A sum over an axis
// keeps eight running sums (lane l adds the elements l, l + 8, ...), and the lanes are joined by one tree. That order
// is part of the kernels' contract, so it is written once, here.
#pragma once

#include <cstring>

#include "common.hpp"

// Vectors are passed between inlined functions only; how an ABI would pass them does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace deepinfer::cpu {

typedef float V8 __attribute__((vector_size(32)));
typedef float V4 __attribute__((vector_size(16)));

DEEPINFER_INLINE V8 load8(const float* p) {
    V8 v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

// The first `count` < 8 floats, zeros behind them: adding 0 * 0 changes no running sum.
DEEPINFER_INLINE V8 load_tail(const float* p, i64 count) {
    float lanes[8] = {};
    for (i64 l = 0; l < count; ++l) lanes[l] = p[l];
    return load8(lanes);
}

DEEPINFER_INLINE void store8(float* p, const V8& v) { std::memcpy(p, &v, sizeof v); }

DEEPINFER_INLINE V4 halves(const V8& v) {
    return __builtin_shufflevector(v, v, 0, 1, 2, 3) + __builtin_shufflevector(v, v, 4, 5, 6, 7);
}

// ((l0 + l4) + (l2 + l6)) + ((l1 + l5) + (l3 + l7))
DEEPINFER_INLINE float join(const V8& v) {
    const V4 s = halves(v);
    return (s[0] + s[2]) + (s[1] + s[3]);
}

// `join` of four vectors at once, in the same order.
DEEPINFER_INLINE V4 join4(const V8& a, const V8& b, const V8& c, const V8& d) {
    const V4 p = halves(a), q = halves(b), r = halves(c), s = halves(d);
    const V4 pq = __builtin_shufflevector(p, q, 0, 4, 1, 5) + __builtin_shufflevector(p, q, 2, 6, 3, 7);
    const V4 rs = __builtin_shufflevector(r, s, 0, 4, 1, 5) + __builtin_shufflevector(r, s, 2, 6, 3, 7);
    return __builtin_shufflevector(pq, rs, 0, 1, 4, 5) + __builtin_shufflevector(pq, rs, 2, 3, 6, 7);
}

// Sum of term(i) over eight lanes; `term` returns a vector for full blocks and for the zero padded tail.
template <class Full, class Tail>
DEEPINFER_INLINE float sum_lanes(i64 n, Full&& full, Tail&& tail) {
    V8 sum = {};
    i64 i = 0;
    for (; i + 8 <= n; i += 8) sum += full(i);
    if (i < n) sum += tail(i, n - i);
    return join(sum);
}

}  // namespace deepinfer::cpu
