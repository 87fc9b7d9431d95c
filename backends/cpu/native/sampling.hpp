// One row from logits to a token: filters, selection and the draw, as `deepinfer.ops.sampling` defines them.
#pragma once

#include <cstdint>
#include <vector>

#include "sampling_rows.hpp"

namespace deepinfer::cpu {

struct Filters {
    float temperature = 1.0F;
    std::int32_t top_k = 0;
    float top_p = 1.0F;
    float min_p = 0.0F;
};

enum class RowKind {
    kUnusable,  // NaN, +inf, or nothing finite
    kGreedy,    // temperature 0: scores are the logits
    kAll,       // no filter removed anything
    kKept,      // candidates are listed
};

// What filters made of one row. Kept per thread, so that a row allocates nothing once its width has been seen.
struct RowWork {
    RowKind kind = RowKind::kUnusable;
    const float* scores = nullptr;     // [V], the logits themselves where the temperature is 0 or 1
    float best = 0.0F;                 // greatest score
    std::vector<std::int32_t> ids;     // kKept: candidates, ascending
    std::vector<float> kept;           // kKept: their scores
    std::vector<float> scaled;         // storage of `scores`
    std::vector<float> maxima;         // per block of the row
    std::vector<float> order;          // block maxima, being ordered
    std::vector<float> dense;          // a row with -inf for what filters removed
    std::vector<float> weights;        // exponentials of candidates
    std::vector<u32> masses;
    std::vector<std::uint64_t> ranks;
    std::vector<std::int32_t> pool;
};

// Scale, check and filter one row.
void filter_row(const float* logits, i64 n, const Filters& filters, RowWork& work);

// The scores with -inf for what filters removed; valid until the next use of `work`.
const float* dense_scores(i64 n, RowWork& work);

// The argmax of scores[v] + gumbel(key, v), ties to the lowest id. Some score is finite, none is NaN or +inf.
std::int32_t draw_dense(const float* scores, i64 n, const DrawKey& key);

// The token of one row; -1 for an unusable one.
std::int32_t sample_row(const float* logits, i64 n, const Filters& filters, const DrawKey& key, RowWork& work);

// The best `count` <= n ids, best first, ties to the lower id. `maxima` are the row's block maxima.
void best_ids(const float* x, i64 n, i64 count, RowWork& work, std::int32_t* ids);

}  // namespace deepinfer::cpu
