#include "ops/checks.hpp"

#include <torch/csrc/stable/ops.h>

#include "fast_cp/error.hpp"
#include "runtime/ticket.hpp"

namespace fast_cp::ops {

using torch::headeronly::ScalarType;

int64_t element_bytes_of(ScalarType dtype, const std::string& name) {
  switch (dtype) {
    case ScalarType::Half:
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Float:
      return 4;
    default:
      fail(name, " has a dtype that Fast CP does not send; pass float16, bfloat16 or float32");
  }
}

View view_of(const Runtime& runtime, const Tensor& t, const std::string& name) {
  require(t.dim() == 4, name, " has ", t.dim(), " dimensions and (batch, tokens, heads, head_dim) was expected");
  const int device = runtime.settings.device;
  require(t.is_cuda() && t.get_device() == device, name, " lies on ",
          t.is_cuda() ? sentence("cuda:", t.get_device()) : "the CPU", " and the Fast CP runtime on cuda:", device,
          "; move it there");
  View v{};
  v.batch = t.size(0), v.rows = t.size(1), v.heads = t.size(2), v.head_dim = t.size(3);
  v.dtype = t.scalar_type();
  v.element_bytes = element_bytes_of(v.dtype, name);
  v.data = static_cast<const char*>(t.data_ptr());
  require(v.head_bytes() > 0 && v.head_bytes() % 16 == 0, name, " has heads of ", v.head_bytes(),
          " bytes and a multiple of 16 is needed; pad head_dim");
  require(v.head_dim == 1 || t.stride(3) == 1, name, " has stride ", t.stride(3),
          " in its last dimension and 1 is needed; pass a contiguous tensor");
  require(v.heads <= 1 || t.stride(2) == v.head_dim, name, " has stride ", t.stride(2), " between heads and ",
          v.head_dim, " is needed; pass a tensor whose last two dimensions are contiguous");
  const int64_t dense = v.heads * v.head_bytes();
  v.strides.row = v.rows > 1 ? t.stride(1) * v.element_bytes : dense;
  v.strides.batch = v.batch > 1 ? t.stride(0) * v.element_bytes : v.strides.row * v.rows;
  require((v.strides.row | v.strides.batch | reinterpret_cast<int64_t>(v.data)) % 16 == 0, name,
          " does not start or step by multiples of 16 bytes; pass a contiguous copy");
  require(v.rows <= 1 || v.strides.row >= dense, name, " has overlapping rows; pass a contiguous copy");
  return v;
}

void require_alike(const View& one, const View& other, const std::string& names) {
  require(one.dtype == other.dtype, names, " have different dtypes");
  require(one.batch == other.batch && one.rows == other.rows && one.head_dim == other.head_dim, names,
          " do not agree: (", one.batch, ", ", one.rows, ", heads, ", one.head_dim, ") and (", other.batch, ", ",
          other.rows, ", heads, ", other.head_dim, ")");
}

void add_source(Request& request, int role, const View& view, const Tensor& tensor) {
  request.roles |= 1u << role;
  request.sources[role] = view.data;
  request.strides[role] = view.strides;
  request.keep.push_back(std::make_shared<Tensor>(tensor));
}

namespace {

Tensor held_tensor(const Runtime& runtime, void* data, const Ints& sizes, const Ints& strides, ScalarType dtype) {
  using torch::headeronly::DeviceType;
  const torch::stable::Device device(DeviceType::CUDA, runtime.settings.device);
  return torch::stable::from_blob(data, sizes, strides, device, dtype);
}

}  // namespace

Tensor window_tensor(const Runtime& runtime, const OpenExchange& x, int role, const View& like) {
  WindowShape shape{0, 0, 0};
  if (x.request.roles >> role & 1u) shape = window_of(x.request.shape, runtime.settings.rank, role, x.request.text);
  const Ints sizes{shape.batch, shape.rows, shape.heads, like.head_dim};
  Ints strides(4, 1);
  for (int d = 2; d >= 0; --d) strides[d] = strides[d + 1] * std::max<int64_t>(sizes[d + 1], 1);
  void* data = x.windows[role] ? x.windows[role] : runtime.heap.at(runtime.settings.rank, 0);
  return held_tensor(runtime, data, sizes, strides, like.dtype);
}

Tensor ticket_tensor(Runtime& runtime, OpenExchange& x) {
  void* ticket = const_cast<Ticket*>(take_ticket(runtime, x));
  return held_tensor(runtime, ticket, {sizeof(Ticket) / sizeof(int64_t)}, {1}, ScalarType::Long);
}

}  // namespace fast_cp::ops
