#include "runtime/cuda.hpp"

#include <dlfcn.h>

#include "fast_cp/error.hpp"

namespace fast_cp {

namespace {

const char* hint_for(cudaError_t status) {
  int driver = 0;
  switch (status) {
    case cudaErrorInsufficientDriver:
      if (cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0)
        return "; no NVIDIA driver is loaded here: run on a machine with a GPU";
      return "; the driver is older than the CUDA 13 runtime in this library: update it to 580 or newer";
    case cudaErrorNoDevice:
      return "; no GPU is visible here: look at nvidia-smi and CUDA_VISIBLE_DEVICES";
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
      return "; this library has no image for this GPU (its images: " FAST_CP_IMAGES
             "): rebuild with --architectures for this GPU";
    case cudaErrorMemoryAllocation:
      return "; free GPU memory, or pass a smaller pool_bytes to init_fast_cp";
    case cudaErrorStreamCaptureIsolation:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureUnjoined:
      return "; finish exchanges that began before the graph capture, and call done for those inside it";
    default:
      return "";
  }
}

using CurrentStream = int32_t (*)(int32_t device, void** stream);

CurrentStream find_current_stream() {
  void* library = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  require(
      library,
      "the current CUDA stream was asked for, and this torch was built without CUDA; install a CUDA build of torch");
  void* function = dlsym(library, "aoti_torch_get_current_cuda_stream");
  require(function, "this torch has no aoti_torch_get_current_cuda_stream; Fast CP needs torch 2.10 or newer");
  return reinterpret_cast<CurrentStream>(function);
}

}  // namespace

std::string cuda_problem(cudaError_t status) {
  return sentence(cudaGetErrorString(status), " (", cudaGetErrorName(status), ")", hint_for(status));
}

void cuda_check(cudaError_t status, const char* doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // it is reported here; leave nothing for an innocent later call
  fail(doing, " failed: ", cuda_problem(status));
}

cudaStream_t current_stream(int device) {
  static const CurrentStream function = find_current_stream();
  void* stream = nullptr;
  require(function(device, &stream) == 0, "torch did not tell its current CUDA stream of device ", device);
  return static_cast<cudaStream_t>(stream);
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t answer = cudaStreamIsCapturing(stream, &status);
  if (answer == cudaErrorStreamCaptureImplicit) {  // the legacy stream, while another one is captured: it is not
    cudaGetLastError();
    return false;
  }
  cuda_check(answer, "asking whether a stream is being captured");
  return status == cudaStreamCaptureStatusActive;
}

DeviceGuard::DeviceGuard(int device) {
  int current = -1;
  cuda_check(cudaGetDevice(&current), "asking for the current device");
  if (current == device) return;
  cuda_check(cudaSetDevice(device), "making the device current");
  previous_ = current;
}

DeviceGuard::~DeviceGuard() {
  if (previous_ >= 0) cudaSetDevice(previous_);
}

}  // namespace fast_cp
