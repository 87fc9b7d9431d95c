// The control register of a core, as far as it decides what happens to infinities and NaN.
#pragma once

#include "machine.h"

// asc-devkit, docs: asc_saturation_mode.md; the values are bit numbers of CTRL.
enum class asc_saturation_mode : uint8_t { FLOAT = 48, FLOAT8 = 50, INT = 53, CAST = 59 };
enum class asc_override_strategy : uint8_t { USE_API = 0, USE_GLOBAL = 1 };

// asc-devkit, docs: asc_set_ctrl.md, asc_get_ctrl.md
TWIN_UNWATCHED inline void asc_set_ctrl(uint64_t config) { twin::machine().core->ctrl = config; }
TWIN_UNWATCHED inline int64_t asc_get_ctrl() { return static_cast<int64_t>(twin::machine().core->ctrl); }

// asc-devkit, docs: asc_set_saturation_flag.md. A set bit switches saturation on for INT and off for the others.
TWIN_UNWATCHED inline void asc_set_saturation_flag(asc_saturation_mode mode, bool saturate) {
  const uint64_t bit = uint64_t{1} << static_cast<int>(mode);
  uint64_t& ctrl = twin::machine().core->ctrl;
  ctrl = (mode == asc_saturation_mode::INT) == saturate ? ctrl | bit : ctrl & ~bit;
}
TWIN_UNWATCHED inline bool asc_get_saturation_flag(asc_saturation_mode mode) {
  const bool set = twin::machine().core->ctrl >> static_cast<int>(mode) & 1;
  return (mode == asc_saturation_mode::INT) == set;
}

// asc-devkit, docs: asc_set_saturation_strategy.md; bit 60 of CTRL.
TWIN_UNWATCHED inline void asc_set_saturation_strategy(asc_override_strategy strategy) {
  const uint64_t bit = uint64_t{1} << 60;
  uint64_t& ctrl = twin::machine().core->ctrl;
  ctrl = strategy == asc_override_strategy::USE_GLOBAL ? ctrl | bit : ctrl & ~bit;
}
TWIN_UNWATCHED inline asc_override_strategy asc_get_saturation_strategy() {
  return twin::machine().core->ctrl >> 60 & 1 ? asc_override_strategy::USE_GLOBAL : asc_override_strategy::USE_API;
}
