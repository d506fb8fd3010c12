#include "transfer/copy_engine.hpp"

#include "runtime/cuda.hpp"

namespace fast_cp::copy_engine {

void enqueue(const CopyList& copies, cudaStream_t stream) {
  constexpr const char* kDoing = "copying to a peer by copy engine";
  for (const DeviceCopy& given : copies) {
    const DeviceCopy copy = flattened(given);
    for (int64_t batch = 0; batch < copy.batches; ++batch) {
      const char* src = copy.src + batch * copy.src_batch;
      char* dst = copy.dst + batch * copy.dst_batch;
      if (copy.rows == 1) {
        cuda_check(cudaMemcpyAsync(dst, src, copy.row_bytes, cudaMemcpyDeviceToDevice, stream), kDoing);
      } else {
        cuda_check(cudaMemcpy2DAsync(dst, copy.dst_pitch, src, copy.src_pitch, copy.row_bytes, copy.rows,
                                     cudaMemcpyDeviceToDevice, stream),
                   kDoing);
      }
    }
  }
}

}  // namespace fast_cp::copy_engine
