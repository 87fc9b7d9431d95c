// Where the angles of a position are.
#pragma once

#include "rows.hpp"

namespace deepinfer::cpu {

// [rows, width] float32: cosines of a position's pairs, then their sines.
struct RopeTable {
    const float* data;
    i64 rows;
    i64 width;

    // Rotate the last `width` of `dim` channels in place.
    void rotate(float* x, i64 dim, i64 position, bool conjugate) const {
        check_index(position, rows, "position");
        const float* row = data + position * width;
        rotate_pairs(x + dim - width, row, row + width / 2, width / 2, conjugate ? -1.0F : 1.0F);
    }
};

}  // namespace deepinfer::cpu
