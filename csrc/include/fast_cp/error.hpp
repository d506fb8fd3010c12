// Errors are one sentence: what was asked, what was found, what to do.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace fast_cp {

template <typename... Parts>
std::string sentence(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::runtime_error(sentence(parts...));
}

template <typename... Parts>
void require(bool ok, const Parts&... parts) {
  if (!ok) fail(parts...);
}

}  // namespace fast_cp
