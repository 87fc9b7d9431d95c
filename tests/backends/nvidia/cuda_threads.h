// CUDA threads on the CPU: each is a coroutine, and a barrier or a warp's exchange lets the others run until all are there.
// Blocks of a cluster run together, clusters one after another. What barriers say of order is noted (`cuda_order.h`).

#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "cuda_order.h"

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

using std::max;
using std::min;
using u8 = unsigned char;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;
struct uint4 {
  u32 x, y, z, w;
};
struct uint2 {
  u32 x, y;
};
struct float4 {
  float x, y, z, w;
};
struct Place3 {
  u32 x, y, z;
};

namespace simt {

constexpr std::size_t kStackBytes = 64 << 10;

struct Thread {
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on
  bool begun;
  std::unique_ptr<char[]> stack;
  Place3 thread, block;
  bool done;
  u64 given;         // to the exchange of its warp
  u64 cluster_turn;  // that it came to last
};
struct Barrier {
  int here = 0;
  u64 turn = 0;
  order::Point known[2];  // what those who came say, of even and of odd turns
};
// A barrier in shared memory, with what its arrivals say: so far, and when a phase ended.
struct Arrivals {
  order::Point so_far, ended[2];
};

inline std::vector<Thread> threads;
inline std::vector<Barrier> warps, exchanges, products, blocks;
inline std::vector<Barrier> named;  // sixteen of each block
inline Barrier all;  // blocks of a cluster
inline std::vector<u8> shared;  // of all blocks
inline std::size_t shared_pitch;
inline std::unordered_map<const void*, Arrivals> arrivals;
inline ucontext_t scheduler;
inline jmp_buf scheduler_place;
inline int current, per_block;
inline int left;    // threads that have not ended
inline u64 events;  // that somebody may have waited for
inline std::function<void()> kernel;

// `swapcontext` would ask the system about signals each time, which takes longer than the rest.
UNSEEN __attribute__((noinline)) inline void let_others_run() {
  if (_setjmp(threads[current].place) == 0) _longjmp(scheduler_place, 1);
}
UNSEEN __attribute__((noinline)) inline void go_on(Thread& t) {
  if (_setjmp(scheduler_place) != 0) return;
  if (t.begun) _longjmp(t.place, 1);
  t.begun = true;
  events++;
  setcontext(&t.context);
}

UNSEEN inline void end_turn(Barrier& barrier) {
  barrier.here = 0;
  events++;
  order::settle(barrier.known[barrier.turn & 1]);
  barrier.turn++;
  order::forget(barrier.known[barrier.turn & 1]);
}
// A thread comes and goes on; it gets the turn to wait for.
UNSEEN inline u64 come(Barrier& barrier, int count, bool relaxed = false) {
  const u64 turn = barrier.turn;
  if (relaxed) order::give_passed(barrier.known[turn & 1]);
  else order::give(barrier.known[turn & 1]);
  if (++barrier.here == count) end_turn(barrier);
  return turn;
}
UNSEEN inline void wait_for(Barrier& barrier, u64 turn) {
  while (barrier.turn == turn) let_others_run();
  order::take(barrier.known[turn & 1]);
}
UNSEEN inline void wait(Barrier& barrier, int count) {
  const u64 turn = come(barrier, count);
  while (barrier.turn == turn) let_others_run();
  order::take_all(barrier.known[turn & 1]);
}
// As `wait`, of what gives no order to memory.
UNSEEN inline void meet(Barrier& barrier, int count) {
  const u64 turn = barrier.turn;
  if (++barrier.here == count) {
    barrier.here = 0;
    barrier.turn++;
    events++;
    return;
  }
  while (barrier.turn == turn) let_others_run();
}
inline int rank() { return current / per_block; }
inline u8* memory(int block) { return reinterpret_cast<u8*>((reinterpret_cast<std::uintptr_t>(shared.data()) + 1023) & ~std::uintptr_t{1023}) + block * shared_pitch; }
inline u8* memory() { return memory(rank()); }
// Addresses in other blocks have the block's number plus one above these bits.
constexpr u32 kBlockBit = 20;
inline u8* far(u32 at) { return (at >> kBlockBit ? memory(static_cast<int>(at >> kBlockBit) - 1) : memory()) + (at & ((1u << kBlockBit) - 1)); }

// Shared memory as wrappers reach it, which the compiler does not see.
UNSEEN inline void raw_copy(void* to, const void* from, std::size_t bytes) { std::memcpy(to, from, bytes); }
template <typename T>
inline void put(u32 at, const T& value) {
  order::write(far(at), sizeof value);
  raw_copy(far(at), &value, sizeof value);
}
template <typename T>
inline T get(u32 at) {
  T value;
  order::read(far(at), sizeof value);
  raw_copy(&value, far(at), sizeof value);
  return value;
}

inline void body() {
  kernel();
  order::leave();
  threads[current].done = true;
  events++;
  // a cluster's blocks wait for nobody who has ended
  all.here -= threads[current].cluster_turn == all.turn;
  if (--left > 0 && all.here == left) end_turn(all);
  let_others_run();
}

// Runs `cluster` blocks of `count` threads to their end, or until all wait for what nobody can do any more; shared memory starts
// with bytes that are no useful number.
inline void run(int cluster, int count, std::size_t shared_bytes, Place3 first, std::function<void()> f) {
  per_block = count;
  kernel = std::move(f);
  threads.resize(cluster * count);
  warps.assign(cluster * count / 32, {});
  exchanges.assign(cluster * count / 32, {});
  products.assign(cluster * count / 32, {});
  blocks.assign(cluster, {});
  named.assign(cluster * 16, {});
  all = {};
  arrivals.clear();
  shared_pitch = (shared_bytes + 1023) / 1024 * 1024;
  shared.assign(cluster * shared_pitch + 1024, 0xFF);
  order::begin(cluster, count, memory(0), shared_pitch, &current);
  for (int i = 0; i < cluster * count; i++) {
    Thread& t = threads[i];
    t.done = t.begun = false;
    t.cluster_turn = ~u64{0};
    t.thread = {static_cast<u32>(i % count), 0, 0};
    t.block = {first.x + static_cast<u32>(i / count), first.y, first.z};
    getcontext(&t.context);
    t.stack.reset(new char[kStackBytes]);
    t.context.uc_stack.ss_sp = t.stack.get();
    t.context.uc_stack.ss_size = kStackBytes;
    t.context.uc_link = &scheduler;
    makecontext(&t.context, body, 0);
  }
  left = cluster * count;
  for (u64 before = ~events; left > 0 && before != events;) {
    before = events;
    for (current = 0; current < cluster * count; current++) {
      if (!threads[current].done) go_on(threads[current]);
    }
  }
  if (left > 0) order::stuck(left);
  // memory of many programs is more than a verifier in the same process allows itself
  order::end();
  order::release(threads);
  order::release(shared);
  order::release(arrivals);
}

template <typename To, typename From>
To cast(From from) {
  To to{};
  std::memcpy(&to, &from, min(sizeof to, sizeof from));
  return to;
}
// What `read` makes of what the lanes gave; it is called with the first lane's number.
template <typename T, typename F>
auto exchange(T value, F read) {
  threads[current].given = cast<u64>(value);
  meet(exchanges[current / 32], 32);
  const auto result = read(current / 32 * 32);
  meet(exchanges[current / 32], 32);
  return result;
}
template <typename T, typename F>
T combine(T value, F f) {
  return exchange(value, [&](int first) {
    T result = cast<T>(threads[first].given);
    for (int i = 1; i < 32; i++) result = f(result, cast<T>(threads[first + i].given));
    return result;
  });
}
template <typename T>
T lane(T value, int number) {
  return exchange(value, [&](int first) { return cast<T>(threads[first + number].given); });
}

}  // namespace simt
