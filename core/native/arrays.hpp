// NumPy arrays as spans: int32 and C-contiguous or refused by name, never converted behind the caller's back.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <stdexcept>
#include <string>

#include "step_writer.hpp"
#include "text.hpp"

namespace deepinfer {

namespace py = pybind11;

inline std::string shape_of(const py::array& array) {
  return py::str(array.attr("shape")).cast<std::string>();
}

inline void require_int32(const char* name, const py::array& array, py::ssize_t num_dims) {
  if (array.ndim() != num_dims || !py::array_t<int32_t, py::array::c_style>::check_(array)) {
    const auto dtype = py::str(array.dtype()).cast<std::string>();
    throw std::invalid_argument(text(name, " has shape ", shape_of(array), " and dtype ", dtype,
                                     "; need a C-contiguous int32 array of ", num_dims,
                                     num_dims == 1 ? " dimension" : " dimensions"));
  }
}

inline std::span<const int32_t> input_vector(const char* name, const py::array& array) {
  require_int32(name, array, 1);
  return {static_cast<const int32_t*>(array.data()), static_cast<size_t>(array.size())};
}

inline int32_t* writable_data(const char* name, const py::array& array, py::ssize_t num_dims) {
  require_int32(name, array, num_dims);
  if (!array.writeable()) throw std::invalid_argument(text(name, " is read-only"));
  return static_cast<int32_t*>(const_cast<void*>(array.data()));
}

inline Vector output_vector(const char* name, const py::array& array) {
  return {name, writable_data(name, array, 1), array.shape(0)};
}

inline Table output_table(const char* name, const py::array& array) {
  return {name, writable_data(name, array, 2), array.shape(0), array.shape(1)};
}

inline py::array_t<int32_t> copy_out(std::span<const int32_t> values) {
  return py::array_t<int32_t>(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace deepinfer
