// Tensors as the exchanges see them, after their checks; and the way back from windows to tensors.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <string>
#include <vector>

#include "runtime/cuda.hpp"
#include "runtime/runtime.hpp"

namespace fast_cp::ops {

using torch::stable::Tensor;
using Ints = std::vector<int64_t>;

// Holds the runtime's lock and makes its device current while an operator runs.
class Session {
 public:
  Session() : runtime(Runtime::get()), lock_(Runtime::mutex()), device_(runtime.settings.device) {}
  Runtime& runtime;

 private:
  std::lock_guard<std::mutex> lock_;
  DeviceGuard device_;
};

// A tensor (batch, rows, heads, head_dim) that copies can read: on the runtime's GPU, FP16, BF16 or FP32, its last two
// dimensions contiguous, heads and strides multiples of 16 bytes. Anything else throws a sentence.
struct View {
  const char* data;
  int64_t batch, rows, heads, head_dim, element_bytes;
  SourceStrides strides;
  torch::headeronly::ScalarType dtype;
  int64_t head_bytes() const { return head_dim * element_bytes; }
};
View view_of(const Runtime& runtime, const Tensor& tensor, const std::string& name);

// Throws unless both have the same dtype, batch, head dimension and rows.
void require_alike(const View& one, const View& other, const std::string& names);

void add_source(Request& request, int role, const View& view, const Tensor& tensor);

// The window of `role` of this rank's open exchange; (0, 0, 0, head_dim) for a role that does not travel.
Tensor window_tensor(const Runtime& runtime, const OpenExchange& exchange, int role, const View& like);

// The ticket of an open exchange whose chunks have been sent: 7 int64 on the device (runtime/signals.hpp).
Tensor ticket_tensor(Runtime& runtime, OpenExchange& exchange);

int64_t element_bytes_of(torch::headeronly::ScalarType dtype, const std::string& name);

}  // namespace fast_cp::ops
