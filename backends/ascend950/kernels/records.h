// Cache records as threads read them: a value at a time, exactly.
#pragma once

#include "rows.h"
#include "simt_api/asc_bf16.h"
#include "simt_api/asc_simt.h"

enum RecordKind : int32_t { kPlainRecord = 0, kFp8Record = 1, kIndexRecord = 2, kFp4Record = 3 };

__simt_callee__ inline float widened(float x) { return x; }
__simt_callee__ inline float widened(bfloat16_t x) { return __bfloat162float(x); }
__simt_callee__ inline void narrow_to(__gm__ float& to, float x) { to = x; }
__simt_callee__ inline void narrow_to(__gm__ bfloat16_t& to, float x) { to = __float2bfloat16_rn(x); }

__simt_callee__ inline float e4m3_value(uint32_t code) {
  const uint32_t exponent = code >> 3 & 15, fraction = code & 7;
  float magnitude = __int_as_float((int32_t)((exponent + 120) << 23 | fraction << 20));
  if (exponent == 0) magnitude = (float)fraction * 0.001953125f;  // 2^-9
  if ((code & 127) == 127) magnitude = __int_as_float(0x7FC00000);
  return code & 128 ? -magnitude : magnitude;
}

__simt_callee__ inline float e2m1_value(uint32_t code) {
  const uint32_t exponent = code >> 1 & 3, fraction = code & 1;
  const float magnitude =
      exponent == 0 ? (float)fraction * 0.5f : __int_as_float((int32_t)((exponent + 126) << 23 | fraction << 22));
  return code & 8 ? -magnitude : magnitude;
}

// 2^(code - 127): 0 is subnormal, 255 is NaN.
__simt_callee__ inline float power_of_two(uint32_t code) {
  return __int_as_float((int32_t)(code == 0 ? 0x00400000u : code == 255 ? 0x7FC00000u : code << 23));
}

// Value `place` of the record in `slot` of a pool.
__simt_callee__ inline float record_value(__gm__ uint8_t* cache, int64_t page_bytes, int32_t records, int32_t kind,
                                          int32_t dim, int32_t slot, int32_t place) {
  const int32_t number = slot / records, offset = slot - number * records;
  __gm__ uint8_t* page = cache + number * page_bytes;
  if (kind == kPlainRecord) {
    __gm__ uint8_t* at = page + ((int64_t)offset * dim + place) * 4;  // a pool may start at any byte
    return __int_as_float((int32_t)(at[0] | at[1] << 8 | at[2] << 16 | (uint32_t)at[3] << 24));
  }
  if (kind == kFp8Record) {
    __gm__ uint8_t* record = page + (int64_t)offset * (dim + dim / 32);
    return e4m3_value(record[place]) * power_of_two(record[dim + place / 32]);
  }
  const int32_t codes = dim / 2, scales = kind == kFp4Record ? dim / 16 : dim / 32;
  if (kind == kIndexRecord) {  // codes of the whole page come first
    const uint32_t pair = page[(int64_t)offset * codes + place / 2];
    const uint32_t scale = page[(int64_t)records * codes + (int64_t)offset * scales + place / 32];
    return e2m1_value(place % 2 ? pair >> 4 : pair & 15) * power_of_two(scale);
  }
  __gm__ uint8_t* record = page + (int64_t)offset * (codes + scales);
  const uint32_t pair = record[place / 2];
  return e2m1_value(place % 2 ? pair >> 4 : pair & 15) * e4m3_value(record[codes + place / 16]);
}

constexpr int32_t kGatherThreads = 512;
constexpr int32_t kGatherRows = 16;  // records that a core takes at a time

template <class T>
__simt_vf__ __launch_bounds__(kGatherThreads) inline void gather_values(__gm__ T* out, __gm__ uint8_t* cache,
                                                                        __gm__ int32_t* slots, int64_t page_bytes,
                                                                        int32_t records, int32_t kind, int32_t rows,
                                                                        int32_t dim) {
  for (int32_t i = threadIdx.x; i < rows * dim; i += blockDim.x) {
    const int32_t slot = slots[i / dim];
    narrow_to(out[i], slot < 0 ? 0.0f : record_value(cache, page_bytes, records, kind, dim, slot, i % dim));
  }
}

template <class T>
__aicore__ inline void gather_rows(__gm__ T* out, __gm__ uint8_t* cache, __gm__ int32_t* slots, int64_t rows,
                                   int64_t page_bytes, int32_t records, int32_t kind, int32_t dim) {
  for (int64_t row = asc_get_block_idx() * kGatherRows; row < rows; row += asc_get_block_num() * kGatherRows) {
    const int32_t count = (int32_t)(rows - row < kGatherRows ? rows - row : kGatherRows);
    asc_vf_call<gather_values<T>>(dim3(kGatherThreads), out + row * dim, cache, slots + row, page_bytes, records, kind,
                                  count, dim);
  }
}
