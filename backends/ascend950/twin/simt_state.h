// Threads of a SIMT function: who runs, what each waits for, and which bytes two of them touch without a barrier.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "machine.h"

// asc-devkit, docs: SIMT-API, built-in data types
namespace cce {
struct dim3 {
  uint32_t x = 1, y = 1, z = 1;
  constexpr dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
};
}  // namespace cce
using cce::dim3;

namespace twin {

inline constexpr int kWarp = 32;
inline constexpr int kMaxThreads = 2048;
inline constexpr uint16_t kManyThreads = 0xFFFF;
inline constexpr uint16_t kAtomicThreads = 0xFFFE;
// asc-devkit, docs: SIMT-API, programming model: of the 248 KB a kernel may use, SIMT code leaves 32 KB to its cache.
inline constexpr size_t kUbBesideSimt = 216 << 10;

// One byte: the interval between two barriers in which it was last written and read, and by which thread.
struct ByteUse {
  uint32_t written = 0;
  uint32_t read = 0;
  uint16_t writer = 0;
  uint16_t reader = 0;
};

struct Thread {
  int number = 0;
  uint32_t interval = 0;
  bool done = false;
  const char* waits_in = nullptr;  // the intrinsic; null where the thread can run
  bool of_warp = false;            // it waits for its warp, not for all threads
  uint64_t value = 0;              // what it gives to the others of its warp
  Fibre* fibre = nullptr;
};

struct Warp {
  uint64_t values[kWarp] = {};
  uint32_t active = 0;  // lanes that took part in the operation that ended last
};

struct Simt {
  Thread* thread = nullptr;  // who runs; null outside of SIMT functions
  dim3 dims, index;
  uint32_t interval = 1;     // never reused, so that old uses of bytes do not count
  int count = 0;
  int next = 0;              // first thread that has not started
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  std::vector<std::unique_ptr<Fibre>> fibres;
  std::vector<Fibre*> idle;
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
  std::vector<ByteUse> ub_uses[2];
  std::unordered_map<uintptr_t, std::vector<ByteUse>> global_uses;

  TWIN_UNWATCHED ByteUse* ub_cells(int vector) {
    if (ub_uses[vector].empty()) ub_uses[vector].resize(space_bytes(Space::UB));
    return ub_uses[vector].data();
  }
};

TWIN_UNWATCHED inline Simt& simt() {
  static Simt one;
  return one;
}

TWIN_UNWATCHED inline void between_threads(ByteUse* uses, size_t bytes, Access access, const char* what,
                                           uint64_t address, bool atomic = false) {
  const Thread& me = *simt().thread;
  const auto self = static_cast<uint16_t>(atomic ? kAtomicThreads : me.number);
  for (size_t i = 0; i < bytes; ++i) {
    ByteUse& use = uses[i];
    if (use.written == me.interval && use.writer != self) {
      fault("threads", what, PIPE_V, address, "thread %d %s a byte that thread %d wrote, with no asc_syncthreads between",
            me.number, access == Access::read ? "reads" : "writes", use.writer);
    }
    if (access == Access::read) {
      use.reader = use.read == me.interval && use.reader != self ? kManyThreads : self;
      use.read = me.interval;
      continue;
    }
    if (use.read == me.interval && use.reader != self) {
      fault("threads", what, PIPE_V, address, "thread %d writes a byte that another read, with no asc_syncthreads between",
            me.number);
    }
    use.written = me.interval;
    use.writer = self;
  }
}

TWIN_UNWATCHED inline void between_threads_in_global(const void* address, size_t bytes, Access access, const char* what,
                                                     bool atomic = false) {
  constexpr size_t kPage = 4096;
  Simt& s = simt();
  auto at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = at + bytes;
  while (at < end) {
    const uintptr_t stop = std::min(end, (at / kPage + 1) * kPage);
    std::vector<ByteUse>& page = s.global_uses[at / kPage];
    if (page.empty()) page.resize(kPage);
    between_threads(page.data() + at % kPage, stop - at, access, what, at, atomic);
    at = stop;
  }
}

}  // namespace twin
