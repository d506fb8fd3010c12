// Copies by the GPU's copy engines: no SM is used, and a running kernel is slowed least.
#pragma once

#include "transfer/transfer.hpp"

namespace fast_cp::copy_engine {

void enqueue(const CopyList& copies, cudaStream_t stream);

}  // namespace fast_cp::copy_engine
