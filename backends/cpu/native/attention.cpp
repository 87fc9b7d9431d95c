// Sparse attention over the records that slots name, the merge of partial results, and attention inside one image.
//
// Holes are left out before anything is added, so a row's bits depend on its own slots alone, not on where holes stand
// or on how wide the index is. Heads are independent: a single row is spread over threads by heads, many rows by rows.
#include <algorithm>
#include <cmath>

#include "bind.hpp"
#include "cache.hpp"
#include "codes.hpp"
#include "dot.hpp"
#include "simd.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

constexpr i64 kPad = 16;  // floats between decoded rows: rows of a power of two would share cache sets

struct SoftmaxSum {
    float top;    // 0 when there is no finite score
    float total;  // of the unrounded weights
};

// Scores to weights exp(s * scale - top), in place; rounded to bfloat16 after the sum when asked.
DEEPINFER_CLONES SoftmaxSum softmax_weights(float* s, i64 n, float scale, bool round) {
    V8 best = {};
    best += -kInf;
    i64 i = 0;
    for (; i + 8 <= n; i += 8) {
        const V8 v = load8(s + i) * scale;
        store8(s + i, v);
        best = v > best ? v : best;
    }
    float top = -kInf;
    for (int l = 0; l < 8; ++l) top = best[l] > top ? best[l] : top;
    for (; i < n; ++i) {
        s[i] *= scale;
        top = s[i] > top ? s[i] : top;
    }
    top = top == -kInf ? 0.0F : top;  // an empty row must not make NaN
    for (i = 0; i < n; ++i) s[i] = exp_f32(s[i] - top);
    const float total = sum_of(s, n);
    if (round) {
        for (i = 0; i < n; ++i) s[i] = round_bf16(s[i]);
    }
    return {top, total};
}

DEEPINFER_CLONES void divide_row(float* x, float by, i64 n) {
    for (i64 i = 0; i < n; ++i) x[i] /= by;
}

struct Attention {
    Cache window, compressed;
    const u8* q;
    int kind;
    i64 heads, dim;
    const i32* window_slots;
    i64 window_columns;
    const i32* slots;
    i64 columns;
    float scale;
    const float* sink;
    u8* out;
    float* lse;

    i64 max_keys() const { return window_columns + columns; }
    i64 stride() const { return dim + kPad; }

    // The row's valid slots in column order, window first; returns how many, and how many of them are of the window.
    std::pair<i64, i64> list(i64 row, i32* keys) const {
        i64 count = 0;
        for (i64 c = 0; c < window_columns; ++c) {
            const i32 slot = window_slots[row * window_columns + c];
            if (slot >= 0) keys[count++] = slot;
        }
        const i64 of_window = count;
        for (i64 c = 0; c < columns; ++c) {
            const i32 slot = slots[row * columns + c];
            if (slot >= 0) keys[count++] = slot;
        }
        return {count, of_window};
    }

    void decode(const i32* keys, i64 of_window, i64 begin, i64 end, float* values) const {
        for (i64 j = begin; j < end; ++j) (j < of_window ? window : compressed).read(keys[j], values + j * stride());
    }

    // Heads [begin, end) of one row over n decoded keys.
    void attend(i64 row, i64 begin, i64 end, const float* values, i64 n) const {
        const i64 count = end - begin, first = row * heads + begin;
        Buffer wide(count * dim), weights(count * std::max<i64>(n, 1)), sums(count * dim);
        widen(q + first * code_bytes(kind, dim), kind, count * dim, wide.get());
        if (n > 0) dot_rows(wide.get(), dim, count, values, stride(), n, dim, weights.get(), n);
        std::fill_n(sums.get(), count * dim, 0.0F);
        Small<SoftmaxSum, 128> softmax(count);
        for (i64 h = 0; h < count; ++h)
            softmax.get()[h] = softmax_weights(weights.get() + h * n, n, scale, kind == kBF16);
        weighted_sum(weights.get(), n, count, values, stride(), n, dim, sums.get(), dim);
        for (i64 h = 0; h < count; ++h) {
            const auto [top, total] = softmax.get()[h];
            float* o = sums.get() + h * dim;
            lse[first + h] = log_f32(total) + top;
            if (total == 0.0F) {
                std::fill_n(o, dim, 0.0F);  // no key: zero even beside an infinite sink
            } else {
                divide_row(o, total + exp_f32(sink[begin + h] - top), dim);
            }
        }
        narrow(sums.get(), count * dim, kind, out + first * code_bytes(kind, dim));
    }

    void run(i64 rows, int num_threads) const {
        const double operations = static_cast<double>(rows * max_keys()) * static_cast<double>(heads * dim) / 4;
        const int threads = threads_for(operations, num_threads);
        if (rows >= threads) {
            parallel_rows(rows, std::max<i64>(1, rows / (4 * threads)), threads, [&](i64 begin, i64 end) {
                Buffer values(max_keys() * stride());
                Small<i32, 1024> keys(max_keys());
                for (i64 row = begin; row < end; ++row) {
                    const auto [n, of_window] = list(row, keys.get());
                    decode(keys.get(), of_window, 0, n, values.get());
                    attend(row, 0, heads, values.get(), n);
                }
            });
            return;
        }
        Buffer values(max_keys() * stride());
        Small<i32, 1024> keys(max_keys());
        for (i64 row = 0; row < rows; ++row) {
            const auto [n, of_window] = list(row, keys.get());
            const i64 of = of_window, count = n;  // a lambda cannot capture structured bindings portably
            parallel_rows(n, 32, threads,
                          [&](i64 begin, i64 end) { decode(keys.get(), of, begin, end, values.get()); });
            parallel_rows(heads, 8, threads, [&](i64 begin, i64 end) { attend(row, begin, end, values.get(), count); });
        }
    }
};

void sparse_attn(Address out, Address lse, Address q, int kind, i64 rows, i64 heads, i64 dim, const CacheArgs& window,
                 Address window_slots, i64 window_columns, const CacheArgs& compressed, Address slots, i64 columns,
                 float scale, Address sink, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Attention attention{Cache(window),
                              Cache(compressed),
                              at<const u8>(q),
                              kind,
                              heads,
                              dim,
                              at<const i32>(window_slots),
                              window_columns,
                              at<const i32>(slots),
                              columns,
                              scale,
                              at<const float>(sink),
                              at<u8>(out),
                              at<float>(lse)};
    attention.run(rows, num_threads);
}

// o [S, R, D] and lse [S, R] to out [R, D] and lse [R]; splits in ascending order.
void attn_merge(Address out, int kind, Address out_lse, Address o, Address lse, i64 splits, i64 rows, i64 dim,
                int num_threads) {
    const py::gil_scoped_release unlocked;
    const float* parts = at<const float>(o);
    const float* sums = at<const float>(lse);
    parallel_rows(rows, 16, threads_for(static_cast<double>(splits * rows * dim), num_threads),
                  [&](i64 begin, i64 end) {
                      Buffer merged(dim);
                      for (i64 row = begin; row < end; ++row) {
                          float top = -kInf;
                          for (i64 s = 0; s < splits; ++s) {
                              const float v = sums[s * rows + row];
                              top = v > top || v != v ? v : top;
                          }
                          top = top == -kInf ? 0.0F : top;
                          std::fill_n(merged.get(), dim, 0.0F);
                          float total = 0.0F;
                          for (i64 s = 0; s < splits; ++s) {
                              const float weight = exp_f32(sums[s * rows + row] - top);
                              total += weight;
                              add_scaled(merged.get(), weight, parts + (s * rows + row) * dim, dim);
                          }
                          if (!(total <= 0.0F)) divide_row(merged.get(), total, dim);
                          narrow(merged.get(), dim, kind, at<u8>(out) + row * code_bytes(kind, dim));
                          at<float>(out_lse)[row] = log_f32(total) + top;
                      }
                  });
}

// Every patch over all patches of its image: q, k, v, out [T, heads, D].
void vision_attn(Address out, Address q, Address k, Address v, int kind, i64 rows, i64 heads, i64 dim,
                 Address cu_seqlens, i64 images, float scale, int num_threads) {
    const py::gil_scoped_release unlocked;
    const i32* ends = at<const i32>(cu_seqlens);
    const i64 width = heads * dim, bytes = code_bytes(kind, width);
    constexpr i64 kQueries = 32;
    Buffer wide_k(kind == kF32 ? 0 : rows * width), wide_v(kind == kF32 ? 0 : rows * width);
    const float* keys = as_f32(at<const void>(k), kind, rows * width, wide_k.get());
    const float* values = as_f32(at<const void>(v), kind, rows * width, wide_v.get());
    for (i64 image = 0; image < images; ++image) {
        const i64 first = ends[image], n = ends[image + 1] - first;
        if (n <= 0) continue;
        check_index(first, rows, "image start");
        check_index(first + n - 1, rows, "image end");
        const int threads = threads_for(static_cast<double>(n * n) * static_cast<double>(width) / 4, num_threads);
        parallel_rows(n, kQueries, threads, [&](i64 begin, i64 end) {
            for (i64 start = begin; start < end; start += kQueries) {
                const i64 count = std::min(kQueries, end - start);
                Buffer wide(count * width), weights(count * n), sums(count * width);
                widen(at<const u8>(q) + (first + start) * bytes, kind, count * width, wide.get());
                std::fill_n(sums.get(), count * width, 0.0F);
                for (i64 h = 0; h < heads; ++h) {
                    const i64 at_head = first * width + h * dim;
                    dot_rows(wide.get() + h * dim, width, count, keys + at_head, width, n, dim, weights.get(), n);
                    for (i64 i = 0; i < count; ++i) {
                        float* row = weights.get() + i * n;
                        divide_row(row, softmax_weights(row, n, scale, false).total, n);
                    }
                    weighted_sum(weights.get(), n, count, values + at_head, width, n, dim, sums.get() + h * dim, width);
                }
                narrow(sums.get(), count * width, kind, at<u8>(out) + (first + start) * bytes);
            }
        });
    }
}

}  // namespace

void bind_attention(py::module_& m) {
    m.def("sparse_attn", &sparse_attn);
    m.def("attn_merge", &attn_merge);
    m.def("vision_attn", &vision_attn);
}

}  // namespace deepinfer::cpu
