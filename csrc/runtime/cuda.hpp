// The doors to the CUDA runtime (linked statically) and to torch's notion of the current stream.
#pragma once

#include <cuda_runtime.h>

#include <string>

namespace fast_cp {

// Throws a sentence that names what was being done, what CUDA answered, and what to do about it.
void cuda_check(cudaError_t status, const char* doing);

// CUDA's answer in words, with a hint where one is known.
std::string cuda_problem(cudaError_t status);

// Loads a kernel before its first launch: with lazy loading that launch might wait for a kernel that waits for a peer.
template <typename Kernel>
void preload(Kernel* kernel) {
  cudaFuncAttributes attributes;
  cuda_check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
             "loading the kernels of this library");
}

// The stream that torch runs its kernels on. Looked up in libtorch_cuda when first asked for, so that this library also
// loads where torch was built without CUDA.
cudaStream_t current_stream(int device);

bool is_capturing(cudaStream_t stream);

// Makes `device` current and puts the former one back at the end.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = -1;
};

}  // namespace fast_cp
