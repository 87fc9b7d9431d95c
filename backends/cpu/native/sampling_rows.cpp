#include "sampling_rows.hpp"

#include <algorithm>
#include <array>

#include "simd.hpp"

namespace deepinfer::cpu {

namespace {

DEEPINFER_INLINE V8 greater(const V8& a, const V8& b) { return a > b ? a : b; }

DEEPINFER_INLINE float greatest(const V8& v) {
    float best = v[0];
    for (int l = 1; l < 8; ++l) best = v[l] > best ? v[l] : best;
    return best;
}

}  // namespace

DEEPINFER_CLONES bool block_maxima(const float* x, i64 n, float* maxima) {
    const V8 infinite = V8{} + kInf;
    const V8 none = V8{} - kInf;
    auto broken = none >= infinite;  // all false
    i64 i = 0;
    for (; i + kBlock <= n; i += kBlock) {
        V8 a = none, b = none;
        for (int j = 0; j < kBlock; j += 16) {
            const V8 u = load8(x + i + j), v = load8(x + i + j + 8);
            broken |= ~(u < infinite) | ~(v < infinite);  // true for NaN, too
            a = greater(u, a);
            b = greater(v, b);
        }
        maxima[i / kBlock] = greatest(greater(a, b));
    }
    bool ok = true;
    for (int l = 0; l < 8; ++l) ok = ok && broken[l] == 0;
    if (i < n) {
        float best = -kInf;
        for (; i < n; ++i) {
            ok = ok && x[i] < kInf;
            best = x[i] > best ? x[i] : best;
        }
        maxima[num_blocks(n) - 1] = best;
    }
    return ok;
}

DEEPINFER_CLONES float max_of(const float* x, i64 n) {
    V8 lanes = V8{} - kInf;
    i64 i = 0;
    for (; i + 8 <= n; i += 8) lanes = greater(load8(x + i), lanes);
    float best = greatest(lanes);
    for (; i < n; ++i) best = x[i] > best ? x[i] : best;
    return best;
}

DEEPINFER_CLONES void divide_row(const float* x, i64 n, float t, float* y) {
    for (i64 i = 0; i < n; ++i) y[i] = x[i] / t;
}

DEEPINFER_CLONES double exp_and_sum(const float* x, i64 n, float best, float* e) {
    double sum = 0.0;
    float chunk[kChunk];
    for (i64 start = 0; start < n; start += kChunk) {
        const i64 count = std::min<i64>(kChunk, n - start);
        for (i64 i = 0; i < count; ++i) chunk[i] = exp_f32(x[start + i] - best);
        sum += sum_lanes(
            count, [&](i64 i) { return load8(chunk + i); },
            [&](i64 i, i64 rest) { return load_tail(chunk + i, rest); });
        if (e != nullptr) std::copy(chunk, chunk + count, e + start);
    }
    return sum;
}

DEEPINFER_CLONES void masses_of(const float* __restrict e, i64 n, float total, u32* __restrict masses) {
    for (i64 i = 0; i < n; ++i) {
        const float scaled = e[i] / total * 0x1p31F;
        const bool whole = scaled >= 0x1p31F;  // the one mass that does not fit a signed conversion
        masses[i] = static_cast<u32>(static_cast<std::int32_t>(whole ? 0.0F : scaled)) | (whole ? 0x80000000U : 0U);
    }
}

DEEPINFER_CLONES u32 mass_at_least(const float* __restrict scores, const u32* __restrict masses, i64 n,
                                   float threshold) {
    u32 sum = 0;
    for (i64 i = 0; i < n; ++i) sum += scores[i] >= threshold ? masses[i] : 0U;
    return sum;
}

DEEPINFER_CLONES void log_residual(const float* __restrict p, const float* __restrict q, i64 n,
                                   float* __restrict y) {
    for (i64 i = 0; i < n; ++i) {
        const float rest = p[i] - q[i];
        y[i] = log_f32(rest > 0.0F ? rest : 0.0F);
    }
}

DEEPINFER_CLONES i64 count_better(const float* x, i64 n, float own, i64 id) {
    i64 better = 0;
    for (i64 start = 0; start < n; start += kChunk) {
        const i64 count = std::min<i64>(kChunk, n - start);
        const int below = static_cast<int>(std::clamp<i64>(id - start, 0, count));
        int here = 0;
        for (int i = 0; i < below; ++i) here += x[start + i] >= own ? 1 : 0;
        for (int i = below; i < static_cast<int>(count); ++i) here += x[start + i] > own ? 1 : 0;
        better += here;
    }
    return better;
}

DEEPINFER_CLONES void philox_words(const u32* __restrict quads, int num_quads, const DrawKey& key,
                                   u32* __restrict words) {
    std::array<u32, 20> round_keys;
    u32 k0 = static_cast<u32>(key.seed);
    u32 k1 = static_cast<u32>(key.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        round_keys[2 * round] = k0;
        round_keys[2 * round + 1] = k1;
        k0 += 0x9E3779B9U;
        k1 += 0xBB67AE85U;
    }
    const u32 output_index = key.output_index;
    const u32 purpose_and_choice = key.purpose_and_choice;
    const u32 anchor = key.anchor;
    for (int i = 0; i < num_quads; ++i) {
        u32 c0 = quads[i];
        u32 c1 = output_index;
        u32 c2 = purpose_and_choice;
        u32 c3 = anchor;
#pragma GCC unroll 10
        for (int round = 0; round < 10; ++round) {
            const std::uint64_t product0 = static_cast<std::uint64_t>(c0) * 0xD2511F53U;
            const std::uint64_t product1 = static_cast<std::uint64_t>(c2) * 0xCD9E8D57U;
            c0 = static_cast<u32>(product1 >> 32) ^ c1 ^ round_keys[2 * round];
            c2 = static_cast<u32>(product0 >> 32) ^ c3 ^ round_keys[2 * round + 1];
            c1 = static_cast<u32>(product1);
            c3 = static_cast<u32>(product0);
        }
        words[4 * i] = c0;
        words[4 * i + 1] = c1;
        words[4 * i + 2] = c2;
        words[4 * i + 3] = c3;
    }
}

DEEPINFER_CLONES u32 min_word(const u32* words, int n) {
    u32 least = 0xFFFFFFFFU;
    for (int i = 0; i < n; ++i) least = words[i] < least ? words[i] : least;
    return least;
}

DEEPINFER_CLONES void add_gumbels(const float* __restrict scores, const u32* __restrict words, int n,
                                  float* __restrict sums) {
    for (int i = 0; i < n; ++i) sums[i] = scores[i] + gumbel_f32(words[i]);
}

}  // namespace deepinfer::cpu
