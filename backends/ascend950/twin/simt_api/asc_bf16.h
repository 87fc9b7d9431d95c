// The header that kernels include for bf16 in SIMT functions.
#pragma once

#include "../qualifiers.h"

#include "../simt_scalars.h"
