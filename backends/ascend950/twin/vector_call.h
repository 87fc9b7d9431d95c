// Calls of SIMD functions: where registers live, and what loads and stores are ordered by.
//
// Follows: asc-devkit docs/zh/api/SIMD-API/基础API/Reg矢量计算/VF调用/asc_vf_call.md.
#pragma once

#include "vector_hazard.h"

namespace cce {
struct dim3;
}

/// Runs `function` on the vector unit. Functions run in program order, each after what the one before it stored.
template <auto function, class... Arguments>
  requires(!std::is_same_v<std::remove_cvref_t<Arguments>, cce::dim3> && ...)
TWIN_UNWATCHED void asc_vf_call(Arguments... arguments) {
  twin::VectorFunction running("asc_vf_call");
  function(arguments...);
}
