// SIMT functions: their threads as fibres, barriers, warps, atomics.
//
// Threads run one after another on one stack until one waits; then it keeps that stack and the rest go on with another.
// So a function without barriers costs a loop, and one with barriers a switch per thread and barrier.
#pragma once

#include <cmath>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#include "machine.h"
#include "simt_state.h"
#include "watch.h"

// asc-devkit, docs: SIMT-API, built-in variables
#define threadIdx (twin::simt().index)
#define blockDim (twin::simt().dims)
#define blockIdx (twin::block_place())
#define gridDim (twin::grid())
inline constexpr int32_t warpSize = twin::kWarp;

namespace twin {

TWIN_UNWATCHED inline dim3 block_place() { return dim3(static_cast<uint32_t>(machine().block->index), 0, 0); }
TWIN_UNWATCHED inline dim3 grid() { return dim3(static_cast<uint32_t>(machine().num_blocks)); }

TWIN_UNWATCHED inline void enter_thread(Thread& thread) {
  Simt& s = simt();
  const auto number = static_cast<uint32_t>(thread.number);
  s.thread = &thread;
  s.index = dim3(number % s.dims.x, number / s.dims.x % s.dims.y, number / s.dims.x / s.dims.y);
}

TWIN_UNWATCHED inline void run_threads(void* fibre) {
  Simt& s = simt();
  for (;;) {
    while (s.next < s.count) {
      Thread& thread = s.threads[s.next++];
      thread.fibre = static_cast<Fibre*>(fibre);
      enter_thread(thread);
      s.body(s.argument);
      thread.done = true;
    }
    s.idle.push_back(static_cast<Fibre*>(fibre));
    static_cast<Fibre*>(fibre)->leave();
  }
}

// The thread that runs waits; it goes on when `release` finds that the others are there.
TWIN_UNWATCHED inline void wait_for_threads(const char* what, bool of_warp) {
  Thread& me = *simt().thread;
  me.waits_in = what;
  me.of_warp = of_warp;
  me.fibre->leave();
}

// Runs a fibre until its thread waits or all threads have started; a fault inside ends the core's own fibre too.
TWIN_UNWATCHED inline void run_fibre(Fibre* fibre) {
  fibre->resume();
  simt().thread = nullptr;
  if (machine().report->raised) {
    for (;;) Fibre::current()->leave();
  }
}

TWIN_UNWATCHED inline Fibre* idle_fibre() {
  Simt& s = simt();
  if (s.idle.empty()) {
    s.fibres.push_back(std::make_unique<Fibre>(128 << 10));
    s.fibres.back()->prepare(run_threads, s.fibres.back().get());
    s.idle.push_back(s.fibres.back().get());
  }
  Fibre* fibre = s.idle.back();
  s.idle.pop_back();
  return fibre;
}

// Threads of one warp that wait in the same operation exchange values, once no lane of the warp can run.
TWIN_UNWATCHED inline bool release_warp(int warp) {
  Simt& s = simt();
  const int first = warp * kWarp, end = std::min(first + kWarp, s.count);
  const char* operation = nullptr;
  for (int i = first; i < end; ++i) {
    const Thread& thread = s.threads[i];
    if (!thread.done && thread.of_warp && !operation) operation = thread.waits_in;
  }
  if (!operation) return false;
  Warp& state = s.warps[warp];
  state.active = 0;
  for (int i = first; i < end; ++i) {
    Thread& thread = s.threads[i];
    if (thread.done || thread.waits_in != operation) continue;
    state.active |= 1u << (i - first);
    state.values[i - first] = thread.value;
  }
  for (int i = first; i < end; ++i) {
    Thread& thread = s.threads[i];
    if (!(state.active >> (i - first) & 1)) continue;
    thread.waits_in = nullptr;
    thread.of_warp = false;
    enter_thread(thread);
    run_fibre(thread.fibre);
  }
  return true;
}

TWIN_UNWATCHED inline bool release_barrier() {
  Simt& s = simt();
  int waiting = 0;
  for (const Thread& thread : s.threads) waiting += !thread.done;
  if (!waiting) return false;
  if (waiting != s.count) {
    fault("threads", "asc_syncthreads", PIPE_V, 0, "%d of %d threads wait in asc_syncthreads and the others have ended",
          waiting, s.count);
  }
  for (Thread& thread : s.threads) {
    thread.waits_in = nullptr;
    ++thread.interval;
  }
  s.interval = s.threads[0].interval;
  for (Thread& thread : s.threads) {
    enter_thread(thread);
    run_fibre(thread.fibre);
  }
  return true;
}

TWIN_UNWATCHED inline void run_simt(dim3 dims, void (*body)(void*), void* argument) {
  Simt& s = simt();
  const uint64_t count = uint64_t{dims.x} * dims.y * dims.z;
  if (on_cube()) fault("core", "asc_vf_call", PIPE_V, 0, "a cube core has no vector unit");
  if (!count || count > kMaxThreads) {
    fault("argument", "asc_vf_call", PIPE_V, count, "%llu threads: 1 to 2048", static_cast<unsigned long long>(count));
  }
  const size_t used = ub_of(machine().core->index - 1).highest;
  if (used > kUbBesideSimt) {
    fault("bounds", "asc_vf_call", PIPE_V, used, "%zu bytes of UB in use: SIMT functions leave %zu", used, kUbBesideSimt);
  }
  issue(PIPE_V);
  s.dims = dims;
  s.count = static_cast<int>(count);
  s.next = 0;
  s.body = body;
  s.argument = argument;
  ++s.interval;
  s.threads.assign(count, Thread{});
  s.warps.assign((count + kWarp - 1) / kWarp, Warp{});
  if (s.global_uses.size() > 1024) s.global_uses.clear();
  for (int i = 0; i < s.count; ++i) {
    s.threads[i].number = i;
    s.threads[i].interval = s.interval;
  }
  while (s.next < s.count) run_fibre(idle_fibre());
  for (bool moved = true; moved;) {
    moved = false;
    for (size_t warp = 0; warp < s.warps.size(); ++warp) moved = release_warp(static_cast<int>(warp)) || moved;
    if (!moved) moved = release_barrier();
  }
  s.thread = nullptr;
}

// A pointer into UB may come as an offset, from text that computes addresses itself.
template <class T>
TWIN_UNWATCHED T simt_argument(T value) {
  if constexpr (std::is_pointer_v<T>) {
    const auto offset = reinterpret_cast<uintptr_t>(value);
    if (offset < space_bytes(Space::UB) && (offset || machine().zero_is_ub)) {
      return reinterpret_cast<T>(ub_of(machine().core->index - 1).at(offset));
    }
  }
  return value;
}

// One thread's run of a SIMT function. Watched like the function itself, which may be inlined into it.
template <auto function, class... A>
struct VectorCall {
  std::tuple<A...> arguments;

  template <size_t... I>
  __attribute__((always_inline)) TWIN_WATCHED void apply(std::index_sequence<I...>) {
    function(std::get<I>(arguments)...);
  }
  TWIN_WATCHED static void body(void* self) {
    static_cast<VectorCall*>(self)->apply(std::index_sequence_for<A...>{});
  }
};

}  // namespace twin

// asc-devkit, docs: SIMT-API, kernel configuration. A SIMT function with its threads; SIMD functions: vector_call.h.
template <auto function, class... A>
TWIN_UNWATCHED void asc_vf_call(cce::dim3 threads, A... arguments) {
  twin::VectorCall<function, A...> call{{twin::simt_argument(arguments)...}};
  twin::run_simt(threads, &twin::VectorCall<function, A...>::body, &call);
}

// asc-devkit, docs: SIMT-API, synchronisation. Memory is at once visible to everybody here.
TWIN_UNWATCHED inline void asc_syncthreads() { twin::wait_for_threads("asc_syncthreads", false); }
TWIN_UNWATCHED inline void asc_threadfence() {}
TWIN_UNWATCHED inline void asc_threadfence_block() {}
