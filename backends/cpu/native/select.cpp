// Integer work of the indexer: window slots, positions to slots, block maxima and exact top-k by selection.
#include <algorithm>
#include <functional>

#include "bind.hpp"
#include "codes.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

i64 floor_div(i64 a, i64 b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// Unsigned keys in the order of the floats; NaN and -inf are 0, and the zeros are equal.
DEEPINFER_CLONES void sort_keys(const float* x, i64 n, u32* __restrict keys) {
    for (i64 i = 0; i < n; ++i) {
        const u32 bits = bits_of(x[i] + 0.0F);
        const u32 key = bits & 0x80000000U ? ~bits : bits | 0x80000000U;
        const bool reachable = x[i] > -kInf;  // false for NaN
        keys[i] = reachable ? key : 0U;
    }
}

void topk(Address out, i64 k, Address x, int kind, i64 rows, i64 columns, Address lens, int num_threads) {
    const py::gil_scoped_release unlocked;
    const int threads = threads_for(static_cast<double>(rows * columns) * 4, num_threads);
    parallel_rows(rows, 1, threads, [&](i64 begin, i64 end) {
        Buffer wide(kind == kF32 ? 0 : columns);
        std::vector<u32> keys, order;
        for (i64 row = begin; row < end; ++row) {
            const i64 n = std::clamp<i64>(at<const i32>(lens)[row], 0, columns);
            const u8* source = at<const u8>(x) + row * code_bytes(kind, columns);
            keys.resize(static_cast<std::size_t>(n));
            sort_keys(as_f32(source, kind, n, wide.get()), n, keys.data());
            u32 threshold = 1;  // the smallest key that is selected; ties at it go to the smaller columns
            i64 ties = k;
            if (k > 0 && k < n) {
                order = keys;
                std::nth_element(order.begin(), order.begin() + (k - 1), order.end(), std::greater<>());
                if (order[static_cast<std::size_t>(k - 1)] > 0) {
                    threshold = order[static_cast<std::size_t>(k - 1)];
                    ties =
                        k - std::count_if(order.begin(), order.begin() + (k - 1), [=](u32 v) { return v > threshold; });
                }
            }
            i32* target = at<i32>(out) + row * k;
            i64 taken = 0;
            for (i64 c = 0; c < n && taken < k; ++c) {
                const u32 key = keys[static_cast<std::size_t>(c)];
                if (key > threshold || (key == threshold && ties-- > 0)) target[taken++] = static_cast<i32>(c);
            }
            std::fill(target + taken, target + k, -1);
        }
    });
}

void block_max(Address scores, Address counts, Address logits, i64 rows, i64 columns, Address lens, i64 block,
               int num_threads) {
    const py::gil_scoped_release unlocked;
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    const i64 num_blocks = (columns + block - 1) / block;
    const int threads = threads_for(static_cast<double>(rows * columns), num_threads);
    parallel_rows(rows, 4, threads, [&](i64 begin, i64 end) {
        for (i64 row = begin; row < end; ++row) {
            const i64 len = at<const i32>(lens)[row];
            const i64 valid = -floor_div(-len, block);
            const float* x = at<const float>(logits) + row * columns;
            float* target = at<float>(scores) + row * num_blocks;
            at<i32>(counts)[row] = static_cast<i32>(valid);
            for (i64 b = 0; b < num_blocks; ++b) {
                float best = kLowest;
                const i64 last = std::min({columns, (b + 1) * block, len});
                for (i64 c = b * block; c < last; ++c) best = x[c] > best ? x[c] : best;
                target[b] = b >= valid ? -kInf : b == valid - 1 ? kInf : best;
            }
        }
    });
}

void window_slots(Address out, Address positions, Address row_to_seq, i64 rows, Address tables, i64 sequences,
                  i64 pages, Address first_page, i64 window_page, i64 window) {
    const py::gil_scoped_release unlocked;
    for (i64 row = 0; row < rows; ++row) {
        const i64 seq = at<const i32>(row_to_seq)[row];
        check_index(seq, sequences, "sequence");
        const i64 first = at<const i32>(first_page)[seq];
        for (i64 c = 0; c < window; ++c) {
            const i64 position = at<const i32>(positions)[row] - (window - 1) + c;
            const i64 column = position < 0 ? -1 : position / window_page - first;
            const bool held = position >= 0 && column >= 0 && column < pages;
            const i64 page = held ? at<const i32>(tables)[seq * pages + column] : 0;
            at<i32>(out)[row * window + c] =
                page > 0 ? static_cast<i32>(page * window_page + position % window_page) : -1;
        }
    }
}

void positions_to_slots(Address indices, i64 rows, i64 width, i64 block_size, Address table, i64 sequences, i64 columns,
                        Address row_to_seq) {
    const py::gil_scoped_release unlocked;
    for (i64 row = 0; row < rows; ++row) {
        const i64 seq = at<const i32>(row_to_seq)[row];
        check_index(seq, sequences, "sequence");
        i32* index = at<i32>(indices) + row * width;
        for (i64 c = 0; c < width; ++c) {
            if (index[c] < 0) {
                index[c] = -1;
                continue;
            }
            const i64 column = std::min<i64>(index[c] / block_size, columns - 1);
            const i64 block = at<const i32>(table)[seq * columns + column];
            index[c] = static_cast<i32>(block * block_size + index[c] % block_size);
        }
    }
}

void blocks_to_positions(Address out, Address indices, i64 rows, i64 width, Address blocks, i64 num_blocks, i64 block) {
    const py::gil_scoped_release unlocked;
    for (i64 row = 0; row < rows; ++row) {
        for (i64 c = 0; c < width; ++c) {
            const i64 column = at<const i32>(indices)[row * width + c];
            i64 position = -1;
            if (column >= 0) {
                check_index(column / block, num_blocks, "candidate block");
                position = at<const i32>(blocks)[row * num_blocks + column / block] * block + column % block;
            }
            at<i32>(out)[row * width + c] = static_cast<i32>(position);
        }
    }
}

void dense_index(Address out, Address visible, i64 rows, i64 columns) {
    const py::gil_scoped_release unlocked;
    for (i64 row = 0; row < rows; ++row) {
        const i64 count = at<const i32>(visible)[row];
        i32* target = at<i32>(out) + row * columns;
        for (i64 c = 0; c < columns; ++c) target[c] = static_cast<i32>(c < count ? c : -1);
    }
}

void visible_lens(Address out, Address positions, i64 rows, i64 ratio) {
    for (i64 row = 0; row < rows; ++row) {
        at<i32>(out)[row] = static_cast<i32>(floor_div(static_cast<i64>(at<const i32>(positions)[row]) + 1, ratio));
    }
}

}  // namespace

void bind_select(py::module_& m) {
    m.def("topk", &topk);
    m.def("block_max", &block_max);
    m.def("window_slots", &window_slots);
    m.def("positions_to_slots", &positions_to_slots);
    m.def("blocks_to_positions", &blocks_to_positions);
    m.def("dense_index", &dense_index);
    m.def("visible_lens", &visible_lens);
}

}  // namespace deepinfer::cpu
