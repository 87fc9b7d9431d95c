// Words of the language of Ascend C that a host compiler does not know: memory spaces, kinds of functions, pipes.
//
// A memory space is not part of a pointer's type here: a pointer into a local memory is either its offset, as the device
// has it, or, for the unified buffer, an address that asc_get_phy_buf_addr gave. The machine takes both.
#pragma once

#include <cstddef>
#include <cstdint>

#if !defined(TWIN_CHECKED)
#define TWIN_CHECKED 1
#endif

// Code of kernels is watched load by load, except where vector registers are handled; what the twin does itself is not.
// Watched functions are marked as hot: the linker then keeps them together, and watch.h knows them by their addresses.
#define TWIN_UNWATCHED __attribute__((no_sanitize("thread")))
#define TWIN_WATCHED __attribute__((hot))

#define __gm__
#define __ubuf__
#define __cbuf__
#define __ca__
#define __cb__
#define __cc__
#define __fbuf__
#define __biasbuf__
#define __ssbuf__
#define __global__ TWIN_WATCHED
#define __aicore__ TWIN_UNWATCHED
#define __vector__
#define __cube__
#define __mix__(cubes, vectors)
#define __simd_vf__ TWIN_UNWATCHED
#define __simd_callee__ TWIN_UNWATCHED
#define __simt_vf__ TWIN_WATCHED
#define __simt_callee__ TWIN_WATCHED
#define __launch_bounds__(threads)
#define __NPU_ARCH__ 3510

// asc-devkit, docs: sync; the numbers are those of the compiler's own enumeration.
enum pipe_t : uint8_t {
  PIPE_S = 0,
  PIPE_V = 1,
  PIPE_M = 2,
  PIPE_MTE1 = 3,
  PIPE_MTE2 = 4,
  PIPE_MTE3 = 5,
  PIPE_ALL = 6,
  PIPE_FIX = 10,
};

using event_t = int;
enum : int { EVENT_ID0, EVENT_ID1, EVENT_ID2, EVENT_ID3, EVENT_ID4, EVENT_ID5, EVENT_ID6, EVENT_ID7 };

enum class asc_load_l2_cache_mode : uint8_t {
  NORMAL_FIRST_VICTIM = 0,
  NORMAL_LAST_VICTIM = 1,
  NORMAL_PERSISTENT = 2,
  NOTALLOC_KEEP = 4,
  NOTALLOC_CLEAN = 5,
  NOTALLOC_DROP = 6,
};

enum class asc_store_l2_cache_mode : uint8_t {
  NORMAL_FIRST_VICTIM = 0,
  NORMAL_LAST_VICTIM = 1,
  NORMAL_PERSISTENT = 2,
  NOTALLOC_CLEAN = 4,
};
