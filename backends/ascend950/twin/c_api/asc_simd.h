// The C API of Ascend 950 for SIMD kernels, under the name that kernels include.
#pragma once

#include "../qualifiers.h"
#include "../machine.h"
#include "../sync.h"
#include "../scalar.h"
#include "../copies.h"
#include "../vector.h"
#include "../cube.h"

// From here on these are functions of a kernel, not of the twin.
#undef __aicore__
#define __aicore__ TWIN_WATCHED
