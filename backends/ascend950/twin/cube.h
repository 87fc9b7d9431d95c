// The Cube path of the C API: global memory to L1, L1 to L0A and L0B, products, and L0C to where results are wanted.
#pragma once

#include "cube_compute.h"
#include "cube_l1.h"
#include "cube_load.h"
#include "cube_store.h"
#include "cube_unmodelled.h"
#include "locks.h"
