// The ends of the model: means over streams, the draft's Markov head and its confidence.
#include <algorithm>

#include "bind.hpp"
#include "dot.hpp"
#include "gemm.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

void stream_mean(Address out, Address h, int kind, i64 rows, i64 streams, i64 hidden, int num_threads) {
    const py::gil_scoped_release unlocked;
    const i64 width = streams * hidden;
    parallel_rows(rows, 4, threads_for(static_cast<double>(rows * width), num_threads), [&](i64 begin, i64 end) {
        Buffer wide(width), sum(hidden);
        for (i64 row = begin; row < end; ++row) {
            const float* x = as_f32(at<const u8>(h) + row * code_bytes(kind, width), kind, width, wide.get());
            std::copy_n(x, hidden, sum.get());
            for (i64 m = 1; m < streams; ++m) add_row(sum.get(), x + m * hidden, hidden);
            for (i64 i = 0; i < hidden; ++i) sum.get()[i] /= static_cast<float>(streams);
            narrow(sum.get(), hidden, kind, at<u8>(out) + row * code_bytes(kind, hidden));
        }
    });
}

// out [T, V] = base + embed[token] head^T
void markov(Address out, Address base, i64 rows, i64 vocabulary, Address tokens, Address embed, int embed_kind,
            i64 embed_rows, Address head, int head_kind, i64 rank, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Operand table = Operand::dense(embed, 0, embed_kind, rank);
    Buffer picked(rows * rank);
    for (i64 row = 0; row < rows; ++row) {
        check_index(at<const i32>(tokens)[row], embed_rows, "token");
        table.read(at<const i32>(tokens)[row], 0, rank, picked.get() + row * rank);
    }
    Product job{picked.get(), rank, rows, Operand::dense(head, 0, head_kind, rank), at<u8>(out), 4 * vocabulary};
    job.acc = at<const u8>(base);
    job.acc_row_bytes = 4 * vocabulary;
    run_products({job}, {vocabulary, rank, kF32}, num_threads);
}

// out [T] = sigmoid((hidden, embed[token]) . proj / temperature)
void confidence(Address out, Address hidden, int kind, i64 rows, i64 width, Address tokens, Address embed,
                int embed_kind, i64 embed_rows, i64 rank, Address proj, int proj_kind, float temperature) {
    const py::gil_scoped_release unlocked;
    const Operand table = Operand::dense(embed, 0, embed_kind, rank);
    const i64 total = width + rank;
    Buffer weight_copy(total), features(total);
    const float* weight = as_f32(at<const void>(proj), proj_kind, total, weight_copy.get());
    for (i64 row = 0; row < rows; ++row) {
        check_index(at<const i32>(tokens)[row], embed_rows, "token");
        widen(at<const u8>(hidden) + row * code_bytes(kind, width), kind, width, features.get());
        table.read(at<const i32>(tokens)[row], 0, rank, features.get() + width);
        float logit = 0.0F;
        dot_rows(features.get(), total, 1, weight, total, 1, total, &logit, 1);
        at<float>(out)[row] = sigmoid_f32(logit / temperature);
    }
}

}  // namespace

void bind_heads(py::module_& m) {
    m.def("stream_mean", &stream_mean);
    m.def("markov", &markov);
    m.def("confidence", &confidence);
}

}  // namespace deepinfer::cpu
