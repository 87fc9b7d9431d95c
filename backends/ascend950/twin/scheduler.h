// Who runs: the cores of a block as fibres, and all blocks at once where a kernel has a barrier of all blocks.
//
// Fibres run in a fixed order, each until it waits or ends, so a launch is the same every time. When a whole round gives
// nobody anything to do, those who still wait are named: that is a deadlock.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <tuple>

#include "machine.h"

namespace twin {

inline constexpr int kPatience = 1000;  // rounds in which nobody does anything but look

struct Meeting {
  int arrived = 0;
  Clock clock;
};

struct Runner {
  Fibre fibre{512 << 10};
  Block* block = nullptr;
  int core = 0;
  bool done = false;
  const char* what = "";
  int id = 0;
  bool polls = false;  // it looks at a word of global memory, and may find it changed without being told
  void (*body)(void*) = nullptr;
  void* argument = nullptr;
};

// One barrier of all blocks: who has arrived, and what the cores of each block knew.
struct BarrierRound {
  int arrived = 0;
  std::map<int, Clock> clocks;
};

struct Scheduler {
  std::vector<std::unique_ptr<Runner>> pool;
  std::vector<Runner*> running;
  Runner* now = nullptr;
  uint64_t progress = 0;                                  // waits that ended, cores that did, words stored for pollers
  std::map<std::tuple<int, int, int>, Meeting> meetings;  // by block, group, id
  std::map<std::pair<int, int>, std::deque<BarrierRound>> rounds;      // by kind of core, id
  std::map<std::tuple<int, int, int>, size_t> entered, passed;  // by block, core, id: rounds joined and waited for
};

TWIN_UNWATCHED inline Scheduler& scheduler() {
  static Scheduler one;
  return one;
}

// The fibre that runs waits for something that another has to do; the caller looks again afterwards.
TWIN_UNWATCHED inline void wait_here(const char* what, int id, bool polls = false) {
  Runner& runner = *scheduler().now;
  runner.polls = polls;
  runner.what = what;
  runner.id = id;
  runner.fibre.leave();
}

TWIN_UNWATCHED inline void went_on() { ++scheduler().progress; }

TWIN_UNWATCHED inline Meeting& block_meeting(const Block& block, int group, int id) {
  return scheduler().meetings[{block.index, group, id}];
}

// All cores of one kind (cube, or every vector core) of all blocks meet.
TWIN_UNWATCHED inline void meet_all_blocks(pipe_t pipe, int id, const Clock& clock, const char* what) {
  Machine& m = machine();
  Scheduler& s = scheduler();
  if (!m.together) {
    fault("argument", what, pipe, 0, "a barrier of all blocks needs blocks that run together: launch with together");
  }
  std::deque<BarrierRound>& rounds = s.rounds[{on_cube() ? 0 : 1, id}];
  size_t& mine = s.entered[{m.block->index, m.core->index, id}];
  if (rounds.size() <= mine) rounds.resize(mine + 1);
  ++rounds[mine].arrived;
  went_on();
  rounds[mine].clocks[m.block->index].join(clock);
  ++mine;
}

TWIN_UNWATCHED inline void pass_all_blocks(pipe_t pipe, int id, const char* what) {
  Machine& m = machine();
  const int kind = on_cube() ? 0 : 1;
  const int expected = m.num_blocks * (kind ? m.vectors_per_block : 1);
  std::deque<BarrierRound>& rounds = scheduler().rounds[{kind, id}];
  size_t& mine = scheduler().passed[{m.block->index, m.core->index, id}];
  while (rounds.size() <= mine || rounds[mine].arrived < expected) wait_here(what, id);
  went_on();
  m.core->learn(slot_of(pipe), rounds[mine].clocks[m.block->index]);
  ++m.core->phase;
  ++mine;
}

TWIN_UNWATCHED inline void run_body(void* argument) {
  auto* runner = static_cast<Runner*>(argument);
  runner->body(runner->argument);
  runner->done = true;
  went_on();
  runner->fibre.leave();
}

TWIN_UNWATCHED inline void report_deadlock() {
  std::string names;
  for (Runner* runner : scheduler().running) {
    if (runner->done || names.size() > 300) continue;
    const Core& core = runner->block->cores[runner->core];
    names += (names.empty() ? "block " : "; block ") + std::to_string(runner->block->index) + " " + core.name() +
             " in " + runner->what + ", id " + std::to_string(runner->id);
  }
  report_fault("deadlock", scheduler().now->what, PIPE_S, 0, ("nobody can go on: " + names).c_str());
}

// Runs everybody to the end, or until a fault.
TWIN_UNWATCHED inline void run_all() {
  Scheduler& s = scheduler();
  Machine& m = machine();
  int idle_rounds = 0;
  for (bool all_done = false; !all_done;) {
    all_done = true;
    bool polls = false;
    const uint64_t before = s.progress;
    for (Runner* runner : s.running) {
      if (runner->done) continue;
      s.now = runner;
      m.block = runner->block;
      m.core = &runner->block->cores[runner->core];
      runner->fibre.resume();
      if (m.report->raised) return;
      all_done = all_done && runner->done;
      polls = polls || runner->polls;
    }
    idle_rounds = s.progress == before ? idle_rounds + 1 : 0;
    if (!all_done && idle_rounds > (polls ? kPatience : 0)) {
      report_deadlock();
      return;
    }
  }
}

}  // namespace twin
