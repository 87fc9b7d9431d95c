// SIMT functions: threads, what they tell one another, and scalar functions that they call.
#pragma once

#include "simt_exchange.h"
#include "simt_scalars.h"
