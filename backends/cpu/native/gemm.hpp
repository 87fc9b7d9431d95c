// Products with stored weights: one routine for dense, grouped and per-expert matrices, plain or quantised.
#pragma once

#include <vector>

#include "common.hpp"

namespace deepinfer::cpu {

// Rows of stored values. Strides are in bytes; `scales` is null for plain kinds.
struct Operand {
    const u8* data;
    const u8* scales;
    int kind;
    i64 row_bytes;
    i64 scale_row_bytes;

    // Contiguous rows of `width` values each.
    static Operand dense(Address data, Address scales, int kind, i64 width) {
        return {at<const u8>(data), at<const u8>(scales), kind, code_bytes(kind, width), scale_bytes(kind, width)};
    }

    // Elements [start, start + n) of one row in fp32; start is a multiple of the group.
    void read(i64 row, i64 start, i64 n, float* out) const;

    // The same operand from another row on.
    Operand from(i64 row) const {
        return {data + row * row_bytes, scales ? scales + row * scale_row_bytes : nullptr, kind, row_bytes,
                scale_row_bytes};
    }
};

// All rows in fp32. Points at the operand itself when it is float32, else at a copy that this object owns.
class WideRows {
public:
    WideRows(const Operand& x, i64 rows, i64 width, int num_threads);
    const float* get() const { return values_; }
    i64 stride() const { return stride_; }  // floats from row to row

private:
    Buffer copy_;
    const float* values_;
    i64 stride_;
};

// One product: out[i] = (x_i W^T) * scale + acc_i, rounded once.
struct Product {
    const float* x;
    i64 x_stride;  // floats
    i64 rows;
    Operand weight;
    u8* out;
    i64 out_row_bytes;
    const u8* acc = nullptr;  // added in fp32 before the rounding; same layout as out, its own kind
    i64 acc_row_bytes = 0;
};

struct ProductShape {
    i64 n;
    i64 k;
    int out_kind;
    int acc_kind = kF32;
    float scale = 1.0F;
};

// Run products of one shape, spread over threads by tiles of rows and columns.
void run_products(const std::vector<Product>& products, const ProductShape& shape, int num_threads);

}  // namespace deepinfer::cpu
