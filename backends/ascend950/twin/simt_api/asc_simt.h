// The header that kernels include for SIMT functions.
#pragma once

#include "../qualifiers.h"

#include "../simt.h"
