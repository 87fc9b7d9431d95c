// The vector core's register intrinsics, all of them.
#pragma once

#include "vector_arith.h"
#include "vector_call.h"
#include "vector_convert_names.h"
#include "vector_layout.h"
#include "vector_load.h"
#include "vector_logic.h"
#include "vector_mask.h"
#include "vector_reduce.h"
#include "vector_store.h"
#include "vector_unalign.h"
