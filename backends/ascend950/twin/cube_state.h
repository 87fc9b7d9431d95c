// What a cube core remembers between instructions: settings that later copies use, and the unit flags of L0C.
#pragma once

#include "clocks.h"

namespace twin {

inline constexpr int kUnits = 256;  // blocks of 1 KB of L0C that have a unit flag each

struct CubeState {
  // asc_set_gm2l1_nz_para; no copy may run before it is set
  bool nz_set = false;
  uint16_t nz_matrices = 0, nz_row_stride = 0, nz_group_stride = 0, nz_matrix_stride = 0;
  // asc_set_gm2l1_loop_size, _loop1_stride, _loop2_stride, asc_set_gm2l1_pad
  uint32_t loop1 = 1, loop2 = 1;
  uint64_t loop1_source = 0, loop1_target = 0, loop2_source = 0, loop2_target = 0;
  bool pad_set = false;
  uint32_t pad = 0;
  // asc_set_l0c_copy_nz_para, _channel_para, _prequant
  bool out_set = false;
  uint16_t out_matrices = 1, out_source_stride = 0, out_row_stride = 0;
  uint32_t out_target_stride = 0;
  bool quant_set = false;
  float quant_scale = 0;
  // unit flags: whether a block of L0C waits to be copied out, and what the last instruction on it knew
  bool full[kUnits] = {};
  Clock unit[kUnits];
};

}  // namespace twin
