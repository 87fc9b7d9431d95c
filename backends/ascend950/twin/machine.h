// The machine: blocks, cores, their memories and pipes, and the one way in which an intrinsic may touch memory.
//
// An intrinsic does its work at once, in program order; what order the device would have guaranteed is kept beside it as
// clocks. So values are those of a correct schedule, and a schedule that is not correct is a fault.
//
// For authors of intrinsics: ask `ub`, `l1`, `l0a`, ... for bytes and name yourself; the answer is host memory that may
// be read or written. Ask `gm` for global memory. Call `fault` for what the documents forbid. Nothing else is needed.
#pragma once

#include <cstdarg>
#include <cstdio>

#include "cores.h"
#include "fibres.h"
#include "global_memory.h"

namespace twin {

struct Machine {
  Block* block = nullptr;
  Core* core = nullptr;
  int num_blocks = 0;
  int vectors_per_block = 1;  // AIV cores of a block of this kernel
  bool with_cube = false;
  bool together = false;      // all blocks run at once, so that they can meet
  bool in_vector_function = false;
  bool zero_is_ub = false;    // generated text starts the unified buffer at a null pointer
  uint32_t instruction = 0;  // number of the instruction, so that one's own writes are told from another's
  GlobalMemory global;
  Counters counters;
  Fault* report = nullptr;
};

TWIN_UNWATCHED inline Machine& machine() {
  static Machine one;
  return one;
}

TWIN_UNWATCHED inline bool on_cube() { return machine().core->index == 0; }

// Writes a fault down for the caller of the kernel; the first one stands.
TWIN_UNWATCHED inline void report_fault(const char* kind, const char* intrinsic, pipe_t pipe, uint64_t address,
                                        const char* message) {
  Machine& m = machine();
  Fault& out = *m.report;
  if (out.raised) return;
  std::snprintf(out.message, sizeof out.message, "%s", message);
  std::snprintf(out.kind, sizeof out.kind, "%s", kind);
  std::snprintf(out.intrinsic, sizeof out.intrinsic, "%s", intrinsic);
  std::snprintf(out.pipe, sizeof out.pipe, "%s", pipe_name(slot_of(pipe)));
  std::snprintf(out.core, sizeof out.core, "%s", m.core ? m.core->name() : "");
  out.block = m.block ? m.block->index : -1;
  out.address = address;
  out.raised = 1;
}

// Stops the launch: this fibre never runs again.
[[noreturn]] __attribute__((format(printf, 5, 6))) TWIN_UNWATCHED inline void fault(
    const char* kind, const char* intrinsic, pipe_t pipe, uint64_t address, const char* format, ...) {
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  report_fault(kind, intrinsic, pipe, address, message);
  for (;;) Fibre::current()->leave();
}

// One instruction goes to a pipe; intrinsics that write in several pieces call this once, before the first.
TWIN_UNWATCHED inline void issue(pipe_t pipe, size_t bytes = 0) {
  Machine& m = machine();
  ++m.instruction;
  const int slot = slot_of(pipe);
  ++m.counters.instructions[slot];
  m.counters.bytes[slot] += bytes;
}

#if TWIN_CHECKED
// Is the access ordered after everything that it depends on?
TWIN_UNWATCHED inline void order(Memory& memory, size_t offset, size_t count, pipe_t pipe, Access access,
                                 const char* what) {
  Machine& m = machine();
  Core& core = *m.core;
  const int slot = slot_of(pipe);
  const Clock& now = core.at(slot);
  const auto self = static_cast<uint8_t>(core.thread(slot));
  const bool copies = pipe == PIPE_MTE2 || pipe == PIPE_MTE3;
  constexpr const char* cores[] = {"AIC", "AIV0", "AIV1"};
  for (size_t i = offset / kCell; i <= (offset + count - 1) / kCell; ++i) {
    Cell& cell = memory.cell(i);
    if (cell.writer != kNobody && cell.writer != self && cell.write_clock > now.at[cell.writer]) {
      fault("race", what, pipe, i * kCell, "%s %s+%zu before the write of pipe %s of %s is known to be complete",
            access == Access::read ? "reads" : "overwrites", space_name(memory.space), i * kCell,
            pipe_name(cell.writer % 8), cores[cell.writer / 8]);
    }
    if (access == Access::read) {
      cell.reader[slot] = self;
      cell.read_clock[slot] = now.at[self];
      continue;
    }
    for (int r = 0; r < kPipes; ++r) {
      const bool by_scalar = r == 0 && cell.reader[r] == core.thread(0);  // over before anything later is issued
      if (cell.read_clock[r] && !by_scalar && cell.reader[r] != self && cell.read_clock[r] > now.at[cell.reader[r]]) {
        fault("race", what, pipe, i * kCell, "overwrites %s+%zu before the read of pipe %s of %s is known to be complete",
              space_name(memory.space), i * kCell, pipe_name(r), cores[cell.reader[r] / 8]);
      }
      cell.read_clock[r] = 0;
    }
    if (copies && cell.writer == self && cell.instruction != m.instruction && cell.write_clock > core.known[slot]) {
      fault("race", what, pipe, i * kCell, "two copies of pipe %s write %s+%zu and nothing orders them",
            pipe_name(slot), space_name(memory.space), i * kCell);
    }
    cell.writer = self;
    cell.write_clock = now.at[self];
    cell.instruction = m.instruction;
  }
}
#endif

// Bytes of a local memory for an access, checked.
//
// pointer: an offset or an address; bytes: how many from there; align: of the offset; what: the intrinsic's name.
TWIN_UNWATCHED inline uint8_t* local(Memory& memory, const void* pointer, size_t bytes, pipe_t pipe, Access access,
                                     const char* what, size_t align = 1) {
  const size_t offset = memory.offset_of(pointer);
#if TWIN_CHECKED
  if (offset + bytes > memory.bytes) {
    if (offset > memory.bytes) {
      fault("bounds", what, pipe, reinterpret_cast<uintptr_t>(pointer), "%p is not an address of %s (%zu bytes)",
            pointer, space_name(memory.space), memory.bytes);
    }
    fault("bounds", what, pipe, offset, "%zu bytes from %s+%zu end past its %zu bytes", bytes,
          space_name(memory.space), offset, memory.bytes);
  }
  if (align > 1 && offset % align) {
    fault("alignment", what, pipe, offset, "%s+%zu is not a multiple of %zu", space_name(memory.space), offset, align);
  }
  if (bytes) {
    order(memory, offset, bytes, pipe, access, what);
    if (access == Access::write) {
      memory.define(offset, bytes);
    } else {
      memory.highest = std::max(memory.highest, offset + bytes);
    }
  }
#else
  if (access == Access::write) memory.touch(offset, bytes);
#endif
  return memory.at(offset);
}

// The unified buffer of the vector core that runs; a cube core names the one that it writes to.
TWIN_UNWATCHED inline Memory& ub_of(int vector) { return machine().block->ub[vector]; }
TWIN_UNWATCHED inline uint8_t* ub(const void* pointer, size_t bytes, pipe_t pipe, Access access, const char* what,
                                  size_t align = 1) {
  if (on_cube()) fault("core", what, pipe, 0, "a cube core has no unified buffer");
  return local(ub_of(machine().core->index - 1), pointer, bytes, pipe, access, what, align);
}

// A memory of the cube core of this block.
TWIN_UNWATCHED inline Memory& cube_memory(Space space, const char* what) {
  Block& block = *machine().block;
  if (!block.cube) fault("core", what, PIPE_S, 0, "this kernel has no cube core, so no %s", space_name(space));
  return block.cube[static_cast<int>(space) - 1];
}
TWIN_UNWATCHED inline uint8_t* cube(Space space, const void* pointer, size_t bytes, pipe_t pipe, Access access,
                                    const char* what, size_t align = 1) {
  return local(cube_memory(space, what), pointer, bytes, pipe, access, what, align);
}

// Faults where a range holds bytes that nothing wrote: for reads whose values leave the core.
TWIN_UNWATCHED inline void require_defined(Memory& memory, const void* pointer, size_t bytes, pipe_t pipe,
                                           const char* what) {
#if TWIN_CHECKED
  const size_t offset = memory.offset_of(pointer);
  const size_t first = memory.first_undefined(offset, bytes);
  if (first != offset + bytes) {
    fault("poison", what, pipe, first, "reads %s+%zu, which nothing has written in this block",
          space_name(memory.space), first);
  }
#endif
}

// Is the range inside one argument of the launch, and may it be written?
TWIN_UNWATCHED inline void require_region(const void* pointer, size_t bytes, bool write, const char* what,
                                          pipe_t pipe = PIPE_S) {
#if TWIN_CHECKED
  char words[256];
  const char* kind = machine().global.check(pointer, bytes, write, words, sizeof words);
  if (kind) fault(kind, what, pipe, reinterpret_cast<uintptr_t>(pointer), "%s", words);
#else
  (void)pointer, (void)bytes, (void)write, (void)what, (void)pipe;
#endif
}

// Global memory for an access: within one region of the launch, and in order with the other pipes and blocks.
TWIN_UNWATCHED inline uint8_t* gm(const void* pointer, size_t bytes, pipe_t pipe, Access access, const char* what) {
#if TWIN_CHECKED
  const bool write = access == Access::write;
  require_region(pointer, bytes, write, what, pipe);
  if (bytes) {
    Machine& m = machine();
    Core& core = *m.core;
    const int slot = slot_of(pipe);
    char words[256];
    m.global.atomic = core.store != StoreMode::replace;
    const char* kind = m.global.order(pointer, bytes, write, m.block->index, core.thread(slot), core.at(slot),
                                      core.phase, words, sizeof words);
    if (kind) fault(kind, what, pipe, reinterpret_cast<uintptr_t>(pointer), "%s", words);
  }
#else
  (void)bytes, (void)pipe, (void)access, (void)what;
#endif
  return const_cast<uint8_t*>(static_cast<const uint8_t*>(pointer));
}

}  // namespace twin
