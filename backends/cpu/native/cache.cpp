// Writing, reading and copying cache records.
#include <cstring>

#include "bind.hpp"
#include "cache.hpp"
#include "rope.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

// Norm, rotation, quantisation and store of one vector per row; `normed` (may be absent) gets the rows before rotation.
void store_rows(Address normed, Address x, int kind, i64 rows, i64 dim, Address weight, int weight_kind, float eps,
                Address positions, Address table, i64 table_rows, i64 table_width, const CacheArgs& cache_args,
                Address slots, i64 ratio, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Cache cache(cache_args);
    const RopeTable turn{at<const float>(table), table_rows, table_width};
    Buffer copied(dim);
    const float* w = as_f32(at<const void>(weight), weight_kind, dim, copied.get());
    const i64 row_bytes = code_bytes(kind, dim);
    const int threads = threads_for(static_cast<double>(rows * dim), num_threads);
    parallel_rows(rows, 8, threads, [&](i64 begin, i64 end) {
        Buffer y(dim);
        for (i64 row = begin; row < end; ++row) {
            const i64 slot = at<const i32>(slots)[row];
            if (slot < 0 && !normed) continue;
            widen(at<const u8>(x) + row * row_bytes, kind, dim, y.get());
            norm_row(y.get(), w, dim, eps, y.get());
            if (kind == kBF16) round_row(y.get(), dim);
            if (normed) narrow(y.get(), dim, kind, at<u8>(normed) + row * row_bytes);
            if (slot < 0) continue;
            turn.rotate(y.get(), dim, at<const i32>(positions)[row] / ratio * ratio, false);
            if (kind == kBF16) round_row(y.get(), dim);
            cache.write(slot, y.get());
        }
    });
}

// Dense rows of records; a slot of -1 gives zeros.
void gather(Address out, int kind, const CacheArgs& cache_args, Address slots, i64 count, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Cache cache(cache_args);
    const i64 row_bytes = code_bytes(kind, cache.dim);
    parallel_rows(count, 64, threads_for(static_cast<double>(count * cache.dim), num_threads), [&](i64 begin, i64 end) {
        Buffer wide(cache.dim);
        for (i64 row = begin; row < end; ++row) {
            const i64 slot = at<const i32>(slots)[row];
            u8* target = at<u8>(out) + row * row_bytes;
            if (slot < 0) {
                std::memset(target, 0, static_cast<std::size_t>(row_bytes));
            } else {
                cache.read(slot, wide.get());
                narrow(wide.get(), cache.dim, kind, target);
            }
        }
    });
}

// Copy rows of `row_bytes` inside a pool; no destination is a source.
void copy_rows(Address pool, i64 num_rows, i64 stride_bytes, i64 row_bytes, Address sources, Address destinations,
               i64 count) {
    const py::gil_scoped_release unlocked;
    for (i64 i = 0; i < count; ++i) {
        const i64 from = at<const i32>(sources)[i], to = at<const i32>(destinations)[i];
        check_index(from, num_rows, "source");
        check_index(to, num_rows, "destination");
        u8* base = at<u8>(pool);
        if (from != to)
            std::memcpy(base + to * stride_bytes, base + from * stride_bytes, static_cast<std::size_t>(row_bytes));
    }
}

}  // namespace

void bind_cache(py::module_& m) {
    m.def("store_rows", &store_rows);
    m.def("gather", &gather);
    m.def("copy_rows", &copy_rows);
}

}  // namespace deepinfer::cpu
