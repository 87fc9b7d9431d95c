// Hyper-connections: writing streams back, mixing logits, the stream matrix, and the fused step between two sublayers.
//
// Rows are taken a few at a time, so that the mixing matrix is read once for several of them.
#include <algorithm>
#include <cmath>

#include "bind.hpp"
#include "dot.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

namespace {

constexpr i64 kBlock = 4;  // rows of one block

struct Streams {
    i64 count, hidden;
    i64 width() const { return count * hidden; }
    i64 mixes() const { return count * (count + 2); }
};

// new_j = post_j y + sum_i comb_ij h_i, i ascending; all fp32.
void post_row(const Streams& s, const float* y, const float* h, const float* post, const float* comb, float* out) {
    Buffer kept(s.hidden);
    for (i64 j = 0; j < s.count; ++j) {
        std::fill_n(kept.get(), s.hidden, 0.0F);
        for (i64 i = 0; i < s.count; ++i) add_scaled(kept.get(), comb[i * s.count + j], h + i * s.hidden, s.hidden);
        add_scaled(kept.get(), post[j], y, s.hidden);
        std::copy_n(kept.get(), s.hidden, out + j * s.hidden);
    }
}

void read_row(const Streams& s, const float* h, const float* pre, float* out) {
    std::fill_n(out, s.hidden, 0.0F);
    for (i64 i = 0; i < s.count; ++i) add_scaled(out, pre[i], h + i * s.hidden, s.hidden);
}

// mix [rows, mixes] of streams h [rows, width].
void mix_rows(const Streams& s, const float* h, i64 rows, const float* fn, float eps, float* mix) {
    dot_rows(h, s.width(), rows, fn, s.width(), s.mixes(), s.width(), mix, s.mixes());
    for (i64 r = 0; r < rows; ++r) {
        const float mean = sum_of_squares(h + r * s.width(), s.width()) / static_cast<float>(s.width());
        scale_row(mix + r * s.mixes(), 1.0F / std::sqrt(mean + eps), s.mixes());
    }
}

void normalise_columns(float* comb, i64 n, float eps) {
    for (i64 j = 0; j < n; ++j) {
        float sum = 0.0F;
        for (i64 i = 0; i < n; ++i) sum += comb[i * n + j];
        for (i64 i = 0; i < n; ++i) comb[i * n + j] /= sum + eps;
    }
}

void normalise_rows(float* comb, i64 n, float eps) {
    for (i64 i = 0; i < n; ++i) {
        float sum = 0.0F;
        for (i64 j = 0; j < n; ++j) sum += comb[i * n + j];
        for (i64 j = 0; j < n; ++j) comb[i * n + j] /= sum + eps;
    }
}

void split_row(const float* mix, const float* scale, const float* base, i64 n, i64 iters, float eps, float* pre,
               float* post, float* comb) {
    for (i64 i = 0; i < n; ++i) {
        pre[i] = sigmoid_f32(mix[i] * scale[0] + base[i]) + eps;
        post[i] = 2.0F * sigmoid_f32(mix[n + i] * scale[1] + base[n + i]);
    }
    for (i64 i = 0; i < n; ++i) {
        float* row = comb + i * n;
        float top = -kInf, sum = 0.0F;
        for (i64 j = 0; j < n; ++j) {
            row[j] = mix[2 * n + i * n + j] * scale[2] + base[2 * n + i * n + j];
            top = row[j] > top ? row[j] : top;
        }
        for (i64 j = 0; j < n; ++j) {
            row[j] = exp_f32(row[j] - top);
            sum += row[j];
        }
        for (i64 j = 0; j < n; ++j) row[j] = row[j] / sum + eps;
    }
    normalise_columns(comb, n, eps);
    for (i64 round = 1; round < iters; ++round) {
        normalise_rows(comb, n, eps);
        normalise_columns(comb, n, eps);
    }
}

template <class Fn>
void for_blocks(i64 rows, i64 width, int num_threads, Fn&& fn) {
    const py::gil_scoped_release unlocked;
    const int threads = threads_for(static_cast<double>(rows) * static_cast<double>(width), num_threads);
    parallel_rows(rows, kBlock, threads, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; row += kBlock) fn(row, std::min(kBlock, end - row));
    });
}

void mhc_mix(Address mix, Address h, int kind, i64 rows, i64 count, i64 hidden, Address fn, float eps,
             int num_threads) {
    const Streams s{count, hidden};
    for_blocks(rows, s.width() * s.mixes() / 8, num_threads, [&](i64 row, i64 n) {
        Buffer wide(kind == kF32 ? 0 : n * s.width());
        const float* x = as_f32(at<const u8>(h) + row * code_bytes(kind, s.width()), kind, n * s.width(), wide.get());
        mix_rows(s, x, n, at<const float>(fn), eps, at<float>(mix) + row * s.mixes());
    });
}

void mhc_split(Address pre, Address post, Address comb, Address mix, i64 rows, i64 count, Address scale, Address base,
               i64 iters, float eps, int num_threads) {
    for_blocks(rows, count * count * iters * 4, num_threads, [&](i64 begin, i64 n) {
        for (i64 row = begin; row < begin + n; ++row) {
            split_row(at<const float>(mix) + row * count * (count + 2), at<const float>(scale), at<const float>(base),
                      count, iters, eps, at<float>(pre) + row * count, at<float>(post) + row * count,
                      at<float>(comb) + row * count * count);
        }
    });
}

void mhc_apply(Address out, Address h, int kind, i64 rows, i64 count, i64 hidden, Address pre, int num_threads) {
    const Streams s{count, hidden};
    for_blocks(rows, s.width(), num_threads, [&](i64 begin, i64 n) {
        Buffer wide(kind == kF32 ? 0 : s.width()), y(hidden);
        for (i64 row = begin; row < begin + n; ++row) {
            const float* x = as_f32(at<const u8>(h) + row * code_bytes(kind, s.width()), kind, s.width(), wide.get());
            read_row(s, x, at<const float>(pre) + row * count, y.get());
            narrow(y.get(), hidden, kind, at<u8>(out) + row * code_bytes(kind, hidden));
        }
    });
}

// New streams from y; with `fn`, also the mix of the next sublayer and its normed input.
void mhc_step(Address out, Address y, int y_kind, Address h, int kind, i64 rows, i64 count, i64 hidden, Address post,
              Address comb, Address read, Address fn, Address scale, Address base, i64 iters, float hc_eps,
              Address norm_weight, int norm_kind, float norm_eps, Address normed, Address next_pre, Address next_post,
              Address next_comb, int num_threads) {
    const Streams s{count, hidden};
    Buffer copied(norm_weight ? hidden : 0);
    const float* norm = norm_weight ? as_f32(at<const void>(norm_weight), norm_kind, hidden, copied.get()) : nullptr;
    const i64 stream_bytes = code_bytes(kind, s.width());
    for_blocks(rows, s.width() * (count + s.mixes() / 8), num_threads, [&](i64 begin, i64 n) {
        Buffer old(s.width()), added(hidden), streams(n * s.width()), mix(n * s.mixes());
        for (i64 r = 0; r < n; ++r) {
            const i64 row = begin + r;
            const float* x = as_f32(at<const u8>(h) + row * stream_bytes, kind, s.width(), old.get());
            const float* add = as_f32(at<const u8>(y) + row * code_bytes(y_kind, hidden), y_kind, hidden, added.get());
            float* target = streams.get() + r * s.width();
            post_row(s, add, x, at<const float>(post) + row * count, at<const float>(comb) + row * count * count,
                     target);
            if (kind == kBF16) round_row(target, s.width());
            narrow(target, s.width(), kind, at<u8>(out) + row * stream_bytes);
        }
        if (!fn) return;
        mix_rows(s, streams.get(), n, at<const float>(fn), norm_eps, mix.get());
        for (i64 r = 0; r < n; ++r) {
            const i64 row = begin + r;
            split_row(mix.get() + r * s.mixes(), at<const float>(scale), at<const float>(base), count, iters, hc_eps,
                      at<float>(next_pre) + row * count, at<float>(next_post) + row * count,
                      at<float>(next_comb) + row * count * count);
            read_row(s, streams.get() + r * s.width(), at<const float>(read) + row * count, added.get());
            if (kind == kBF16) round_row(added.get(), hidden);
            norm_row(added.get(), norm, hidden, norm_eps, added.get());
            narrow(added.get(), hidden, kind, at<u8>(normed) + row * code_bytes(kind, hidden));
        }
    });
}

}  // namespace

void bind_mhc(py::module_& m) {
    m.def("mhc_mix", &mhc_mix);
    m.def("mhc_split", &mhc_split);
    m.def("mhc_apply", &mhc_apply);
    m.def("mhc_step", &mhc_step);
}

}  // namespace deepinfer::cpu
