// Sparse attention by threads, for what the Cube does not take: float32 queries, float32 records, any width of head.
//
// A unit is a row and up to eight of its heads. Keys are decoded into UB, 32 at a time, in the order of their columns;
// softmax is online, in float32. Every sum runs in the order of its keys or channels.
#pragma once

#include "attention.h"

constexpr int32_t kThreads = 512;
constexpr int32_t kFewHeads = 8;
constexpr int32_t kFewKeys = 32;
constexpr int32_t kWidest = 1024;

// UB; the odd distance between keys keeps threads of neighbouring keys in different banks.
constexpr uint32_t kQueryUb = 0;
constexpr uint32_t kOutputUb = kQueryUb + kFewHeads * kWidest * 4;
constexpr uint32_t kWeightUb = kOutputUb + kFewHeads * kWidest * 4;
constexpr uint32_t kStateUb = kWeightUb + kFewHeads * kFewKeys * 4;
constexpr uint32_t kKeyUb = kStateUb + 1024;
static_assert(kKeyUb + kFewKeys * (kWidest + 1) * 4 <= 216 * 1024);

// Of each head: what is subtracted from scores, the sum of probabilities, the factor of the last tile, the maximum.
enum State : int32_t { kBase = 0, kSumOf = kFewHeads, kFactor = 2 * kFewHeads, kMost = 3 * kFewHeads };

__simt_callee__ inline float minus_infinity() { return -__int_as_float(0x7F800000); }

template <class T>
__simt_vf__ __launch_bounds__(kThreads) inline void open_heads(__ubuf__ float* queries, __ubuf__ float* output,
                                                               __ubuf__ float* state, __gm__ T* q, int64_t q_head,
                                                               int32_t heads, int32_t dim) {
  for (int32_t i = threadIdx.x; i < heads * dim; i += blockDim.x) {
    queries[i] = widened(q[i / dim * q_head + i % dim]);
    output[i] = 0.0f;
  }
  for (int32_t h = threadIdx.x; h < heads; h += blockDim.x) {
    state[kBase + h] = state[kSumOf + h] = 0.0f;
    state[kMost + h] = minus_infinity();
  }
}

__simt_vf__ __launch_bounds__(kThreads) inline void decode_keys(__ubuf__ float* keys, __gm__ uint8_t* cache,
                                                                __gm__ int32_t* slots, int64_t page_bytes,
                                                                int32_t records, int32_t kind, int32_t count,
                                                                int32_t dim) {
  for (int32_t i = threadIdx.x; i < count * dim; i += blockDim.x) {
    const int32_t key = i / dim, channel = i % dim, slot = slots[key];
    float value = 0.0f;
    if (slot >= 0) value = record_value(cache, page_bytes, records, kind, dim, slot, channel);
    keys[key * (dim + 1) + channel] = value;
  }
}

__simt_vf__ __launch_bounds__(kThreads) inline void score_keys(__ubuf__ float* weights, __ubuf__ float* queries,
                                                               __ubuf__ float* keys, __gm__ int32_t* slots,
                                                               int32_t heads, int32_t count, int32_t dim,
                                                               float scale) {
  for (int32_t i = threadIdx.x; i < heads * kFewKeys; i += blockDim.x) {
    const int32_t head = i / kFewKeys, key = i % kFewKeys;
    float score = 0.0f;
    if (key < count && slots[key] >= 0) {
      for (int32_t c = 0; c < dim; ++c) score = fmaf(queries[head * dim + c], keys[key * (dim + 1) + c], score);
      score *= scale;
    } else {
      score = minus_infinity();
    }
    weights[i] = score;
  }
}

// A head per thread; NaN is above every maximum.
__simt_vf__ __launch_bounds__(kThreads) inline void weigh_keys(__ubuf__ float* weights, __ubuf__ float* state,
                                                               int32_t heads, int32_t count, int32_t rounded) {
  for (int32_t h = threadIdx.x; h < heads; h += blockDim.x) {
    const float before = state[kMost + h];
    float most = before;
    for (int32_t k = 0; k < count; ++k) {
      const float score = weights[h * kFewKeys + k];
      if (score > most || score != score) most = score;
    }
    const float base = most == minus_infinity() ? 0.0f : most;
    const float factor = expf(before - base);
    float total = state[kSumOf + h] * factor;
    for (int32_t k = 0; k < count; ++k) {
      const float weight = expf(weights[h * kFewKeys + k] - base);
      total += weight;
      weights[h * kFewKeys + k] = rounded ? __bfloat162float(__float2bfloat16_rn(weight)) : weight;
    }
    state[kMost + h] = most;
    state[kBase + h] = base;
    state[kSumOf + h] = total;
    state[kFactor + h] = factor;
  }
}

__simt_vf__ __launch_bounds__(kThreads) inline void add_values(__ubuf__ float* output, __ubuf__ float* weights,
                                                               __ubuf__ float* keys, __ubuf__ float* state,
                                                               int32_t heads, int32_t count, int32_t dim) {
  for (int32_t i = threadIdx.x; i < heads * dim; i += blockDim.x) {
    const int32_t head = i / dim, channel = i % dim;
    float sum = output[i] * state[kFactor + head];
    for (int32_t k = 0; k < count; ++k) sum = fmaf(weights[head * kFewKeys + k], keys[k * (dim + 1) + channel], sum);
    output[i] = sum;
  }
}

template <class T>
__simt_vf__ __launch_bounds__(kThreads) inline void close_heads(__gm__ T* out, __gm__ float* lse,
                                                                __ubuf__ float* output, __ubuf__ float* state,
                                                                __gm__ float* sink, int32_t heads, int32_t dim) {
  for (int32_t i = threadIdx.x; i < heads * dim; i += blockDim.x) {
    const int32_t head = i / dim;
    const float total = state[kSumOf + head], below = total + expf(sink[head] - state[kBase + head]);
    narrow_to(out[i], total == 0.0f ? 0.0f : output[i] / below);
  }
  for (int32_t h = threadIdx.x; h < heads; h += blockDim.x) lse[h] = logf(state[kSumOf + h]) + state[kBase + h];
}

__aicore__ inline void walk_list(const List& list, const Attention& a, int64_t row, int32_t heads, int32_t rounded) {
  __ubuf__ float *keys = ub_at<float>(kKeyUb), *weights = ub_at<float>(kWeightUb), *state = ub_at<float>(kStateUb);
  for (int32_t first = 0; first < list.columns; first += kFewKeys) {
    const int32_t count = least(kFewKeys, list.columns - first);
    __gm__ int32_t* slots = list.slots + row * list.pitch + first;
    asc_vf_call<decode_keys>(dim3(kThreads), keys, list.cache, slots, list.page_bytes, list.records, list.kind, count,
                             a.dim);
    asc_vf_call<score_keys>(dim3(kFewHeads * kFewKeys), weights, ub_at<float>(kQueryUb), keys, slots, heads, count,
                            a.dim, a.scale);
    asc_vf_call<weigh_keys>(dim3(kFewHeads), weights, state, heads, count, rounded);
    asc_vf_call<add_values>(dim3(kThreads), ub_at<float>(kOutputUb), weights, keys, state, heads, count, a.dim);
  }
}

template <class T>
__aicore__ inline void attend_by_threads(const Attention& a) {
  const int32_t parts = (a.heads + kFewHeads - 1) / kFewHeads;
  for (int64_t unit = asc_get_block_idx(); unit < a.rows * parts; unit += asc_get_block_num()) {
    const int64_t row = unit / parts;
    const int32_t head = (int32_t)(unit % parts) * kFewHeads, heads = least(kFewHeads, a.heads - head);
    __ubuf__ float *output = ub_at<float>(kOutputUb), *state = ub_at<float>(kStateUb);
    const int64_t place = row * a.heads + head;
    asc_vf_call<open_heads<T>>(dim3(kThreads), ub_at<float>(kQueryUb), output, state,
                               (__gm__ T*)a.q + row * a.q_row + head * a.q_head, a.q_head, heads, a.dim);
    walk_list(a.window, a, row, heads, (int32_t)(sizeof(T) == 2));
    walk_list(a.compressed, a, row, heads, (int32_t)(sizeof(T) == 2));
    asc_vf_call<close_heads<T>>(dim3(kThreads), (__gm__ T*)a.out + place * a.dim, a.lse + place, output, state,
                                a.sink + head, heads, a.dim);
  }
}
