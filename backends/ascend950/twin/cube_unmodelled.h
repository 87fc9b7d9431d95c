// Instructions of the cube core that the C API has and this model has not: asking for one is a fault that names it.
//
// asc-devkit, docs: cube_datamove/*.md, cube_compute/*.md
#pragma once

#include "machine.h"

#define TWIN_UNMODELLED(Name, Pipe)                                                                   \
  template <class... Arguments>                                                                       \
  TWIN_UNWATCHED inline void Name(const Arguments&...) {                                              \
    twin::fault("unimplemented", #Name, Pipe, 0, "%s is known and not modelled", #Name);              \
  }
TWIN_UNMODELLED(asc_copy_gm2l0a, PIPE_MTE2)
TWIN_UNMODELLED(asc_copy_gm2l0b, PIPE_MTE2)
TWIN_UNMODELLED(asc_copy_l12fb, PIPE_MTE1)
TWIN_UNMODELLED(asc_copy_l12l0b_sparse, PIPE_MTE1)
TWIN_UNMODELLED(asc_copy_l0c2l1, PIPE_FIX)
TWIN_UNMODELLED(asc_fill_l0a, PIPE_MTE1)
TWIN_UNMODELLED(asc_fill_l0b, PIPE_MTE1)
TWIN_UNMODELLED(asc_mmad_sparse, PIPE_M)
TWIN_UNMODELLED(asc_enable_hf32, PIPE_S)
TWIN_UNMODELLED(asc_enable_hif8, PIPE_S)
TWIN_UNMODELLED(asc_set_l0c_copy_config, PIPE_S)
TWIN_UNMODELLED(asc_set_l0c_copy_relu_alpha, PIPE_S)
TWIN_UNMODELLED(asc_set_l0c_copy_lrelu_alpha, PIPE_S)
#undef TWIN_UNMODELLED
