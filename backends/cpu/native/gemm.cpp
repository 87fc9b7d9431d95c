#include "gemm.hpp"

#include <algorithm>

#include "bind.hpp"
#include "dot.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

void Operand::read(i64 row, i64 start, i64 n, float* out) const {
    const u8* codes = data + row * row_bytes + code_bytes(kind, start);
    if (kind < kMxfp8) {
        widen(codes, kind, n, out);
    } else {
        decode_row(codes, scales + row * scale_row_bytes + start / group_of(kind), kind, n, out);
    }
}

WideRows::WideRows(const Operand& x, i64 rows, i64 width, int num_threads)
    : copy_(x.kind == kF32 ? 0 : rows * width),
      values_(x.kind == kF32 ? reinterpret_cast<const float*>(x.data) : copy_.get()),
      stride_(x.kind == kF32 ? x.row_bytes / 4 : width) {
    if (x.kind == kF32) return;
    float* out = copy_.get();
    parallel_rows(rows, 16, threads_for(static_cast<double>(rows * width), num_threads), [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) x.read(row, 0, width, out + row * width);
    });
}

namespace {

constexpr i64 kRows = 128;          // rows of x that share one decoding of a weight tile
constexpr i64 kTileFloats = 16384;  // floats of a weight tile: half of a small second level cache

struct Tile {
    const Product* product;
    i64 row, rows, column, columns;
};

// One tile of the result. Weights are decoded chunk by chunk, then multiplied exactly as float32 weights would be.
void run_tile(const Tile& tile, const ProductShape& shape) {
    const Product& job = *tile.product;
    const bool plain = job.weight.kind == kF32;
    Buffer sums(tile.rows * tile.columns);
    Buffer decoded(plain ? 0 : tile.columns * kChunk);
    const float* x = job.x + tile.row * job.x_stride;
    i64 start = 0;
    do {
        const i64 width = std::min(kChunk, shape.k - start);
        const float* w = decoded.get();
        i64 ldw = kChunk;
        if (plain) {
            w = reinterpret_cast<const float*>(job.weight.data + tile.column * job.weight.row_bytes) + start;
            ldw = job.weight.row_bytes / 4;
        } else {
            for (i64 j = 0; j < tile.columns; ++j) {
                job.weight.read(tile.column + j, start, width, decoded.get() + j * kChunk);
            }
        }
        dot_chunk(x + start, job.x_stride, tile.rows, w, ldw, tile.columns, width, sums.get(), tile.columns, start > 0);
        start += width;
    } while (start < shape.k);
    Buffer added(job.acc && shape.acc_kind != kF32 ? tile.columns : 0);
    for (i64 i = 0; i < tile.rows; ++i) {
        float* sum = sums.get() + i * tile.columns;
        if (shape.scale != 1.0F) scale_row(sum, shape.scale, tile.columns);
        if (job.acc) {
            const u8* acc = job.acc + (tile.row + i) * job.acc_row_bytes + code_bytes(shape.acc_kind, tile.column);
            add_row(sum, as_f32(acc, shape.acc_kind, tile.columns, added.get()), tile.columns);
        }
        u8* out = job.out + (tile.row + i) * job.out_row_bytes + code_bytes(shape.out_kind, tile.column);
        narrow(sum, tile.columns, shape.out_kind, out);
    }
}

}  // namespace

void run_products(const std::vector<Product>& products, const ProductShape& shape, int num_threads) {
    i64 total_rows = 0;
    for (const Product& job : products) total_rows += job.rows;
    if (total_rows == 0 || shape.n == 0) return;
    const double operations = static_cast<double>(total_rows) * static_cast<double>(shape.n * shape.k);
    const int threads = threads_for(operations / 8, num_threads);
    i64 columns = kTileFloats / std::max<i64>(std::min(shape.k, kChunk), 1);
    columns = std::clamp<i64>(columns & ~i64{7}, 8, 128);
    std::vector<Tile> tiles;
    for (const Product& job : products) {
        for (i64 row = 0; row < job.rows; row += kRows) {
            for (i64 column = 0; column < shape.n; column += columns) {
                const i64 rows = std::min(kRows, job.rows - row);
                tiles.push_back({&job, row, rows, column, std::min(columns, shape.n - column)});
            }
        }
    }
    parallel_rows(static_cast<i64>(tiles.size()), 1, threads, [&](i64 begin, i64 end) {
        for (i64 t = begin; t < end; ++t) run_tile(tiles[static_cast<std::size_t>(t)], shape);
    });
}

namespace {

// out [T, N] = x [T, K] weight [N, K]^T
void linear(Address out, int out_kind, i64 rows, i64 n, i64 k, Address x, Address x_scales, int x_kind, Address w,
            Address w_scales, int w_kind, Address acc, int acc_kind, float scale, int num_threads) {
    const py::gil_scoped_release unlocked;
    const WideRows wide(Operand::dense(x, x_scales, x_kind, k), rows, k, num_threads);
    Product job{wide.get(),  wide.stride(),          rows, Operand::dense(w, w_scales, w_kind, k),
                at<u8>(out), code_bytes(out_kind, n)};
    if (acc) {
        job.acc = at<const u8>(acc);
        job.acc_row_bytes = code_bytes(acc_kind, n);
    }
    run_products({job}, {n, k, out_kind, acc_kind, scale}, num_threads);
}

// out [T, G, N], x [T, G, K], weight [G, N, K]
void linear_groups(Address out, int out_kind, i64 rows, i64 groups, i64 n, i64 k, Address x, int x_kind, Address w,
                   Address w_scales, int w_kind, int num_threads) {
    const py::gil_scoped_release unlocked;
    const WideRows wide(Operand::dense(x, 0, x_kind, k), rows * groups, k, num_threads);
    const Operand weight = Operand::dense(w, w_scales, w_kind, k);
    std::vector<Product> jobs;
    for (i64 g = 0; g < groups; ++g) {
        jobs.push_back({wide.get() + g * k, groups * k, rows, weight.from(g * n),
                        at<u8>(out) + code_bytes(out_kind, g * n), code_bytes(out_kind, groups * n)});
    }
    run_products(jobs, {n, k, out_kind}, num_threads);
}

// out [R, N]: rows [psum[e - 1], psum[e]) of x [R, K] by weight e of [E, N, K]; rows behind the last end become zero.
void linear_experts(Address out, int out_kind, i64 rows, i64 experts, i64 n, i64 k, Address x, Address x_scales,
                    int x_kind, Address w, Address w_scales, int w_kind, Address psum, int num_threads) {
    const py::gil_scoped_release unlocked;
    const std::int32_t* ends = at<const std::int32_t>(psum);
    const i64 row_bytes = code_bytes(out_kind, n);
    const i64 used = experts > 0 ? std::clamp<i64>(ends[experts - 1], 0, rows) : 0;
    const WideRows wide(Operand::dense(x, x_scales, x_kind, k), used, k, num_threads);
    const Operand weight = Operand::dense(w, w_scales, w_kind, k);
    std::vector<Product> jobs;
    i64 start = 0;
    for (i64 e = 0; e < experts; ++e) {
        const i64 end = std::clamp<i64>(ends[e], start, used);
        if (end > start) {
            jobs.push_back({wide.get() + start * wide.stride(), wide.stride(), end - start, weight.from(e * n),
                            at<u8>(out) + start * row_bytes, row_bytes});
        }
        start = end;
    }
    run_products(jobs, {n, k, out_kind}, num_threads);
    if (rows > used)
        std::memset(at<u8>(out) + used * row_bytes, 0, static_cast<std::size_t>((rows - used) * row_bytes));
}

}  // namespace

void bind_gemm(py::module_& m) {
    m.def("linear", &linear);
    m.def("linear_groups", &linear_groups);
    m.def("linear_experts", &linear_experts);
}

}  // namespace deepinfer::cpu
