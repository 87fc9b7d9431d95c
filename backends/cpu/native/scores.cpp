// Index scores: sum over heads of weight * relu(q . k), against stored or dense keys.
//
// Rows of one sequence that stand side by side share the decoding of a block of keys; scores are per (row, key), so
// that grouping, the block size and the split into tasks leave no trace in their bits.
#include <algorithm>

#include "bind.hpp"
#include "cache.hpp"
#include "codes.hpp"
#include "dot.hpp"
#include "gemm.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

constexpr i64 kBlock = 64;   // keys decoded at a time
constexpr i64 kSpan = 1024;  // columns of one task
constexpr i64 kGroup = 16;   // rows that share decoded keys

// dots [heads, >= n] to out [n], heads added in order; with the model's rounding points when asked.
DEEPINFER_CLONES void gate_heads(const float* dots, i64 ld, i64 heads, const float* weights, i64 n, bool round,
                                 float* out) {
    for (i64 j = 0; j < n; ++j) out[j] = 0.0F;
    for (i64 h = 0; h < heads; ++h) {
        const float weight = weights[h];
        const float* row = dots + h * ld;
        if (round) {
            for (i64 j = 0; j < n; ++j) {
                const float dot = round_bf16(row[j]);
                out[j] += round_bf16((dot < 0.0F ? 0.0F : dot) * weight);
            }
        } else {
            for (i64 j = 0; j < n; ++j) out[j] += (row[j] < 0.0F ? 0.0F : row[j]) * weight;
        }
    }
    if (round) {
        for (i64 j = 0; j < n; ++j) out[j] = round_bf16(out[j]);
    }
}

// Query heads and head weights of all rows, in fp32.
struct Queries {
    WideRows q, weights;
    i64 heads, dim;
    bool round;

    Queries(Address q_, Address scales, int kind, Address weights_, int weights_kind, i64 rows, i64 heads_, i64 dim_,
            int threads)
        : q(Operand::dense(q_, scales, kind, dim_), rows * heads_, dim_, threads),
          weights(Operand::dense(weights_, 0, weights_kind, heads_), rows, heads_, threads),
          heads(heads_),
          dim(dim_),
          round(weights_kind == kBF16) {}

    // Scores of one row against n keys; `dots` has room for heads * kBlock floats.
    void score(i64 row, const float* keys, i64 stride, i64 n, float* dots, float* out) const {
        dot_rows(q.get() + row * heads * dim, dim, heads, keys, stride, n, dim, dots, kBlock);
        gate_heads(dots, kBlock, heads, weights.get() + row * heads, n, round, out);
    }

    double operations(double pairs) const { return pairs * static_cast<double>(heads * dim) / 8; }
};

// Where compressed positions of a sequence are stored.
struct BlockTable {
    const i32* data;
    i64 sequences, columns;

    // The slot of a position; a hole points into block 0, and past the table its last column answers.
    i64 slot(i64 seq, i64 position, i64 records) const {
        check_index(seq, sequences, "sequence");
        const i64 column = std::min(position / records, columns - 1);
        return static_cast<i64>(data[seq * columns + column]) * records + position % records;
    }
};

struct Task {
    i64 row, rows, column;
};

void scores_paged(Address out, i64 rows, i64 columns, Address q, Address q_scales, int q_kind, i64 heads, i64 dim,
                  const CacheArgs& cache_args, Address weights, int weights_kind, Address visible, Address table,
                  i64 sequences, i64 table_columns, Address row_to_seq, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Cache cache(cache_args);
    const Queries queries(q, q_scales, q_kind, weights, weights_kind, rows, heads, dim, num_threads);
    const BlockTable blocks{at<const i32>(table), sequences, table_columns};
    const i32* seqs = at<const i32>(row_to_seq);
    const i32* limits = at<const i32>(visible);
    std::vector<Task> tasks;
    for (i64 row = 0; row < rows;) {
        i64 end = row + 1;
        while (end < rows && end - row < kGroup && seqs[end] == seqs[row]) ++end;
        for (i64 column = 0; column < columns; column += kSpan) tasks.push_back({row, end - row, column});
        row = end;
    }
    const int threads = threads_for(queries.operations(static_cast<double>(rows * columns)), num_threads);
    parallel_rows(static_cast<i64>(tasks.size()), 1, threads, [&](i64 begin, i64 end) {
        Buffer keys(kBlock * dim), dots(heads * kBlock);
        for (i64 t = begin; t < end; ++t) {
            const Task task = tasks[static_cast<std::size_t>(t)];
            const i64 last = std::min(columns, task.column + kSpan);
            i64 furthest = 0;
            for (i64 r = task.row; r < task.row + task.rows; ++r) furthest = std::max<i64>(furthest, limits[r]);
            for (i64 column = task.column; column < last; column += kBlock) {
                const i64 width = std::min(kBlock, last - column);
                for (i64 j = 0; j < std::min(width, furthest - column); ++j) {
                    cache.read(blocks.slot(seqs[task.row], column + j, cache.records), keys.get() + j * dim);
                }
                for (i64 r = task.row; r < task.row + task.rows; ++r) {
                    float* target = at<float>(out) + r * columns + column;
                    const i64 n = std::clamp<i64>(limits[r] - column, 0, width);
                    if (n > 0) queries.score(r, keys.get(), dim, n, dots.get(), target);
                    std::fill(target + n, target + width, -kInf);
                }
            }
        }
    });
}

void scores_blocks(Address out, i64 rows, i64 num_blocks, i64 candidate_block, Address q, Address q_scales, int q_kind,
                   i64 heads, i64 dim, const CacheArgs& cache_args, Address weights, int weights_kind, Address visible,
                   Address block_ids, Address table, i64 sequences, i64 table_columns, Address row_to_seq,
                   int num_threads) {
    const py::gil_scoped_release unlocked;
    const Cache cache(cache_args);
    const Queries queries(q, q_scales, q_kind, weights, weights_kind, rows, heads, dim, num_threads);
    const BlockTable blocks{at<const i32>(table), sequences, table_columns};
    const double pairs = static_cast<double>(rows * num_blocks * candidate_block);
    const int threads = threads_for(queries.operations(pairs), num_threads);
    const i64 grain = std::max<i64>(1, kSpan / std::max<i64>(candidate_block, 1));
    parallel_rows(rows * num_blocks, grain, threads, [&](i64 begin, i64 end) {
        Buffer keys(kBlock * dim), dots(heads * kBlock);
        for (i64 item = begin; item < end; ++item) {
            const i64 row = item / num_blocks, block = at<const i32>(block_ids)[item];
            const i64 first = block * candidate_block;
            const i64 known = block < 0 ? 0 : std::clamp<i64>(at<const i32>(visible)[row] - first, 0, candidate_block);
            float* target = at<float>(out) + item * candidate_block;
            for (i64 start = 0; start < known; start += kBlock) {
                const i64 n = std::min(kBlock, known - start);
                for (i64 j = 0; j < n; ++j) {
                    const i64 slot = blocks.slot(at<const i32>(row_to_seq)[row], first + start + j, cache.records);
                    cache.read(slot, keys.get() + j * dim);
                }
                queries.score(row, keys.get(), dim, n, dots.get(), target + start);
            }
            std::fill(target + known, target + candidate_block, -kInf);
        }
    });
}

void scores_ragged(Address out, i64 rows, i64 columns, Address q, Address q_scales, int q_kind, i64 heads, i64 dim,
                   Address k, Address k_scales, int k_kind, i64 num_keys, Address weights, int weights_kind,
                   Address starts, Address ends, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Queries queries(q, q_scales, q_kind, weights, weights_kind, rows, heads, dim, num_threads);
    const WideRows keys(Operand::dense(k, k_scales, k_kind, dim), num_keys, dim, num_threads);
    for (i64 row = 0; row < rows; ++row) {
        const i64 first = at<const i32>(starts)[row], last = at<const i32>(ends)[row];
        if (first < last) {
            check_index(first, num_keys, "first key");
            check_index(last - 1, num_keys, "last key");
        }
    }
    const i64 spans = (columns + kSpan - 1) / kSpan;
    const int threads = threads_for(queries.operations(static_cast<double>(rows * columns)), num_threads);
    parallel_rows(rows * spans, 1, threads, [&](i64 begin, i64 end) {
        Buffer dots(heads * kBlock);
        for (i64 item = begin; item < end; ++item) {
            const i64 row = item / spans, from = item % spans * kSpan, to = std::min(columns, from + kSpan);
            const i64 first = at<const i32>(starts)[row], count = at<const i32>(ends)[row] - first;
            float* target = at<float>(out) + row * columns;
            i64 column = from;
            for (; column < std::min(to, count); column += kBlock) {
                const i64 n = std::min({kBlock, to - column, count - column});
                queries.score(row, keys.get() + (first + column) * keys.stride(), keys.stride(), n, dots.get(),
                              target + column);
            }
            for (column = std::max(from, std::min(to, count)); column < to; ++column) target[column] = -kInf;
        }
    });
}

}  // namespace

void bind_scores(py::module_& m) {
    m.def("scores_paged", &scores_paged);
    m.def("scores_blocks", &scores_blocks);
    m.def("scores_ragged", &scores_ragged);
}

}  // namespace deepinfer::cpu
