// RMSNorm, rotary embedding and the quantisers, row by row.
#include "bind.hpp"
#include "codes.hpp"
#include "rope.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

namespace {

constexpr i64 kGrain = 8;

template <class Fn>
void for_rows(i64 rows, i64 width, int num_threads, Fn&& fn) {
    const py::gil_scoped_release unlocked;
    const double operations = static_cast<double>(rows) * static_cast<double>(width);
    parallel_rows(rows, kGrain, threads_for(operations, num_threads), fn);
}

// Norm of every row; with codes, also quantised. A row is rounded to its own kind before it is quantised.
void rms_norm(Address out, Address x, int kind, i64 rows, i64 n, Address weight, int weight_kind, float eps,
              Address codes, Address scales, int fmt, int num_threads) {
    Buffer copied(weight ? n : 0);
    const float* w = weight ? as_f32(at<const void>(weight), weight_kind, n, copied.get()) : nullptr;
    const i64 row_bytes = code_bytes(kind, n);
    for_rows(rows, n, num_threads, [&](i64 begin, i64 end) {
        Buffer y(n);
        for (i64 row = begin; row < end; ++row) {
            widen(at<const u8>(x) + row * row_bytes, kind, n, y.get());
            norm_row(y.get(), w, n, eps, y.get());
            if (kind == kBF16) round_row(y.get(), n);
            narrow(y.get(), n, kind, at<u8>(out) + row * row_bytes);
            if (codes) {
                encode_row(y.get(), n, fmt, at<u8>(codes) + row * code_bytes(fmt, n),
                           at<u8>(scales) + row * scale_bytes(fmt, n));
            }
        }
    });
}

// Rotate the end of every head, after an optional norm of the head; quantise when codes are asked for.
void rope(Address out, Address x, int kind, i64 rows, i64 heads, i64 dim, Address positions, Address table,
          i64 table_rows, i64 table_width, bool conjugate, bool normalise, float eps, Address codes, Address scales,
          int fmt, int num_threads) {
    const RopeTable turn{at<const float>(table), table_rows, table_width};
    const i64 head_bytes = code_bytes(kind, dim);
    for_rows(rows, heads * dim, num_threads, [&](i64 begin, i64 end) {
        Buffer head(dim);
        float* y = head.get();
        for (i64 row = begin; row < end; ++row) {
            const i64 position = at<const std::int32_t>(positions)[row];
            for (i64 h = row * heads; h < (row + 1) * heads; ++h) {
                widen(at<const u8>(x) + h * head_bytes, kind, dim, y);
                if (normalise) {
                    norm_row(y, nullptr, dim, eps, y);
                    if (kind == kBF16) round_row(y, dim);
                }
                turn.rotate(y, dim, position, conjugate);
                if (codes) {
                    if (kind == kBF16) round_row(y, dim);
                    encode_row(y, dim, fmt, at<u8>(codes) + h * code_bytes(fmt, dim),
                               at<u8>(scales) + h * scale_bytes(fmt, dim));
                } else {
                    narrow(y, dim, kind, at<u8>(out) + h * head_bytes);
                }
            }
        }
    });
}

void quantize(Address codes, Address scales, int fmt, Address x, int kind, i64 rows, i64 n, int num_threads) {
    for_rows(rows, n, num_threads, [&](i64 begin, i64 end) {
        Buffer copied(kind == kF32 ? 0 : n);
        for (i64 row = begin; row < end; ++row) {
            const float* wide = as_f32(at<const u8>(x) + row * code_bytes(kind, n), kind, n, copied.get());
            encode_row(wide, n, fmt, at<u8>(codes) + row * code_bytes(fmt, n),
                       at<u8>(scales) + row * scale_bytes(fmt, n));
        }
    });
}

void dequantize(Address out, int kind, Address codes, Address scales, int fmt, i64 rows, i64 n, int num_threads) {
    for_rows(rows, n, num_threads, [&](i64 begin, i64 end) {
        Buffer wide(n);
        for (i64 row = begin; row < end; ++row) {
            const u8* scale = at<const u8>(scales) + row * scale_bytes(fmt, n);
            decode_row(at<const u8>(codes) + row * code_bytes(fmt, n), scale, fmt, n, wide.get());
            narrow(wide.get(), n, kind, at<u8>(out) + row * code_bytes(kind, n));
        }
    });
}

}  // namespace

void bind_norm(py::module_& m) {
    m.def("rms_norm", &rms_norm);
    m.def("rope", &rope);
    m.def("quantize", &quantize);
    m.def("dequantize", &dequantize);
}

}  // namespace deepinfer::cpu
