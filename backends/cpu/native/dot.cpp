#include "dot.hpp"

#include "simd.hpp"

namespace deepinfer::cpu {

template <int MR, int NR>
DEEPINFER_INLINE void dot_tile(const float* x, i64 ldx, const float* w, i64 ldw, i64 k, float* c, i64 ldc, bool add) {
    V8 sum[MR][NR] = {};
    i64 p = 0;
    for (; p + 8 <= k; p += 8) {
        V8 b[NR];
#pragma GCC unroll 8
        for (int j = 0; j < NR; ++j) b[j] = load8(w + j * ldw + p);
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
            const V8 a = load8(x + i * ldx + p);
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) sum[i][j] += a * b[j];
        }
    }
    if (p < k) {
#pragma GCC unroll 8
        for (int i = 0; i < MR; ++i) {
            const V8 a = load_tail(x + i * ldx + p, k - p);
#pragma GCC unroll 8
            for (int j = 0; j < NR; ++j) sum[i][j] += a * load_tail(w + j * ldw + p, k - p);
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; ++i) {
        float* row = c + i * ldc;
        if constexpr (NR % 4 == 0) {
#pragma GCC unroll 2
            for (int j = 0; j < NR; j += 4) {
                V4 joined = join4(sum[i][j], sum[i][j + 1], sum[i][j + 2], sum[i][j + 3]);
                if (add) {
                    V4 old;
                    std::memcpy(&old, row + j, sizeof old);
                    joined = old + joined;
                }
                std::memcpy(row + j, &joined, sizeof joined);
            }
        } else {
            for (int j = 0; j < NR; ++j) {
                const float joined = join(sum[i][j]);
                row[j] = add ? row[j] + joined : joined;
            }
        }
    }
}

// Eight rows of w stay in the first cache level while all rows of x pass by.
DEEPINFER_CLONES void dot_chunk(const float* x, i64 ldx, i64 m, const float* w, i64 ldw, i64 n, i64 k, float* c,
                                i64 ldc, bool add) {
    i64 j = 0;
    for (; j + 8 <= n; j += 8) {
        const float* wj = w + j * ldw;
        i64 i = 0;
        for (; i + 2 <= m; i += 2) {
            dot_tile<2, 4>(x + i * ldx, ldx, wj, ldw, k, c + i * ldc + j, ldc, add);
            dot_tile<2, 4>(x + i * ldx, ldx, wj + 4 * ldw, ldw, k, c + i * ldc + j + 4, ldc, add);
        }
        if (i < m) dot_tile<1, 8>(x + i * ldx, ldx, wj, ldw, k, c + i * ldc + j, ldc, add);
    }
    for (; j < n; ++j) {
        for (i64 i = 0; i < m; ++i) dot_tile<1, 1>(x + i * ldx, ldx, w + j * ldw, ldw, k, c + i * ldc + j, ldc, add);
    }
}

// MR rows of o, 16 columns: sums stay in registers over a block of values.
template <int MR>
DEEPINFER_INLINE void sum_tile(const float* p, i64 ldp, const float* v, i64 ldv, i64 n, float* o, i64 ldo) {
    V8 sum[MR][2];
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
        sum[i][0] = load8(o + i * ldo);
        sum[i][1] = load8(o + i * ldo + 8);
    }
    for (i64 j = 0; j < n; ++j) {
        const V8 left = load8(v + j * ldv), right = load8(v + j * ldv + 8);
#pragma GCC unroll 4
        for (int i = 0; i < MR; ++i) {
            const float weight = p[i * ldp + j];
            sum[i][0] += weight * left;
            sum[i][1] += weight * right;
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < MR; ++i) {
        store8(o + i * ldo, sum[i][0]);
        store8(o + i * ldo + 8, sum[i][1]);
    }
}

DEEPINFER_CLONES void weighted_sum(const float* p, i64 ldp, i64 m, const float* v, i64 ldv, i64 n, i64 d, float* o,
                                   i64 ldo) {
    constexpr i64 kBlock = 16;  // values of one block fit the first cache level
    for (i64 start = 0; start < n; start += kBlock) {
        const i64 count = n - start < kBlock ? n - start : kBlock;
        const float* pj = p + start;
        const float* vj = v + start * ldv;
        i64 i = 0;
        for (; i + 4 <= m; i += 4) {
            i64 c = 0;
            for (; c + 16 <= d; c += 16) sum_tile<4>(pj + i * ldp, ldp, vj + c, ldv, count, o + i * ldo + c, ldo);
            for (; c < d; ++c) {
                for (i64 r = i; r < i + 4; ++r) {
                    float sum = o[r * ldo + c];
                    for (i64 j = 0; j < count; ++j) sum += pj[r * ldp + j] * vj[j * ldv + c];
                    o[r * ldo + c] = sum;
                }
            }
        }
        for (; i < m; ++i) {
            i64 c = 0;
            for (; c + 16 <= d; c += 16) sum_tile<1>(pj + i * ldp, ldp, vj + c, ldv, count, o + i * ldo + c, ldo);
            for (; c < d; ++c) {
                float sum = o[i * ldo + c];
                for (i64 j = 0; j < count; ++j) sum += pj[i * ldp + j] * vj[j * ldv + c];
                o[i * ldo + c] = sum;
            }
        }
    }
}

}  // namespace deepinfer::cpu
