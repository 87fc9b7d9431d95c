// Vector clocks: what each pipe of a block knows of the others, so that an access which nothing orders is seen.
//
// A clock counts the flags that a pipe has set. An instruction on a pipe may touch bytes only if it knows the clock at
// which another pipe touched them; knowledge travels with flags, barriers and locks, never with time.
#pragma once

#include <algorithm>
#include <cstdint>

#include "qualifiers.h"

namespace twin {

inline constexpr int kPipes = 7;            // S, V, M, MTE1, MTE2, MTE3, FIX
inline constexpr int kCores = 3;            // AIC, AIV0, AIV1
inline constexpr int kThreads = 8 * kCores;  // one per pipe of a block, spread for a cheap index

// The place of a pipe in tables; -1 for a pipe that this model does not have.
TWIN_UNWATCHED constexpr int slot_of(pipe_t pipe) {
  return pipe == PIPE_FIX ? 6 : (pipe <= PIPE_MTE3 ? static_cast<int>(pipe) : -1);
}

TWIN_UNWATCHED constexpr const char* pipe_name(int slot) {
  constexpr const char* names[] = {"S", "V", "M", "MTE1", "MTE2", "MTE3", "FIX"};
  return slot >= 0 && slot < kPipes ? names[slot] : "ALL";
}

struct Clock {
  uint32_t at[kThreads] = {};

  TWIN_UNWATCHED void join(const Clock& other) {
    for (int i = 0; i < kThreads; ++i) at[i] = std::max(at[i], other.at[i]);
  }
};

}  // namespace twin
