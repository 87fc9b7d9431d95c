// Mixture of experts around its products: router, dispatch, activation, combine.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bind.hpp"
#include "codes.hpp"
#include "rows.hpp"

namespace deepinfer::cpu {

namespace {

using i32 = std::int32_t;

// Affinity sqrt(softplus(logit)) and an unsigned key in the order of affinity + bias, NaN highest, zeros equal.
DEEPINFER_CLONES void affinities(const float* logits, const float* bias, i64 n, float* affinity, u32* __restrict keys) {
    for (i64 e = 0; e < n; ++e) affinity[e] = __builtin_sqrtf(softplus_f32(logits[e]));
    for (i64 e = 0; e < n; ++e) {
        const float biased = affinity[e] + bias[e] + 0.0F;
        const u32 bits = bits_of(biased);
        const u32 key = bits & 0x80000000U ? ~bits : bits | 0x80000000U;
        keys[e] = biased == biased ? key : 0xFFFFFFFFU;
    }
}

void moe_gate(Address expert_ids, Address weights, Address logits, i64 rows, i64 experts, Address bias,
              Address image_bias, Address image_mask, i64 k, float scale, int num_threads) {
    const py::gil_scoped_release unlocked;
    parallel_rows(rows, 8, threads_for(static_cast<double>(rows * experts) * 8, num_threads), [&](i64 begin, i64 end) {
        Buffer affinity(experts);
        std::vector<u32> keys(static_cast<std::size_t>(experts));
        for (i64 row = begin; row < end; ++row) {
            const bool image = image_bias && image_mask && at<const bool>(image_mask)[row];
            affinities(at<const float>(logits) + row * experts, at<const float>(image ? image_bias : bias), experts,
                       affinity.get(), keys.data());
            std::int64_t* ids = at<std::int64_t>(expert_ids) + row * k;
            float* weight = at<float>(weights) + row * k;
            float sum = 0.0F;
            for (i64 c = 0; c < k; ++c) {
                // the first of the largest: ties go to the smaller id. A taken expert's key is 0, which no float has
                const i64 best = std::max_element(keys.begin(), keys.end()) - keys.begin();
                keys[static_cast<std::size_t>(best)] = 0;
                ids[c] = best;
                weight[c] = affinity.get()[best];
                sum += weight[c];
            }
            for (i64 c = 0; c < k; ++c) weight[c] = weight[c] / (sum + 1e-20F) * scale;
        }
    });
}

// A counting sort by expert; rows that go nowhere stand last. Copies codes and scales of the rows with them.
void dispatch(Address expert_ids, Address weights, i64 tokens, i64 k, i64 experts, Address row_weights, Address psum,
              Address slot_to_row, Address x, i64 row_bytes, Address rows, Address scales, i64 scale_row_bytes,
              Address row_scales) {
    const py::gil_scoped_release unlocked;
    const std::int64_t* ids = at<const std::int64_t>(expert_ids);
    std::vector<i64> next(static_cast<std::size_t>(experts) + 1, 0);
    for (i64 i = 0; i < tokens * k; ++i) {
        if (ids[i] >= 0) check_index(ids[i], experts, "expert");
        ++next[static_cast<std::size_t>(ids[i] < 0 ? experts : ids[i])];
    }
    i64 start = 0;
    for (i64 e = 0; e <= experts; ++e) {
        const i64 count = next[static_cast<std::size_t>(e)];
        next[static_cast<std::size_t>(e)] = start;
        start += count;
        if (e < experts) at<i32>(psum)[e] = static_cast<i32>(start);
    }
    for (i64 i = 0; i < tokens * k; ++i) {
        const i64 row = next[static_cast<std::size_t>(ids[i] < 0 ? experts : ids[i])]++;
        at<i32>(slot_to_row)[i] = ids[i] < 0 ? -1 : static_cast<i32>(row);
        at<float>(row_weights)[row] = at<const float>(weights)[i];
        std::memcpy(at<u8>(rows) + row * row_bytes, at<const u8>(x) + i / k * row_bytes,
                    static_cast<std::size_t>(row_bytes));
        if (scales) {
            std::memcpy(at<u8>(row_scales) + row * scale_row_bytes, at<const u8>(scales) + i / k * scale_row_bytes,
                        static_cast<std::size_t>(scale_row_bytes));
        }
    }
}

DEEPINFER_CLONES void swiglu_row(const float* gate, const float* up, float limit, float weight, i64 n,
                                 float* __restrict y) {
    for (i64 i = 0; i < n; ++i) {
        const float g = gate[i] > limit ? limit : gate[i];
        float u = up[i] > limit ? limit : up[i];
        u = u < -limit ? -limit : u;
        y[i] = g * sigmoid_f32(g) * u * weight;
    }
}

void swiglu(Address out, Address codes, Address scales, int fmt, Address gate, i64 gate_stride, Address up,
            i64 up_stride, int kind, i64 rows, i64 n, float limit, Address row_weight, int num_threads) {
    const py::gil_scoped_release unlocked;
    parallel_rows(rows, 8, threads_for(static_cast<double>(rows * n) * 4, num_threads), [&](i64 begin, i64 end) {
        Buffer g_copy(n), u_copy(n), y(n);
        for (i64 row = begin; row < end; ++row) {
            const float* g = as_f32(at<const u8>(gate) + row * gate_stride, kind, n, g_copy.get());
            const float* u = as_f32(at<const u8>(up) + row * up_stride, kind, n, u_copy.get());
            swiglu_row(g, u, limit, row_weight ? at<const float>(row_weight)[row] : 1.0F, n, y.get());
            if (codes) {
                encode_row(y.get(), n, fmt, at<u8>(codes) + row * code_bytes(fmt, n),
                           at<u8>(scales) + row * scale_bytes(fmt, n));
            } else {
                narrow(y.get(), n, kind, at<u8>(out) + row * code_bytes(kind, n));
            }
        }
    });
}

void combine(Address out, int out_kind, Address y, int kind, i64 num_rows, Address slot_to_row, i64 tokens, i64 k,
             i64 n, Address bias, int bias_kind, int num_threads) {
    const py::gil_scoped_release unlocked;
    parallel_rows(tokens, 4, threads_for(static_cast<double>(tokens * k * n), num_threads), [&](i64 begin, i64 end) {
        Buffer sum(n), copied(n);
        for (i64 token = begin; token < end; ++token) {
            std::fill_n(sum.get(), n, 0.0F);
            for (i64 c = 0; c < k; ++c) {
                const i64 row = at<const i32>(slot_to_row)[token * k + c];
                if (row < 0) continue;
                check_index(row, num_rows, "row");
                add_row(sum.get(), as_f32(at<const u8>(y) + row * code_bytes(kind, n), kind, n, copied.get()), n);
            }
            if (bias) {
                add_row(sum.get(),
                        as_f32(at<const u8>(bias) + token * code_bytes(bias_kind, n), bias_kind, n, copied.get()), n);
            }
            narrow(sum.get(), n, out_kind, at<u8>(out) + token * code_bytes(out_kind, n));
        }
    });
}

}  // namespace

void bind_moe(py::module_& m) {
    m.def("moe_gate", &moe_gate);
    m.def("dispatch", &dispatch);
    m.def("swiglu", &swiglu);
    m.def("combine", &combine);
}

}  // namespace deepinfer::cpu
