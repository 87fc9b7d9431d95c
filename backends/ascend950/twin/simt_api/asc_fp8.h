// The header that kernels include for fp8 in SIMT functions.
#pragma once

#include "../qualifiers.h"

#include "../simt_scalars.h"
