// Steps over one row of scores or candidates, out of which sampling is built. Each is compiled for several instruction
// sets; none depends on anything but its row.
#pragma once

#include "common.hpp"
#include "philox.hpp"

namespace deepinfer::cpu {

constexpr int kBlock = 64;   // ids that share a maximum
constexpr int kChunk = 256;  // ids whose Gumbels are made together, and terms of one fp32 partial sum

inline i64 num_blocks(i64 n) { return (n + kBlock - 1) / kBlock; }

// The maximum of every block of a row; false when the row holds NaN or +inf.
bool block_maxima(const float* x, i64 n, float* maxima);

// The greatest of n values; -inf for none.
float max_of(const float* x, i64 n);

// y[i] = x[i] / t; y may be x.
void divide_row(const float* x, i64 n, float t, float* y);

// e[i] = exp(x[i] - best), and the sum: fp32 within a chunk, float64 across chunks. e may be null.
double exp_and_sum(const float* x, i64 n, float best, float* e);

// floor(p * 2^31) of fp32 probabilities p = e / total; total is at least every e.
void masses_of(const float* e, i64 n, float total, u32* masses);

// The masses of candidates that score at least `threshold`, added up. All masses together are below 2^32.
u32 mass_at_least(const float* scores, const u32* masses, i64 n, float threshold);

// y[i] = ln(p[i] - q[i]) where that is positive, else -inf.
void log_residual(const float* p, const float* q, i64 n, float* y);

// How many of n values are greater than `own`, or equal to it with an index below `id`.
i64 count_better(const float* x, i64 n, float own, i64 id);

// words[4 * i + j] = word j of counter (quads[i], output_index, purpose + 256 * choice, anchor).
void philox_words(const u32* quads, int num_quads, const DrawKey& key, u32* words);

// The least of n words.
u32 min_word(const u32* words, int n);

// sums[i] = scores[i] + gumbel(words[i])
void add_gumbels(const float* scores, const u32* words, int n, float* sums);

}  // namespace deepinfer::cpu
