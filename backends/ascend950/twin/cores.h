// What a core and a block hold: clocks, flags, memories; and what a launch reports: counters and a fault.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "clocks.h"
#include "cube_state.h"
#include "memory.h"

namespace twin {

struct Counters {  // read by twin_call.py: keep in step with its Structure
  uint64_t bytes[kPipes] = {};         // moved by each pipe
  uint64_t instructions[kPipes] = {};  // issued to each pipe
  uint64_t cube_cycles = 0;            // of mmad, on paper
  uint64_t highest[9] = {};            // bytes touched of each space, in the order of Space
};

struct Flag {
  int count = 0;
  Clock clock;
};

enum class StoreMode : uint8_t { replace, add_f32, add_s32, add_s16, add_s8, max_f32, max_s32, min_f32, min_s32 };

struct CopyLoops {  // strides in bytes
  uint64_t size1 = 1, size2 = 1;
  uint64_t source1 = 0, target1 = 0, source2 = 0, target2 = 0;
};

struct Lock {  // of a buffer (locks.h)
  int8_t holder = -1;  // slot of the pipe whose turn it is
  int8_t last = -1;    // slot of the pipe that released it last
  Clock released;      // what all who released it knew
  Clock before;        // the same without the last pipe's turns
};

struct Core {
  int index = 0;    // 0 AIC, 1 AIV0, 2 AIV1
  int pending = 0;  // flags and signals that are set and not yet taken
  Clock clock[kPipes];
  uint32_t known[kPipes] = {};        // of each pipe's own clock: how far its work is known to be complete
  uint32_t scalar_seen[kPipes] = {};  // version of the scalar's knowledge that each pipe has joined
  uint32_t scalar_version = 1;
  uint64_t ctrl = 0;                  // control register (control.h)
  Flag flags[kPipes][kPipes][8];
  Lock locks[32];
  uint32_t locks_used = 0;          // which of them were taken in this block
  std::vector<Clock> intra[32];     // signals between the cores of a block, by id
  std::vector<Clock> collective[3][16];  // signals of a group, by Group and id (sync.h)
  uint32_t phase = 0;                   // barriers of all blocks that this core has passed

  int64_t squeezed_bytes = 0;   // AR: bytes that asc_squeeze_with_status kept since asc_clear_ar_spr
  int64_t squeezed_last = 0;    // and those of its last call, which an unaligned store moves
  uint64_t mask[2] = {0, 0};    // MASK0 and MASK1, which asc_get_mask_spr reads

  StoreMode store = StoreMode::replace;  // how copies to global memory combine with what is there
  CopyLoops to_ub, to_gm;                // outer loops of the next copies
  uint32_t pad_bits = 0;                 // what copies put beside short rows

  // A new block starts on this core. Flags and signals are empty already, unless a fault has left some.
  TWIN_UNWATCHED void begin(int number) {
    if (pending) *this = Core{};
    index = number;
    scalar_version = 1;
    phase = 0;
    store = StoreMode::replace;
    to_ub = to_gm = CopyLoops{};
    pad_bits = 0;
    ctrl = 0;
    for (; locks_used; locks_used &= locks_used - 1) locks[__builtin_ctz(locks_used)] = Lock{};
    for (int slot = 0; slot < kPipes; ++slot) {
      clock[slot] = Clock{};
      clock[slot].at[thread(slot)] = 1;
      known[slot] = 0;
      scalar_seen[slot] = 0;
    }
  }

  TWIN_UNWATCHED int thread(int slot) const { return index * 8 + slot; }
  TWIN_UNWATCHED const char* name() const {
    constexpr const char* names[] = {"AIC", "AIV0", "AIV1"};
    return names[index];
  }

  // What the scalar pipe knows when it issues an instruction, the instruction's pipe knows.
  TWIN_UNWATCHED Clock& at(int slot) {
    if (scalar_seen[slot] != scalar_version && slot != 0) {
      const uint32_t own = clock[slot].at[thread(0)];  // what scalar code stored needs a flag of its own
      clock[slot].join(clock[0]);
      clock[slot].at[thread(0)] = own;
      scalar_seen[slot] = scalar_version;
    }
    return clock[slot];
  }
  TWIN_UNWATCHED void learn(int slot, const Clock& news) {
    clock[slot].join(news);
    known[slot] = std::max(known[slot], news.at[thread(slot)]);
    if (slot == 0) ++scalar_version;
  }
  TWIN_UNWATCHED Clock publish(int slot) {
    Clock copy = at(slot);
    ++clock[slot].at[thread(slot)];
    return copy;
  }
};

inline constexpr int kCubeSpaces = 8;

struct Block {
  int index = 0;
  Core cores[kCores];
  Memory ub[2] = {Memory(Space::UB), Memory(Space::UB)};
  Memory* cube = nullptr;  // every space but UB, 8 of them: only where a cube core runs
  CubeState* cube_state = nullptr;

  Block() = default;
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;
  ~Block() {
    delete[] cube;
    delete cube_state;
  }

  TWIN_UNWATCHED void begin(int number, bool with_cube) {
    index = number;
    for (int i = 0; i < kCores; ++i) cores[i].begin(i);
    ub[0].reset();
    ub[1].reset();
    if (with_cube && !cube) {
      cube = new Memory[kCubeSpaces]{Memory(Space::L1),   Memory(Space::L0A),     Memory(Space::L0B),
                                     Memory(Space::L0C),  Memory(Space::BIAS),    Memory(Space::FIXPIPE),
                                     Memory(Space::L0A_MX), Memory(Space::L0B_MX)};
      cube_state = new CubeState;
    }
    if (cube) {
      *cube_state = CubeState{};
      for (int i = 0; i < kCubeSpaces; ++i) cube[i].reset();
    }
  }
};

struct Fault {  // read by twin_call.py: keep in step with its Structure
  char kind[32] = {};
  char message[512] = {};
  char intrinsic[64] = {};
  char core[8] = {};
  char pipe[8] = {};
  int32_t block = -1;
  int32_t raised = 0;
  uint64_t address = 0;
};

}  // namespace twin
