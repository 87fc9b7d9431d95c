// Order between pipes, between the cores of a block, and between blocks.
//
// Inside a core the scalar unit issues everything in program order, so a wait whose flag nothing has set yet would never
// end on a device: it is a fault at once. Between cores a wait lets the other fibres run, and is a fault only when
// nobody can go on (scheduler.h).
#pragma once

#include "machine.h"
#include "scheduler.h"

namespace twin {

TWIN_UNWATCHED inline int checked_slot(pipe_t pipe, const char* what) {
  const int slot = slot_of(pipe);
  if (slot < 0) fault("argument", what, pipe, 0, "pipe %d cannot be used here", static_cast<int>(pipe));
  return slot;
}

TWIN_UNWATCHED inline Flag& checked_flag(pipe_t from, pipe_t to, int id, const char* what) {
  const int source = checked_slot(from, what), target = checked_slot(to, what);
  if (id < 0 || id > 7) fault("argument", what, from, 0, "flag id %d: ids are 0 to 7", id);
  if (source == target) fault("argument", what, from, 0, "pipe %s signals itself", pipe_name(source));
  return machine().core->flags[source][target][id];
}

TWIN_UNWATCHED inline void set_pipe_flag(pipe_t from, pipe_t to, int id, const char* what) {
  Flag& flag = checked_flag(from, to, id, what);
  if (flag.count) {
    fault("flag", what, from, 0, "flag %s to %s, id %d, is set again before a wait took it", pipe_name(slot_of(from)),
          pipe_name(slot_of(to)), id);
  }
  flag.count = 1;
  ++machine().core->pending;
  flag.clock = machine().core->publish(slot_of(from));
}

TWIN_UNWATCHED inline void wait_pipe_flag(pipe_t from, pipe_t to, int id, const char* what) {
  Flag& flag = checked_flag(from, to, id, what);
  if (!flag.count) {
    fault("flag", what, to, 0, "waits for flag %s to %s, id %d, which nothing has set: the core would hang",
          pipe_name(slot_of(from)), pipe_name(slot_of(to)), id);
  }
  flag.count = 0;
  --machine().core->pending;
  machine().core->learn(slot_of(to), flag.clock);
}

TWIN_UNWATCHED inline void barrier(pipe_t pipe, const char* what) {
  Core& core = *machine().core;
  if (pipe == PIPE_S) fault("argument", what, pipe, 0, "the scalar pipe is in order already and takes no barrier");
  if (pipe != PIPE_ALL) {
    const int slot = checked_slot(pipe, what);
    core.learn(slot, core.publish(slot));
    return;
  }
  Clock all;
  for (int s = 0; s < kPipes; ++s) all.join(core.publish(s));
  for (int s = 0; s < kPipes; ++s) core.learn(s, all);
}

// A counted signal from elsewhere: waits until one is there, then knows what the sender knew.
TWIN_UNWATCHED inline void take(std::vector<Clock>& signals, pipe_t pipe, const char* what, int id) {
  const int slot = checked_slot(pipe, what);
  while (signals.empty()) wait_here(what, id);
  went_on();
  machine().core->learn(slot, signals.front());
  signals.erase(signals.begin());
  --machine().core->pending;
}

TWIN_UNWATCHED inline void give(Core& to, std::vector<Clock>& signals, const Clock& clock, pipe_t pipe, const char* what,
                                int id) {
  if (signals.size() >= 15) fault("flag", what, pipe, 0, "counter %d would pass 15: its four bits overflow", id);
  signals.push_back(clock);
  ++to.pending;
  went_on();
}

TWIN_UNWATCHED inline void arrive_intra(pipe_t pipe, int id, const char* what) {
  Machine& m = machine();
  const bool cube_side = on_cube();
  if (id < 0 || id > (cube_side ? 31 : 15)) fault("argument", what, pipe, 0, "id %d of %s", id, m.core->name());
  const Clock clock = m.core->publish(checked_slot(pipe, what));
  const int target = cube_side ? 1 + id / 16 : 0;
  const int counter = cube_side ? id % 16 : id + 16 * (m.core->index - 1);
  Core& to = m.block->cores[target];
  give(to, to.intra[counter], clock, pipe, what, id);
}

TWIN_UNWATCHED inline void wait_intra(pipe_t pipe, int id, const char* what) {
  Core& core = *machine().core;
  if (id < 0 || id > (on_cube() ? 31 : 15)) fault("argument", what, pipe, 0, "id %d of %s", id, core.name());
  take(core.intra[id], pipe, what, id);
}

enum Group { kBlocks = 0, kVectors = 1, kCubeAndVectors = 2 };

// Signals of a group: when all who have to have arrived, each receiver's counter goes up by one.
TWIN_UNWATCHED inline void arrive_group(Group group, pipe_t pipe, int id, const char* what) {
  Machine& m = machine();
  if (id < 0 || id > 15) fault("argument", what, pipe, 0, "flag id %d: ids are 0 to 15", id);
  m.core->publish(checked_slot(pipe, what));
  const Clock clock = m.core->at(slot_of(pipe));
  Block& block = *m.block;
  const auto send = [&](Core& to, const Clock& news) { give(to, to.collective[group][id], news, pipe, what, id); };
  if (group == kCubeAndVectors && on_cube()) {
    for (int v = 1; v <= m.vectors_per_block; ++v) send(block.cores[v], clock);
    return;
  }
  if (group == kBlocks) {
    meet_all_blocks(pipe, id, clock, what);
    return;
  }
  Meeting& meeting = block_meeting(block, group, id);
  meeting.clock.join(clock);
  if (++meeting.arrived < m.vectors_per_block) return;
  if (group == kVectors) {
    for (int v = 1; v <= m.vectors_per_block; ++v) send(block.cores[v], meeting.clock);
  } else {
    send(block.cores[0], meeting.clock);
  }
  meeting = Meeting{};
}

TWIN_UNWATCHED inline void wait_group(Group group, pipe_t pipe, int id, const char* what) {
  if (id < 0 || id > 15) fault("argument", what, pipe, 0, "flag id %d: ids are 0 to 15", id);
  if (group == kBlocks) {
    pass_all_blocks(pipe, id, what);
    return;
  }
  take(machine().core->collective[group][id], pipe, what, id);
}

}  // namespace twin

// asc-devkit, docs: sync/asc_sync_notify.md, asc_sync_wait.md
#define asc_sync_notify(pipe, tpipe, id) twin::set_pipe_flag(pipe, tpipe, static_cast<int>(id), "asc_sync_notify")
#define asc_sync_wait(pipe, tpipe, id) twin::wait_pipe_flag(pipe, tpipe, static_cast<int>(id), "asc_sync_wait")
#define set_flag(pipe, tpipe, id) twin::set_pipe_flag(pipe, tpipe, static_cast<int>(id), "set_flag")
#define wait_flag(pipe, tpipe, id) twin::wait_pipe_flag(pipe, tpipe, static_cast<int>(id), "wait_flag")

// asc-devkit, docs: sync/asc_sync_pipe.md
#define asc_sync_pipe(pipe) twin::barrier(pipe, "asc_sync_pipe")
#define pipe_barrier(pipe) twin::barrier(pipe, "pipe_barrier")

// asc-devkit, docs: sync/asc_sync.md, asc_sync_vec.md
__aicore__ inline void asc_sync() { twin::barrier(PIPE_ALL, "asc_sync"); }
__aicore__ inline void asc_sync_vec() { twin::barrier(PIPE_ALL, "asc_sync_vec"); }

// asc-devkit, docs: sync/asc_sync_mte2.md: what MTE2 has read is there for V and MTE3
__aicore__ inline void asc_sync_mte2(int id) {
  for (pipe_t to : {PIPE_MTE3, PIPE_V}) {
    twin::set_pipe_flag(PIPE_MTE2, to, id, "asc_sync_mte2");
    twin::wait_pipe_flag(PIPE_MTE2, to, id, "asc_sync_mte2");
  }
  twin::barrier(PIPE_MTE2, "asc_sync_mte2");
}

// asc-devkit, docs: sync/asc_sync_mte3.md: what MTE3 has read may be written by V and MTE2
__aicore__ inline void asc_sync_mte3(int id) {
  for (pipe_t to : {PIPE_MTE2, PIPE_V}) {
    twin::set_pipe_flag(PIPE_MTE3, to, id, "asc_sync_mte3");
    twin::wait_pipe_flag(PIPE_MTE3, to, id, "asc_sync_mte3");
  }
  twin::barrier(PIPE_MTE3, "asc_sync_mte3");
}

// asc-devkit, docs: sync/asc_sync_intra_arrive.md, asc_sync_intra_wait.md
#define asc_sync_intra_arrive(pipe, id) twin::arrive_intra(pipe, static_cast<int>(id), "asc_sync_intra_arrive")
#define asc_sync_intra_wait(pipe, id) twin::wait_intra(pipe, static_cast<int>(id), "asc_sync_intra_wait")

// asc-devkit, docs: sync/asc_sync_block_arrive.md, asc_sync_subblock_arrive.md, asc_sync_inter_arrive.md
#define asc_sync_block_arrive(pipe, id) \
  twin::arrive_group(twin::kCubeAndVectors, pipe, static_cast<int>(id), "asc_sync_block_arrive")
#define asc_sync_block_wait(pipe, id) \
  twin::wait_group(twin::kCubeAndVectors, pipe, static_cast<int>(id), "asc_sync_block_wait")
#define asc_sync_subblock_arrive(pipe, id) \
  twin::arrive_group(twin::kVectors, pipe, static_cast<int>(id), "asc_sync_subblock_arrive")
#define asc_sync_subblock_wait(pipe, id) \
  twin::wait_group(twin::kVectors, pipe, static_cast<int>(id), "asc_sync_subblock_wait")
#define asc_sync_inter_arrive(pipe, id) \
  twin::arrive_group(twin::kBlocks, pipe, static_cast<int>(id), "asc_sync_inter_arrive")
#define asc_sync_inter_wait(pipe, id) \
  twin::wait_group(twin::kBlocks, pipe, static_cast<int>(id), "asc_sync_inter_wait")

// asc-devkit, docs: sync/asc_sync_data_barrier.md. Scalar accesses happen at once here.
enum class mem_dsb_t { DSB_ALL, DSB_DDR, DSB_UB, DSB_SEQ };
using enum mem_dsb_t;
__aicore__ inline void asc_sync_data_barrier(mem_dsb_t) {}
