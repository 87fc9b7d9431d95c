// The scalar unit: who am I, where are the local memories, bits, words of global memory past the cache, atomics.
#pragma once

#include <bit>
#include <cmath>

#include "machine.h"
#include "scheduler.h"

// asc-devkit, docs: language extension, built-in macros. Both kinds of core run one text here.
#define ASC_IS_AIC (twin::on_cube())
#define ASC_IS_AIV (!twin::on_cube())

// asc-devkit, docs: sys_var/*.md
__aicore__ inline int64_t asc_get_block_idx() { return twin::machine().block->index; }
__aicore__ inline int64_t asc_get_block_num() { return twin::machine().num_blocks; }
__aicore__ inline int64_t asc_get_sub_block_id() { return twin::on_cube() ? 0 : twin::machine().core->index - 1; }
__aicore__ inline int64_t asc_get_sub_block_num() { return twin::on_cube() ? 1 : twin::machine().vectors_per_block; }
__aicore__ inline int64_t asc_get_core_id() { return asc_get_block_idx(); }
__aicore__ inline constexpr int64_t asc_get_vf_len() { return 256; }
__aicore__ inline int64_t asc_get_system_cycle() { return twin::machine().instruction; }
__aicore__ inline int64_t get_block_idx() { return asc_get_block_idx(); }
__aicore__ inline int64_t get_block_num() { return asc_get_block_num(); }
__aicore__ inline int64_t get_subblockid() { return asc_get_sub_block_id(); }

// A word of the compiler, not a macro: generated text also names parameters so.
inline constexpr struct BlockIndex {
  TWIN_UNWATCHED operator int64_t() const { return twin::machine().block->index; }
} block_idx;

// Built into the device's compiler for numbers.
template <class T>
__aicore__ constexpr T max(T a, T b) {
  return a < b ? b : a;
}
template <class T>
__aicore__ constexpr T min(T a, T b) {
  return b < a ? b : a;
}

// asc-devkit, docs: misc/asc_init.md. The state of a core is fresh here anyway.
__aicore__ inline void asc_init() {}

// asc-devkit, docs: sys_var/asc_get_phy_buf_addr.md. On a vector core: the unified buffer, as an address that scalar
// and SIMT code may dereference. The cube core's memories are reached through intrinsics only: the offset itself.
__aicore__ inline uint64_t asc_get_phy_buf_addr(uint64_t offset) {
  if (twin::on_cube()) return offset;
  twin::Memory& memory = twin::ub_of(twin::machine().core->index - 1);
  if (offset >= memory.bytes) {
    twin::fault("bounds", "asc_get_phy_buf_addr", PIPE_S, offset, "offset %llu of a unified buffer of %zu bytes",
                static_cast<unsigned long long>(offset), memory.bytes);
  }
  return reinterpret_cast<uint64_t>(memory.at(offset));
}

// asc-devkit, docs: scalar_compute/*.md
__aicore__ inline int64_t asc_popc(uint64_t value) { return std::popcount(value); }
__aicore__ inline int64_t asc_clz(uint64_t value) { return std::countl_zero(value); }
__aicore__ inline int64_t asc_ffs(uint64_t value) { return value ? std::countr_zero(value) : -1; }
__aicore__ inline int64_t asc_ffz(uint64_t value) { return ~value ? std::countr_one(value) : -1; }
__aicore__ inline int64_t asc_zero_bits_cnt(uint64_t value) { return 64 - std::popcount(value); }
__aicore__ inline uint64_t asc_set_nthbit(uint64_t bits, int64_t index) { return bits | uint64_t{1} << index; }
__aicore__ inline uint64_t asc_clear_nthbit(uint64_t bits, int64_t index) { return bits & ~(uint64_t{1} << index); }
__aicore__ inline int32_t asc_float2int32_rd(float value) { return static_cast<int32_t>(std::floor(value)); }
__aicore__ inline int32_t asc_float2int32_ru(float value) { return static_cast<int32_t>(std::ceil(value)); }
__aicore__ inline int32_t asc_float2int32_rn(float value) { return static_cast<int32_t>(std::nearbyint(value)); }
__aicore__ inline int32_t asc_float2int32_rna(float value) { return static_cast<int32_t>(std::round(value)); }

// asc-devkit, docs: scalar_compute/asc_store_dev.md; asc_load_dev is its counterpart. These pass the cache, so blocks
// may talk through them: no order is asked of them, and whoever polls lets the others run.
template <class T>
__aicore__ inline void asc_store_dev(__gm__ T* address, T value) {
  twin::require_region(address, sizeof(T), true, "asc_store_dev");
  *address = value;
  twin::went_on();
}
template <class T>
__aicore__ inline T asc_load_dev(__gm__ T* address) {
  twin::require_region(address, sizeof(T), false, "asc_load_dev");
  const T value = *address;
  const twin::Machine& m = twin::machine();
  if (m.together || m.vectors_per_block > 1) twin::wait_here("asc_load_dev", 0, true);
  return value;
}

// asc-devkit, docs: cache_ctrl/*.md. There is no cache between a core and global memory here.
__aicore__ inline void asc_dcci_single(__gm__ void*) {}
__aicore__ inline void asc_dcci_entire_out() {}
__aicore__ inline void asc_dcci_entire_ub() {}
__aicore__ inline void asc_dcci_entire_all() {}
__aicore__ inline void asc_dci() {}
__aicore__ inline void asc_icache_preload(const void*, int64_t) {}
__aicore__ inline void asc_datacache_preload(__gm__ uint64_t*, int64_t) {}
