// The sampling ops over NumPy arrays. Rows, or the requests of `verify`, are spread over threads, each computed alone.
#include <pybind11/numpy.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind.hpp"
#include "sampling.hpp"

namespace {

using namespace deepinfer::cpu;

template <class T>
using Array = py::array_t<T, py::array::c_style>;
using Floats = Array<float>;
using Ints = Array<std::int32_t>;
using Seeds = Array<std::int64_t>;

constexpr u32 kTarget = 0, kAccept = 2, kResidual = 3;  // ops/philox.py

void require(bool holds, const char* what) {
    if (!holds) throw std::invalid_argument(std::string("sampling kernels: ") + what);
}

RowWork& thread_work() {
    thread_local RowWork work;
    return work;
}

struct Matrix {
    explicit Matrix(const Floats& x) : data(x.data()), rows(x.shape(0)), ids(x.shape(1)) {
        require(x.ndim() == 2 && ids >= 1, "logits are [N, V] with V >= 1");
    }
    const float* row(i64 r) const { return data + r * ids; }

    const float* data;
    i64 rows, ids;
};

// Filters, and where they draw from, one entry per row or request.
struct Params {
    Params(const Floats& t, const Ints& k, const Floats& p, const Floats& m, i64 n)
        : temperature(t.data()), top_k(k.data()), top_p(p.data()), min_p(m.data()) {
        require(t.size() == n && k.size() == n && p.size() == n && m.size() == n, "one filter entry per row");
    }
    Filters operator[](i64 r) const { return {temperature[r], top_k[r], top_p[r], min_p[r]}; }

    const float* temperature;
    const std::int32_t* top_k;
    const float *top_p, *min_p;
};

struct Keys {
    Keys(const Seeds& s, const Ints& k, const Ints& c, i64 n)
        : seeds(s.data()), output_index(k.data()), choice(c.data()) {
        require(s.size() == n && k.size() == n && c.size() == n, "one seed, output index and choice per row");
    }
    DrawKey at(i64 r, i64 offset, u32 purpose, u32 anchor = 0) const {
        return {static_cast<std::uint64_t>(seeds[r]), static_cast<u32>(output_index[r] + offset),
                purpose + 256U * static_cast<u32>(choice[r]), anchor};
    }

    const std::int64_t* seeds;
    const std::int32_t *output_index, *choice;
};

void apply_bitmask(Floats& logits, const Ints& mask, const Ints& rows, int num_threads) {
    const Matrix x(logits);
    const i64 words = (x.ids + 31) / 32;
    require(mask.ndim() == 2 && mask.shape(1) == words, "mask is [B, ceil(V / 32)]");
    require(rows.size() == x.rows, "one mask row per row of logits");
    float* data = logits.mutable_data();
    const std::int32_t *masks = mask.data(), *row_of = rows.data();
    const i64 num_masks = mask.shape(0);
    for (i64 r = 0; r < x.rows; ++r) require(row_of[r] < num_masks, "a mask row is past the mask");
    const py::gil_scoped_release nogil;
    parallel_rows(x.rows, 1, num_threads, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) {
            if (row_of[r] < 0) continue;
            for (i64 w = 0; w < words; ++w) {
                const u32 allowed = static_cast<u32>(masks[row_of[r] * words + w]);
                if (allowed == 0xFFFFFFFFU) continue;
                float* place = data + r * x.ids + 32 * w;
                const int count = static_cast<int>(std::min<i64>(32, x.ids - 32 * w));
                for (int bit = 0; bit < count; ++bit) place[bit] = (allowed >> bit) & 1U ? place[bit] : -kInf;
            }
        }
    });
}

void process_logits(const Floats& logits, const Floats& temperature, const Ints& top_k, const Floats& top_p,
                    const Floats& min_p, Floats& out, int num_threads) {
    const Matrix x(logits);
    const Params params(temperature, top_k, top_p, min_p, x.rows);
    require(out.size() == x.rows * x.ids, "out is like logits");
    float* dst = out.mutable_data();
    const py::gil_scoped_release nogil;
    parallel_rows(x.rows, 1, num_threads, [&](i64 begin, i64 end) {
        RowWork& work = thread_work();
        for (i64 r = begin; r < end; ++r) {
            filter_row(x.row(r), x.ids, params[r], work);
            const float* scores = work.kind == RowKind::kUnusable ? x.row(r) : dense_scores(x.ids, work);
            std::copy(scores, scores + x.ids, dst + r * x.ids);
        }
    });
}

void sample(const Floats& logits, const Floats& temperature, const Ints& top_k, const Floats& top_p,
            const Floats& min_p, const Seeds& seeds, const Ints& output_index, const Ints& choice, int purpose,
            const Ints& anchor, Ints& out, int num_threads) {
    const Matrix x(logits);
    const Params params(temperature, top_k, top_p, min_p, x.rows);
    const Keys keys(seeds, output_index, choice, x.rows);
    require(anchor.size() == x.rows || anchor.size() == 0, "one anchor per row, or none");
    require(out.size() == x.rows, "one token per row");
    const std::int32_t* anchors = anchor.size() == 0 ? nullptr : anchor.data();
    std::int32_t* tokens = out.mutable_data();
    const py::gil_scoped_release nogil;
    parallel_rows(x.rows, 1, num_threads, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) {
            const u32 first = anchors == nullptr ? 0U : static_cast<u32>(anchors[r]);
            const DrawKey key = keys.at(r, 0, static_cast<u32>(purpose), first);
            tokens[r] = sample_row(x.row(r), x.ids, params[r], key, thread_work());
        }
    });
}

void token_logprobs(const Floats& logits, const Ints& tokens, i64 num_top, Floats& logprob, Ints& rank, Ints& top_ids,
                    Floats& top_logprobs, int num_threads) {
    const Matrix x(logits);
    require(num_top >= 0 && num_top <= x.ids, "0 <= num_top <= V");
    require(tokens.size() == x.rows && logprob.size() == x.rows && rank.size() == x.rows, "one token per row");
    require(top_ids.size() == x.rows * num_top && top_logprobs.size() == x.rows * num_top, "num_top ids per row");
    const std::int32_t* token = tokens.data();
    float *own = logprob.mutable_data(), *tops = top_logprobs.mutable_data();
    std::int32_t *place = rank.mutable_data(), *ids = top_ids.mutable_data();
    const py::gil_scoped_release nogil;
    parallel_rows(x.rows, 1, num_threads, [&](i64 begin, i64 end) {
        RowWork& work = thread_work();
        for (i64 r = begin; r < end; ++r) {
            const float* row = x.row(r);
            filter_row(row, x.ids, {.temperature = 0.0F}, work);
            own[r] = kNaN;
            place[r] = 0;
            if (work.kind == RowKind::kUnusable) {
                std::fill_n(ids + r * num_top, num_top, -1);
                std::fill_n(tops + r * num_top, num_top, kNaN);
                continue;
            }
            const float log_total = log_f32(static_cast<float>(exp_and_sum(row, x.ids, work.best, nullptr)));
            const i64 id = token[r];
            if (id >= 0 && id < x.ids) {
                own[r] = (row[id] - work.best) - log_total;
                place[r] = static_cast<std::int32_t>(1 + count_better(row, x.ids, row[id], id));
            }
            best_ids(row, x.ids, num_top, work, ids + r * num_top);
            for (i64 i = r * num_top; i < (r + 1) * num_top; ++i) tops[i] = (row[ids[i]] - work.best) - log_total;
        }
    });
}

// fp32 probabilities of a filtered row.
void probabilities(i64 n, RowWork& work, std::vector<float>& p) {
    p.resize(static_cast<std::size_t>(n));
    const float total = static_cast<float>(exp_and_sum(dense_scores(n, work), n, work.best, p.data()));
    divide_row(p.data(), n, total, p.data());
}

// One row of rejection sampling: the draft if it is kept, else its replacement; -1 for an unusable target row.
std::int32_t accept_or_replace(const float* target, const float* drafted, i64 n, std::int32_t draft,
                               const Filters& filters, const Keys& keys, i64 request, i64 offset) {
    thread_local RowWork draft_work;
    thread_local std::vector<float> p, q, residual;
    RowWork& work = thread_work();
    filter_row(drafted, n, filters, draft_work);
    filter_row(target, n, filters, work);
    if (work.kind == RowKind::kUnusable || draft_work.kind == RowKind::kUnusable) {
        return sample_row(target, n, filters, keys.at(request, offset, kTarget), work);
    }
    probabilities(n, work, p);
    probabilities(n, draft_work, q);
    if (draft < n) {
        u32 words[4];
        const u32 quad = 0;
        philox_words(&quad, 1, keys.at(request, offset, kAccept), words);
        if (uniform_f32(words[0]) * q[draft] < p[draft]) return draft;
    }
    residual.resize(static_cast<std::size_t>(n));
    log_residual(p.data(), q.data(), n, residual.data());
    const bool any = max_of(residual.data(), n) > -kInf;
    return draw_dense(any ? residual.data() : dense_scores(n, work), n, keys.at(request, offset, kResidual));
}

void verify(const Floats& logits, const Ints& cu_seqlens, const Ints& draft_ids, const Floats& temperature,
            const Ints& top_k, const Floats& top_p, const Floats& min_p, const Seeds& seeds, const Ints& output_index,
            const Ints& choice, const Floats& draft_logits, Ints& num_emitted, Ints& tokens, int num_threads) {
    const Matrix x(logits);
    const i64 num_requests = cu_seqlens.size() - 1;
    require(num_requests >= 0, "cu_seqlens is [R + 1]");
    const Params params(temperature, top_k, top_p, min_p, num_requests);
    const Keys keys(seeds, output_index, choice, num_requests);
    const bool rejection = draft_logits.size() > 0;  // coupled mode passes none
    require(!rejection || draft_logits.size() == x.rows * x.ids, "draft_logits is like logits");
    require(draft_ids.size() == x.rows && tokens.size() == x.rows, "one draft and one token per row");
    require(num_emitted.size() == num_requests, "one count per request");
    const std::int32_t *bounds = cu_seqlens.data(), *drafts = draft_ids.data();
    for (i64 r = 0; r < num_requests; ++r) require(bounds[r] <= bounds[r + 1], "cu_seqlens falls");
    require(bounds[0] >= 0 && bounds[num_requests] <= x.rows, "cu_seqlens goes past the rows");
    const float* drafted = draft_logits.data();
    std::int32_t *counts = num_emitted.mutable_data(), *emitted = tokens.mutable_data();
    const py::gil_scoped_release nogil;
    std::fill_n(emitted, x.rows, -1);
    parallel_rows(num_requests, 1, num_threads, [&](i64 begin, i64 end) {
        for (i64 r = begin; r < end; ++r) {
            counts[r] = 0;
            for (i64 row = bounds[r]; row < bounds[r + 1]; ++row) {
                const i64 offset = row - bounds[r];
                const std::int32_t draft = row + 1 == bounds[r + 1] ? -1 : drafts[row];
                const Filters filters = params[r];
                const bool coupled = !rejection || draft < 0 || !(filters.temperature > 0.0F);
                if (coupled) {
                    emitted[row] = sample_row(x.row(row), x.ids, filters, keys.at(r, offset, kTarget), thread_work());
                } else {
                    const float* draft_row = drafted + row * x.ids;
                    emitted[row] = accept_or_replace(x.row(row), draft_row, x.ids, draft, filters, keys, r, offset);
                }
                ++counts[r];
                if (emitted[row] != draft || emitted[row] < 0) break;
            }
        }
    });
}

}  // namespace

void bind_sampling(py::module_& m) {
    m.def("apply_bitmask", &apply_bitmask, py::arg("logits").noconvert(), py::arg("mask").noconvert(),
          py::arg("rows").noconvert(), py::arg("num_threads"));
    m.def("process_logits", &process_logits, py::arg("logits").noconvert(), py::arg("temperature").noconvert(),
          py::arg("top_k").noconvert(), py::arg("top_p").noconvert(), py::arg("min_p").noconvert(),
          py::arg("out").noconvert(), py::arg("num_threads"));
    m.def("sample", &sample, py::arg("logits").noconvert(), py::arg("temperature").noconvert(),
          py::arg("top_k").noconvert(), py::arg("top_p").noconvert(), py::arg("min_p").noconvert(),
          py::arg("seeds").noconvert(), py::arg("output_index").noconvert(), py::arg("choice").noconvert(),
          py::arg("purpose"), py::arg("anchor").noconvert(), py::arg("out").noconvert(), py::arg("num_threads"));
    m.def("token_logprobs", &token_logprobs, py::arg("logits").noconvert(), py::arg("tokens").noconvert(),
          py::arg("num_top"), py::arg("logprob").noconvert(), py::arg("rank").noconvert(),
          py::arg("top_ids").noconvert(), py::arg("top_logprobs").noconvert(), py::arg("num_threads"));
    m.def("verify", &verify, py::arg("logits").noconvert(), py::arg("cu_seqlens").noconvert(),
          py::arg("draft_ids").noconvert(), py::arg("temperature").noconvert(), py::arg("top_k").noconvert(),
          py::arg("top_p").noconvert(), py::arg("min_p").noconvert(), py::arg("seeds").noconvert(),
          py::arg("output_index").noconvert(), py::arg("choice").noconvert(), py::arg("draft_logits").noconvert(),
          py::arg("num_emitted").noconvert(), py::arg("tokens").noconvert(), py::arg("num_threads"));
}
