// Order of loads and stores within one vector function.
//
// Loads may overtake stores that the same vector function issued before them; asc_mem_bar puts them in order. The twin
// remembers the bytes stored since the last barrier and faults a load that needs one of them.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/C-API/reg/sync_control/asc_mem_bar.md.
#pragma once

#include <vector>

#include "registers.h"

// asc_mem_bar.md, table 2: the order of the enumeration is that of include/c_api/reg_compute/reg_vector.h.
enum twin_barrier : int {
  VV_ALL, VST_VLD, VLD_VST, VST_VST, VS_ALL, VST_LD, VLD_ST, VST_ST,
  SV_ALL, ST_VLD, LD_VST, ST_VST, SS_ALL, ST_LD, LD_ST, ST_ST,
};

namespace twin {

/// Bytes that a vector core's current function stored and no barrier has ordered, as bits and as ranges to clear.
struct PendingStores {
  std::vector<uint64_t> bits = std::vector<uint64_t>((space_bytes(Space::UB) + 512) / 64);
  std::vector<std::pair<uint32_t, uint32_t>> words;

  TWIN_UNWATCHED void add(size_t offset, size_t count) {
    if (count == 0) return;
    const size_t first = offset / 64, last = (offset + count - 1) / 64;
    if (words.empty() || words.back() != std::pair<uint32_t, uint32_t>(first, last)) words.emplace_back(first, last);
    for (size_t i = first; i <= last; ++i) bits[i] |= window(i, offset, count);
  }
  TWIN_UNWATCHED bool any(size_t offset, size_t count) const {
    if (count == 0 || words.empty()) return false;
    for (size_t i = offset / 64; i <= (offset + count - 1) / 64; ++i) {
      if (bits[i] & window(i, offset, count)) return true;
    }
    return false;
  }
  TWIN_UNWATCHED void clear() {
    for (const auto& [first, last] : words) {
      for (size_t i = first; i <= last; ++i) bits[i] = 0;
    }
    words.clear();
  }

 private:
  // Which bits of word `i` lie in [offset, offset + count).
  TWIN_UNWATCHED static uint64_t window(size_t i, size_t offset, size_t count) {
    const size_t from = std::max(offset, i * 64) - i * 64, to = std::min(offset + count, (i + 1) * 64) - i * 64;
    const uint64_t below = to == 64 ? ~uint64_t{0} : (uint64_t{1} << to) - 1;
    return below & ~((uint64_t{1} << from) - 1);
  }
};

TWIN_UNWATCHED inline PendingStores& pending_stores() {
  static PendingStores per_core[2];
  return per_core[machine().core->index - 1];
}

/// How many vector functions the core that runs is in: registers and their loads exist inside of one.
TWIN_UNWATCHED inline bool& in_vector_function() {
  return machine().in_vector_function;  // no vector function waits, so one at a time runs on the host
}

/// The time of one vector function. What earlier ones stored is in order.
class VectorFunction {
 public:
  TWIN_UNWATCHED explicit VectorFunction(const char* what) {
    if (on_cube()) fault("core", what, PIPE_V, 0, "a cube core has no vector unit");
#if TWIN_CHECKED
    if (in_vector_function()) fault("core", what, PIPE_V, 0, "a vector function calls another as if from outside");
    in_vector_function() = true;
    pending_stores().clear();
#endif
  }
  TWIN_UNWATCHED ~VectorFunction() { in_vector_function() = false; }
  VectorFunction(const VectorFunction&) = delete;
  VectorFunction& operator=(const VectorFunction&) = delete;
};

/// Checks that every load and store of a register makes.
TWIN_LANE void require_vector_function([[maybe_unused]] const char* what) {
#if TWIN_CHECKED
  if (__builtin_expect(!in_vector_function(), 0)) {
    fault("core", what, PIPE_V, 0, "outside of a vector function: asc_vf_call<function>(...) runs one");
  }
#endif
}
TWIN_LANE void require_stored_before([[maybe_unused]] const void* pointer, [[maybe_unused]] size_t bytes,
                                     [[maybe_unused]] const char* what) {
#if TWIN_CHECKED
  const size_t offset = ub_of(machine().core->index - 1).offset_of(pointer);
  if (__builtin_expect(pending_stores().any(offset, bytes), 0)) {
    fault("race", what, PIPE_V, offset, "reads UB+%zu, which this vector function stored with no asc_mem_bar between", offset);
  }
#endif
}
TWIN_LANE void remember_store([[maybe_unused]] const void* pointer, [[maybe_unused]] size_t bytes) {
#if TWIN_CHECKED
  pending_stores().add(ub_of(machine().core->index - 1).offset_of(pointer), bytes);
#endif
}

}  // namespace twin

// asc_mem_bar.md
TWIN_OP void mem_bar([[maybe_unused]] twin_barrier type) {
#if TWIN_CHECKED
  twin::require_vector_function("asc_mem_bar");
  if (type == VV_ALL || type == VST_VLD) twin::pending_stores().clear();
#endif
}
TWIN_OP void asc_mem_bar(twin_barrier type) { mem_bar(type); }
