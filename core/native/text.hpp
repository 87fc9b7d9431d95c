// Error messages from parts; std::format is not in every C++20 library that builds this module.
#pragma once

#include <sstream>
#include <string>

namespace deepinfer {

template <typename... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  return out.str();
}

}  // namespace deepinfer
