// A launch: the function that the host calls, with the kernel's arguments as an array of pointers.
//
// The host's side is twin_call.py; the layouts of Request, Region, Fault and Counters are the same there.
#pragma once

#include <tuple>
#include <type_traits>
#include <utility>

#include "machine.h"
#include "scheduler.h"
#include "sync.h"
#include "watch.h"

namespace twin {

struct Request {
  const Region* regions;
  int32_t num_regions;
  int32_t blocks;
  int32_t cube;       // 1 where the kernel has a cube core
  int32_t vectors;    // vector cores of a block
  int32_t together;   // all blocks run at once
  int32_t backwards;  // the last block runs first
  int32_t zero_is_ub;
  int32_t reserved;
  Fault fault;
  Counters counters;
};

// Nothing may be left over: a flag that nobody takes is the next kernel's fault on a device.
TWIN_UNWATCHED inline void check_left_over(Block& block) {
  Machine& m = machine();
  m.block = &block;
  char words[128];
  for (Core& core : block.cores) {
    if (!core.pending) continue;
    m.core = &core;
    for (int from = 0; from < kPipes; ++from) {
      for (int to = 0; to < kPipes; ++to) {
        for (int id = 0; id < 8; ++id) {
          if (!core.flags[from][to][id].count) continue;
          std::snprintf(words, sizeof words, "flag %s to %s, id %d, is still set when the kernel ends", pipe_name(from),
                        pipe_name(to), id);
          report_fault("flag", "end of kernel", PIPE_S, 0, words);
        }
      }
    }
    for (int id = 0; id < 32; ++id) {
      if (core.locks[id].holder < 0) continue;
      std::snprintf(words, sizeof words, "lock %d is still held by pipe %s when the kernel ends", id,
                    pipe_name(core.locks[id].holder));
      report_fault("lock", "end of kernel", PIPE_S, 0, words);
    }
    for (int id = 0; id < 32; ++id) {
      if (core.intra[id].empty()) continue;
      std::snprintf(words, sizeof words, "%zu signals of id %d between cores are left when the kernel ends",
                    core.intra[id].size(), id);
      report_fault("flag", "end of kernel", PIPE_S, 0, words);
    }
    for (auto& group : core.collective) {
      for (int id = 0; id < 16; ++id) {
        if (group[id].empty()) continue;
        std::snprintf(words, sizeof words, "%zu signals of id %d of a group are left when the kernel ends",
                      group[id].size(), id);
        report_fault("flag", "end of kernel", PIPE_S, 0, words);
      }
    }
  }
}

inline std::vector<std::unique_ptr<Block>>& block_pool() {
  static std::vector<std::unique_ptr<Block>> pool;
  return pool;
}

TWIN_UNWATCHED inline void launch_blocks(int first, int count, void (*body)(void*), void* argument) {
  Machine& m = machine();
  Scheduler& s = scheduler();
  auto& blocks = block_pool();
  while (blocks.size() < static_cast<size_t>(count)) blocks.push_back(std::make_unique<Block>());
  s.running.clear();
  s.meetings.clear();
  s.rounds.clear();
  s.entered.clear();
  s.passed.clear();
  for (int b = 0; b < count; ++b) {
    blocks[b]->begin(first + b, m.with_cube);
    for (int core = m.with_cube ? 0 : 1; core <= m.vectors_per_block; ++core) {
      if (s.pool.size() <= s.running.size()) s.pool.push_back(std::make_unique<Runner>());
      Runner& runner = *s.pool[s.running.size()];
      runner.block = blocks[b].get();
      runner.core = core;
      runner.done = false;
      runner.polls = false;
      runner.body = body;
      runner.argument = argument;
      runner.fibre.prepare(run_body, &runner);
      s.running.push_back(&runner);
    }
  }
  run_all();
  if (m.report->raised) return;
  for (int b = 0; b < count; ++b) check_left_over(*blocks[b]);
}

TWIN_UNWATCHED inline void run(Request& request, void (*body)(void*), void* argument) {
  Machine& m = machine();
  m.num_blocks = request.blocks;
  m.vectors_per_block = request.vectors;
  m.with_cube = request.cube != 0;
  m.together = request.together != 0;
  m.zero_is_ub = request.zero_is_ub != 0;
  m.report = &request.fault;
  m.in_vector_function = false;  // a fault may have left one
  m.counters = Counters{};
  m.global.begin(request.regions, request.num_regions);
  if (m.together) {
    launch_blocks(0, request.blocks, body, argument);
  } else {
    for (int b = 0; b < request.blocks && !m.report->raised; ++b) {
      launch_blocks(request.backwards ? request.blocks - 1 - b : b, 1, body, argument);
    }
  }
  for (auto& block : block_pool()) {
    for (Memory& memory : block->ub) {
      m.counters.highest[0] = std::max<uint64_t>(m.counters.highest[0], memory.highest);
      memory.highest = 0;
    }
    if (!block->cube) continue;
    for (int i = 0; i < kCubeSpaces; ++i) {
      Memory& memory = block->cube[i];
      uint64_t& highest = m.counters.highest[static_cast<int>(memory.space)];
      highest = std::max<uint64_t>(highest, memory.highest);
      memory.highest = 0;
    }
  }
  request.counters = m.counters;
}

template <class... A>
struct Call {
  void (*kernel)(A...);
  void** values;

  template <size_t... I>
  TWIN_UNWATCHED void apply(std::index_sequence<I...>) {
    kernel(*static_cast<std::remove_reference_t<A>*>(values[I])...);
  }
  TWIN_UNWATCHED static void body(void* self) { static_cast<Call*>(self)->apply(std::index_sequence_for<A...>{}); }
};

template <class... A>
TWIN_UNWATCHED int launch(void (*kernel)(A...), Request* request, void** values) {
  Call<A...> call{kernel, values};
  run(*request, &Call<A...>::body, &call);
  return request->fault.raised;
}

// One letter per parameter, as twin_call.py has them: p pointer, i int32, l int64, f float32, ? anything else.
template <class T>
constexpr char letter() {
  if constexpr (std::is_pointer_v<T>) return 'p';
  else if constexpr (std::is_same_v<T, float>) return 'f';
  else if constexpr (std::is_integral_v<T> && sizeof(T) == 4) return 'i';
  else if constexpr (std::is_integral_v<T> && sizeof(T) == 8) return 'l';
  else return '?';
}

template <class... A>
const char* parameters(void (*)(A...)) {
  static const char letters[] = {letter<A>()..., '\0'};
  return letters;
}

}  // namespace twin

// What twin_build.py appends to a source for each of its kernels.
#define TWIN_ENTRY(name)                                                                                        \
  extern "C" __attribute__((visibility("default"))) const char* twin_parameters_##name() {                      \
    return twin::parameters(&name);                                                                             \
  }                                                                                                             \
  extern "C" __attribute__((visibility("default"))) int twin_run_##name(twin::Request* request, void** values) { \
    return twin::launch(&name, request, values);                                                                \
  }
