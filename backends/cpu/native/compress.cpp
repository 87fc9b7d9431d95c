// The compressor: a softmax over the tokens of a group, channel by channel, and the state of the open group.
#include <algorithm>
#include <cstring>

#include "bind.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

struct Member {
    const float* gate;
    const float* value;
};

// weights has room for count * n floats.
DEEPINFER_CLONES void pool(const Member* members, i64 count, i64 n, float* weights, float* __restrict out) {
    float* __restrict top = out;
    for (i64 c = 0; c < n; ++c) top[c] = members[0].gate[c];
    for (i64 m = 1; m < count; ++m) {
        const float* gate = members[m].gate;
        for (i64 c = 0; c < n; ++c) top[c] = gate[c] > top[c] ? gate[c] : top[c];
    }
    float* __restrict total = weights + count * n;
    for (i64 c = 0; c < n; ++c) total[c] = 0.0F;
    for (i64 m = 0; m < count; ++m) {
        const float* gate = members[m].gate;
        float* weight = weights + m * n;
        for (i64 c = 0; c < n; ++c) {
            weight[c] = exp_f32(gate[c] - top[c]);
            total[c] += weight[c];
        }
    }
    for (i64 c = 0; c < n; ++c) out[c] = 0.0F;
    for (i64 m = 0; m < count; ++m) {
        const float* value = members[m].value;
        const float* weight = weights + m * n;
        for (i64 c = 0; c < n; ++c) out[c] += weight[c] / total[c] * value[c];
    }
}

// state [num_slots, ring, 2, n] with slots `slot_stride` floats apart.
void kv_compress(Address out, int kind, Address gate, Address value, i64 rows, i64 n, Address state, i64 num_slots,
                 i64 slot_stride, i64 ring, Address state_slots, Address positions, Address row_to_seq,
                 Address cu_seqlens, i64 sequences, i64 ratio, int num_threads) {
    const py::gil_scoped_release unlocked;
    const i32* bounds = at<const i32>(cu_seqlens);
    const float* gates = at<const float>(gate);
    const float* values = at<const float>(value);
    const auto stored = [&](i64 row, i64 position) {
        const i64 slot = at<const i32>(state_slots)[at<const i32>(row_to_seq)[row]];
        return at<float>(state) + slot * slot_stride + position % ring * 2 * n;
    };
    for (i64 row = 0; row < rows; ++row) {
        const i64 seq = at<const i32>(row_to_seq)[row];
        check_index(seq, sequences, "sequence");
        check_index(at<const i32>(state_slots)[seq], num_slots, "state slot");
        check_index(at<const i32>(positions)[row], std::int64_t{1} << 31, "position");
    }
    const int threads = threads_for(static_cast<double>(rows * n) * 4, num_threads);
    parallel_rows(rows, 8, threads, [&](i64 begin, i64 end) {
        Buffer weights((ratio + 1) * n), pooled(n);
        Small<Member, 16> members(ratio);
        for (i64 row = begin; row < end; ++row) {
            const i64 position = at<const i32>(positions)[row];
            u8* target = at<u8>(out) + row * code_bytes(kind, n);
            if ((position + 1) % ratio != 0) {
                std::memset(target, 0, static_cast<std::size_t>(code_bytes(kind, n)));
                continue;
            }
            const i64 first = bounds[at<const i32>(row_to_seq)[row]];
            for (i64 back = ratio - 1; back >= 0; --back) {
                Member& member = members.get()[ratio - 1 - back];
                if (row - back >= first && row >= back) {
                    member = {gates + (row - back) * n, values + (row - back) * n};
                } else {
                    const float* old = stored(row, std::max<i64>(position - back, 0));
                    member = {old, old + n};
                }
            }
            pool(members.get(), ratio, n, weights.get(), pooled.get());
            narrow(pooled.get(), n, kind, target);
        }
    });
    // written only when every row has been read: a new token may take the place of one that a group still needed
    for (i64 row = 0; row < rows; ++row) {
        const i64 last = bounds[at<const i32>(row_to_seq)[row] + 1];
        if (row < last - ring || row >= last) continue;
        float* target = stored(row, at<const i32>(positions)[row]);
        std::memcpy(target, gates + row * n, static_cast<std::size_t>(n) * sizeof(float));
        std::memcpy(target + n, values + row * n, static_cast<std::size_t>(n) * sizeof(float));
    }
}

}  // namespace

void bind_compress(py::module_& m) { m.def("kv_compress", &kv_compress); }

}  // namespace deepinfer::cpu
