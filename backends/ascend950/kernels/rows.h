// Rows between global memory and the unified buffer, and values of either type as float32 in registers.
#pragma once

#include "c_api/asc_simd.h"

constexpr uint32_t kLanes = 64;  // float32 values of a register
constexpr uint32_t kRegister = 256;

// A place in the unified buffer. Buffers start at multiples of 256 bytes: a load takes a whole register, and what it
// reads past a row must not be a buffer that a copy is filling.
template <class T>
__aicore__ inline __ubuf__ T* ub_at(uint32_t offset) {
  return (__ubuf__ T*)asc_get_phy_buf_addr(offset);
}

// One row of `count` elements in, on MTE2.
template <class T>
__aicore__ inline void load_row(__ubuf__ T* to, __gm__ T* from, uint32_t count) {
  asc_copy_gm2ub_align(to, from, 1, count * sizeof(T), 0, 0, false, asc_load_l2_cache_mode::NORMAL_FIRST_VICTIM, 0, 0);
}

// One row of `count` elements out, on MTE3.
template <class T>
__aicore__ inline void store_row(__gm__ T* to, __ubuf__ T* from, uint32_t count) {
  asc_copy_ub2gm_align(to, from, 1, count * sizeof(T), asc_store_l2_cache_mode::NORMAL_FIRST_VICTIM, 0, 0);
}

// Orders copies out behind what scalar code stored in the unified buffer.
__aicore__ inline void after_scalar_stores() {
  asc_sync_notify(PIPE_S, PIPE_MTE3, EVENT_ID0);
  asc_sync_wait(PIPE_S, PIPE_MTE3, EVENT_ID0);
}

// 64 elements from `from` as float32; those past the mask of a later operation may be anything.
__simd_callee__ inline void load_floats(vector_f32& to, __ubuf__ float* from) { asc_loadalign(to, from); }
__simd_callee__ inline void load_floats(vector_f32& to, __ubuf__ bfloat16_t* from) {
  vector_bf16 narrow;
  asc_loadalign_unpack(narrow, from);  // each value, then a zero
  asc_bfloat162float(to, narrow, asc_create_mask_b16(PAT_ALL));
}

// float32 rounded once to the element type, and back.
__simd_callee__ inline void round_to(vector_f32& x, __ubuf__ float*, vector_bool&) {}
__simd_callee__ inline void round_to(vector_f32& x, __ubuf__ bfloat16_t*, vector_bool& mask) {
  vector_bf16 narrow;
  asc_float2bfloat16_rn(narrow, x, mask);
  asc_bfloat162float(x, narrow, asc_create_mask_b16(PAT_ALL));
}

// 64 values that are exact in the element type, to `to`.
__simd_callee__ inline void store_floats(__ubuf__ float* to, vector_f32& x, vector_bool& mask) {
  asc_storealign(to, x, mask);
}
__simd_callee__ inline void store_floats(__ubuf__ bfloat16_t* to, vector_f32& x, vector_bool& mask) {
  vector_bf16 narrow;
  asc_float2bfloat16_rn(narrow, x, mask);
  asc_storealign_pack((__ubuf__ uint32_t*)to, (vector_u32&)narrow, mask);
}
