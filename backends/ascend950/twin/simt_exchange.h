// What threads tell one another: shuffles, votes and sums of a warp, atomics; and loads that name their cache.
#pragma once

#include "simt_threads.h"

namespace twin {

// What each lane gave in the operation that just ended, as the lane that runs sees it.
template <class T>
TWIN_UNWATCHED Warp& exchange(T value, const char* what) {
  Thread& me = *simt().thread;
  me.value = 0;
  std::memcpy(&me.value, &value, sizeof value);
  wait_for_threads(what, true);
  return simt().warps[simt().thread->number / kWarp];
}

template <class T>
TWIN_UNWATCHED T lane_value(const Warp& warp, int lane) {
  T value;
  std::memcpy(&value, &warp.values[lane], sizeof value);
  return value;
}

TWIN_UNWATCHED inline int lane_now() { return simt().thread->number % kWarp; }

// The value of another lane of a segment of `width` lanes; one's own where that lane is outside or does not take part.
template <class T>
TWIN_UNWATCHED T shuffle(T value, int lane, bool inside, const char* what) {
  const Warp& warp = exchange(value, what);
  if (!inside || !(warp.active >> lane & 1)) return value;
  return lane_value<T>(warp, lane);
}

template <class T, class F>
TWIN_UNWATCHED T reduce(T value, F f, const char* what) {
  const Warp& warp = exchange(value, what);
  bool first = true;
  T sum{};
  for (int lane = 0; lane < kWarp; ++lane) {
    if (!(warp.active >> lane & 1)) continue;
    sum = first ? lane_value<T>(warp, lane) : f(sum, lane_value<T>(warp, lane));
    first = false;
  }
  return sum;
}

// A read and a write that no other thread, block or core comes between.
template <class T, class F>
TWIN_UNWATCHED T atomically(T* address, F f, const char* what) {
  Machine& m = machine();
  Memory* memory = on_cube() ? nullptr : &ub_of(m.core->index - 1);
  const bool in_ub = memory && reinterpret_cast<uint8_t*>(address) >= memory->at(0) &&
                     reinterpret_cast<uint8_t*>(address) < memory->at(0) + memory->bytes;
  const pipe_t pipe = simt().thread ? PIPE_V : PIPE_S;
#if TWIN_CHECKED
  if (in_ub) {
    require_defined(*memory, address, sizeof(T), pipe, what);
    ub(address, sizeof(T), pipe, Access::write, what, sizeof(T));
    if (simt().thread) {
      const size_t offset = memory->offset_of(address);
      between_threads(simt().ub_cells(m.core->index - 1) + offset, sizeof(T), Access::write, what, offset, true);
    }
  } else {
    require_region(address, sizeof(T), true, what, pipe);
    if (simt().thread) between_threads_in_global(address, sizeof(T), Access::write, what, true);
  }
#else
  (void)in_ub, (void)pipe, (void)what;
#endif
  const T old = *address;
  *address = f(old);
  return old;
}

}  // namespace twin

// asc-devkit, docs: SIMT-API, warp functions: shuffles, votes, reductions, lane numbers
TWIN_UNWATCHED inline int32_t laneid() { return twin::lane_now(); }
template <class T>
TWIN_UNWATCHED T asc_shfl(T var, int32_t src_lane, int32_t width = warpSize) {
  const int lane = twin::lane_now();
  return twin::shuffle(var, lane / width * width + src_lane % width, true, "asc_shfl");
}
template <class T>
TWIN_UNWATCHED T asc_shfl_up(T var, uint32_t delta, int32_t width = warpSize) {
  const int lane = twin::lane_now(), from = lane - static_cast<int>(delta);
  return twin::shuffle(var, std::max(from, 0), from >= lane / width * width, "asc_shfl_up");
}
template <class T>
TWIN_UNWATCHED T asc_shfl_down(T var, uint32_t delta, int32_t width = warpSize) {
  const int lane = twin::lane_now(), from = lane + static_cast<int>(delta);
  return twin::shuffle(var, std::min(from, twin::kWarp - 1), from < (lane / width + 1) * width, "asc_shfl_down");
}
template <class T>
TWIN_UNWATCHED T asc_shfl_xor(T var, int32_t lane_mask, int32_t width = warpSize) {
  const int lane = twin::lane_now(), from = lane ^ lane_mask;
  return twin::shuffle(var, from % twin::kWarp, from < (lane / width + 1) * width, "asc_shfl_xor");
}
TWIN_UNWATCHED inline uint32_t asc_ballot(int32_t predicate) {
  const twin::Warp& warp = twin::exchange(predicate, "asc_ballot");
  uint32_t bits = 0;
  for (int lane = 0; lane < twin::kWarp; ++lane) {
    if ((warp.active >> lane & 1) && twin::lane_value<int32_t>(warp, lane)) bits |= 1u << lane;
  }
  return bits;
}
TWIN_UNWATCHED inline uint32_t asc_activemask() { return twin::exchange(0, "asc_activemask").active; }
TWIN_UNWATCHED inline int32_t asc_any(int32_t predicate) {
  return twin::reduce<int32_t>(predicate != 0, [](int32_t a, int32_t b) { return a | b; }, "asc_any");
}
TWIN_UNWATCHED inline int32_t asc_all(int32_t predicate) {
  return twin::reduce<int32_t>(predicate != 0, [](int32_t a, int32_t b) { return a & b; }, "asc_all");
}
template <class T>
TWIN_UNWATCHED T asc_reduce_add(T value) {
  return twin::reduce(value, [](T a, T b) { return a + b; }, "asc_reduce_add");
}
template <class T>
  requires std::is_arithmetic_v<T>
TWIN_UNWATCHED T asc_reduce_max(T value) {
  return twin::reduce(value, [](T a, T b) { return a > b ? a : b; }, "asc_reduce_max");
}
template <class T>
  requires std::is_arithmetic_v<T>
TWIN_UNWATCHED T asc_reduce_min(T value) {
  return twin::reduce(value, [](T a, T b) { return a < b ? a : b; }, "asc_reduce_min");
}

// asc-devkit, include/simt_api/device_functions.h: loads and stores that keep to the second cache, or use the first
#define TWIN_LOAD(name)                                                              \
  template <class T>                                                                 \
  TWIN_UNWATCHED T name(__gm__ T* address) {                                         \
    twin::watch(twin_kernels_begin, address, sizeof(T), twin::Access::read);         \
    return *address;                                                                 \
  }
#define TWIN_STORE(name)                                                             \
  template <class T>                                                                 \
  TWIN_UNWATCHED void name(__gm__ T* address, std::type_identity_t<T> value) {       \
    twin::watch(twin_kernels_begin, address, sizeof(T), twin::Access::write);        \
    *address = value;                                                                \
  }
TWIN_LOAD(asc_ldcg)
TWIN_LOAD(asc_ldca)
TWIN_STORE(asc_stcg)
TWIN_STORE(asc_stwt)
#undef TWIN_LOAD
#undef TWIN_STORE

// asc-devkit, docs: SIMT-API and scalar_compute, asc_atomic_*.md: each gives the value that was there before
#define TWIN_ATOMIC(name, expression)                                                                \
  template <class T>                                                                                 \
  TWIN_UNWATCHED T name(T* address, std::type_identity_t<T> val) {                                   \
    return twin::atomically(address, [val](T old) { return static_cast<T>(expression); }, #name);    \
  }
TWIN_ATOMIC(asc_atomic_add, old + val)
TWIN_ATOMIC(asc_atomic_sub, old - val)
TWIN_ATOMIC(asc_atomic_exch, val)
TWIN_ATOMIC(asc_atomic_max, old > val ? old : val)
TWIN_ATOMIC(asc_atomic_min, old < val ? old : val)
TWIN_ATOMIC(asc_atomic_and, old & val)
TWIN_ATOMIC(asc_atomic_or, old | val)
TWIN_ATOMIC(asc_atomic_xor, old ^ val)
TWIN_ATOMIC(asc_atomic_inc, old >= val ? 0 : old + 1)
TWIN_ATOMIC(asc_atomic_dec, old == 0 || old > val ? val : old - 1)
#undef TWIN_ATOMIC
template <class T>
TWIN_UNWATCHED T asc_atomic_cas(T* address, std::type_identity_t<T> compare, std::type_identity_t<T> val) {
  return twin::atomically(address, [=](T old) { return old == compare ? val : old; }, "asc_atomic_cas");
}
