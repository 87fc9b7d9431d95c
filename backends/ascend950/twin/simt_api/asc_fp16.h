// The header that kernels include for fp16 in SIMT functions.
#pragma once

#include "../qualifiers.h"

#include "../simt_scalars.h"
