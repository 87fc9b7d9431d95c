// Plain loads and stores of scalar and SIMT code: the compiler calls these hooks before each of them.
//
// Kernels are compiled with the instrumentation that thread sanitizers use, but no sanitizer is linked: the hooks are
// here. They listen to functions of kernels only (`sections.ld` puts those between two symbols), let stacks and the
// library's own data pass, and treat the rest as what the pipe that runs does.
#pragma once

#include "machine.h"
#include "scheduler.h"
#include "simt_state.h"

extern "C" {
extern char __ehdr_start[] __attribute__((visibility("hidden")));
extern char _end[] __attribute__((visibility("hidden")));
extern char twin_kernels_begin[] __attribute__((visibility("hidden")));
extern char twin_kernels_end[] __attribute__((visibility("hidden")));
}

namespace twin {

TWIN_UNWATCHED inline void watch(const void* caller, const void* address, size_t bytes, Access access) {
  if (caller < twin_kernels_begin || caller >= twin_kernels_end) return;
  const Fibre* fibre = Fibre::current();
  if (!fibre || fibre->holds(address)) return;
  if (scheduler().now->fibre.holds(address)) return;  // arguments of a SIMT function
  const auto* byte = static_cast<const char*>(address);
  if (byte >= __ehdr_start && byte < _end) return;
  Machine& m = machine();
  Thread* thread = simt().thread;
  const pipe_t pipe = thread ? PIPE_V : PIPE_S;
  const char* what = access == Access::read ? "load" : "store";
  if (!on_cube()) {
    Memory& memory = ub_of(m.core->index - 1);
    const size_t offset = memory.offset_of(address);
    if (offset < memory.bytes && byte == reinterpret_cast<const char*>(memory.at(offset))) {
      ub(address, bytes, pipe, access, what, bytes);
      if (access == Access::read) require_defined(memory, address, bytes, pipe, what);
      if (thread) between_threads(simt().ub_cells(m.core->index - 1) + offset, bytes, access, what, offset);
      return;
    }
  }
  if (reinterpret_cast<uintptr_t>(address) < (1 << 20)) {
    fault("bounds", what, pipe, reinterpret_cast<uintptr_t>(address),
          "dereferences %p: a place in UB comes from asc_get_phy_buf_addr, or as an argument of asc_vf_call", address);
  }
  gm(address, bytes, pipe, access, what);
  if (thread) between_threads_in_global(address, bytes, access, what);
}

}  // namespace twin

#if TWIN_CHECKED
#define TWIN_HOOK extern "C" __attribute__((visibility("hidden"), used)) TWIN_UNWATCHED inline
TWIN_HOOK void __tsan_init() {}
#define TWIN_HOOKS(size)                                                                                         \
  TWIN_HOOK void __tsan_read##size(void* at) { twin::watch(__builtin_return_address(0), at, size, twin::Access::read); }                      \
  TWIN_HOOK void __tsan_write##size(void* at) { twin::watch(__builtin_return_address(0), at, size, twin::Access::write); }
TWIN_HOOKS(1)
TWIN_HOOKS(2)
TWIN_HOOKS(4)
TWIN_HOOKS(8)
TWIN_HOOKS(16)
#undef TWIN_HOOKS
// A device has no unaligned scalar access: these calls are made for packed or cast types, and `ub` judges the address.
#define TWIN_HOOKS(size)                                                                                         \
  TWIN_HOOK void __tsan_unaligned_read##size(void* at) { twin::watch(__builtin_return_address(0), at, size, twin::Access::read); }            \
  TWIN_HOOK void __tsan_unaligned_write##size(void* at) { twin::watch(__builtin_return_address(0), at, size, twin::Access::write); }
TWIN_HOOKS(2)
TWIN_HOOKS(4)
TWIN_HOOKS(8)
TWIN_HOOKS(16)
#undef TWIN_HOOKS
TWIN_HOOK void __tsan_read_range(void* at, unsigned long size) { twin::watch(__builtin_return_address(0), at, size, twin::Access::read); }
TWIN_HOOK void __tsan_write_range(void* at, unsigned long size) { twin::watch(__builtin_return_address(0), at, size, twin::Access::write); }
TWIN_HOOK void __tsan_vptr_update(void*, void*) {}
#undef TWIN_HOOK
#endif
