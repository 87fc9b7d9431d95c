// The functions that make up `_kernels`, one per file of row kernels.
#pragma once

#include <pybind11/pybind11.h>

#include "common.hpp"

namespace py = pybind11;

void bind_sampling(py::module_& m);

namespace deepinfer::cpu {

void bind_norm(py::module_& m);
void bind_gemm(py::module_& m);
void bind_cache(py::module_& m);
void bind_attention(py::module_& m);
void bind_scores(py::module_& m);
void bind_select(py::module_& m);
void bind_compress(py::module_& m);
void bind_mhc(py::module_& m);
void bind_engram(py::module_& m);
void bind_moe(py::module_& m);
void bind_heads(py::module_& m);
void bind_step(py::module_& m);

}  // namespace deepinfer::cpu
