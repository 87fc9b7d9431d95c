// Engram: n-grams, their hashes, the rows they name, and the gate that adds them to the streams.
#include <algorithm>
#include <cmath>

#include "bind.hpp"
#include "gemm.hpp"
#include "rows.hpp"
#include "simd.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

void engram_ngrams(Address out, i64 rows, i64 depth, Address input_ids, Address row_to_seq, Address cu_seqlens,
                   i64 sequences, Address history, Address token_map, i64 vocabulary, i64 pad_token, Address blocked,
                   Address history_blocked) {
    const py::gil_scoped_release unlocked;
    check_index(pad_token, vocabulary, "pad token");
    const i32 pad = at<const i32>(token_map)[pad_token];
    for (i64 row = 0; row < rows; ++row) {
        const i64 seq = at<const i32>(row_to_seq)[row];
        check_index(seq, sequences, "sequence");
        const i64 inside = row - at<const i32>(cu_seqlens)[seq];
        bool open = true;
        for (i64 back = 0; back < depth; ++back) {
            const bool here = inside >= back || depth == 1;
            const i64 source = std::max<i64>(row - back, 0);
            const i64 older = seq * (depth - 1) + std::clamp<i64>(back - 1 - inside, 0, std::max<i64>(depth - 2, 0));
            const i64 token = here ? at<const i32>(input_ids)[source] : at<const i32>(history)[older];
            const Address flags = here ? blocked : history_blocked;
            const bool shut = flags && at<const bool>(flags)[here ? source : older];
            open = open && token >= 0 && !shut;
            i32 id = pad;
            if (open) {
                check_index(token, vocabulary, "token");
                id = at<const i32>(token_map)[token];
            }
            at<i32>(out)[row * depth + back] = id;
        }
    }
}

void engram_hash(Address out, i64 layers, i64 rows, i64 depth, i64 heads, Address ngrams, Address multipliers,
                 Address primes, Address offsets, int num_threads) {
    const py::gil_scoped_release unlocked;
    const i64 columns = (depth - 1) * heads;
    parallel_rows(layers * rows, 64, threads_for(static_cast<double>(layers * rows * columns) * 16, num_threads),
                  [&](i64 begin, i64 end) {
                      for (i64 item = begin; item < end; ++item) {
                          const i64 layer = item / rows;
                          const i32* ids = at<const i32>(ngrams) + item % rows * depth;
                          const std::int64_t* factors = at<const std::int64_t>(multipliers) + layer * depth;
                          // unsigned products wrap; the sum is read back as signed, as 64-bit tensors have it
                          std::uint64_t mixed = static_cast<std::uint64_t>(static_cast<i64>(ids[0])) *
                                                static_cast<std::uint64_t>(factors[0]);
                          for (i64 n = 1; n < depth; ++n) {
                              mixed ^= static_cast<std::uint64_t>(static_cast<i64>(ids[n])) *
                                       static_cast<std::uint64_t>(factors[n]);
                              for (i64 c = (n - 1) * heads; c < n * heads; ++c) {
                                  const i64 prime = at<const std::int64_t>(primes)[layer * columns + c];
                                  const i64 rest = static_cast<i64>(mixed) % prime;
                                  const i64 row = (rest < 0 ? rest + prime : rest) +
                                                  at<const std::int64_t>(offsets)[layer * columns + c];
                                  at<i32>(out)[item * columns + c] = static_cast<i32>(row);
                              }
                          }
                      }
                  });
}

// Rows of a stored table in any kind, as float32 or bfloat16.
void gather_table(Address out, int out_kind, Address data, Address scales, int kind, i64 table_rows, i64 width,
                  Address rows, i64 count, int num_threads) {
    const py::gil_scoped_release unlocked;
    const Operand table = Operand::dense(data, scales, kind, width);
    parallel_rows(count, 64, threads_for(static_cast<double>(count * width), num_threads), [&](i64 begin, i64 end) {
        Buffer wide(width);
        for (i64 i = begin; i < end; ++i) {
            const i64 row = at<const i32>(rows)[i];
            check_index(row, table_rows, "row");
            table.read(row, 0, width, wide.get());
            narrow(wide.get(), width, out_kind, at<u8>(out) + i * code_bytes(out_kind, width));
        }
    });
}

// sum of (a w) b
DEEPINFER_CLONES float dot_weighted(const float* a, const float* w, const float* b, i64 n) {
    return sum_lanes(
        n, [=](i64 i) { return load8(a + i) * load8(w + i) * load8(b + i); },
        [=](i64 i, i64 rest) { return load_tail(a + i, rest) * load_tail(w + i, rest) * load_tail(b + i, rest); });
}

void engram_gate(Address out, Address h, int kind, i64 rows, i64 streams, i64 hidden, Address kv, int kv_kind,
                 Address q_weight, int q_kind, Address k_weight, int k_kind, float eps, Address blocked,
                 int num_threads) {
    const py::gil_scoped_release unlocked;
    const i64 width = streams * hidden;
    Buffer weight(width), k_wide(width);
    widen(at<const void>(q_weight), q_kind, width, weight.get());
    widen(at<const void>(k_weight), k_kind, width, k_wide.get());
    for (i64 i = 0; i < width; ++i) weight.get()[i] *= k_wide.get()[i];
    const float root = static_cast<float>(std::sqrt(static_cast<double>(hidden)));
    const float count = static_cast<float>(hidden);
    parallel_rows(rows, 2, threads_for(static_cast<double>(rows * width) * 2, num_threads), [&](i64 begin, i64 end) {
        Buffer stream_copy(width), kv_copy(width + hidden);
        for (i64 row = begin; row < end; ++row) {
            float* x = stream_copy.get();
            widen(at<const u8>(h) + row * code_bytes(kind, width), kind, width, x);
            const float* keys = as_f32(at<const u8>(kv) + row * code_bytes(kv_kind, width + hidden), kv_kind,
                                       width + hidden, kv_copy.get());
            for (i64 m = 0; m < streams; ++m) {
                float* stream = x + m * hidden;
                const float* key = keys + m * hidden;
                float dot = dot_weighted(stream, weight.get() + m * hidden, key, hidden);
                dot *= 1.0F / std::sqrt(sum_of_squares(stream, hidden) / count + eps);
                dot *= 1.0F / std::sqrt(sum_of_squares(key, hidden) / count + eps);
                dot /= root;
                const float magnitude = std::fabs(dot);
                const float steep = std::sqrt(magnitude < 1e-6F ? 1e-6F : magnitude);
                float gate = sigmoid_f32(std::copysign(steep, dot));
                if (blocked && at<const bool>(blocked)[row]) gate = 0.0F;
                add_scaled(stream, gate, keys + width, hidden);
            }
            narrow(x, width, kind, at<u8>(out) + row * code_bytes(kind, width));
        }
    });
}

}  // namespace

void bind_engram(py::module_& m) {
    m.def("engram_ngrams", &engram_ngrams);
    m.def("engram_hash", &engram_hash);
    m.def("gather_table", &gather_table);
    m.def("engram_gate", &engram_gate);
}

}  // namespace deepinfer::cpu
