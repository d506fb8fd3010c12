// Text arguments of operators.
#pragma once

#include <torch/csrc/stable/library.h>

#include <string>

namespace fast_cp::ops {

// An operator's argument of schema type str. Taking std::string instead would lose memory at every call: torch's own
// conversion (2.10 to 2.15) copies the text from a string on the heap that nobody deletes.
struct Text : std::string {
  using std::string::string;
};

}  // namespace fast_cp::ops

template <>
struct torch::stable::detail::ToImpl<fast_cp::ops::Text> {
  // Takes over the handle in `value`.
  static fast_cp::ops::Text call(StableIValue value, uint64_t, bool) {
    const StringHandle handle = to<StringHandle>(value);
    const char* data = nullptr;
    size_t length = 0;
    TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
    TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &data));
    fast_cp::ops::Text text(data, length);
    TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
    return text;
  }
};
