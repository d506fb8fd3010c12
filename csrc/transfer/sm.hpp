// Copies by 16-byte loads and stores of a few blocks: all tensors and peers of a list in one launch.
#pragma once

#include "transfer/transfer.hpp"

namespace fast_cp::sm {

constexpr int kBlocks = 64;

// Once per device, before the first enqueue.
void prepare();

void enqueue(const CopyList& copies, cudaStream_t stream);

}  // namespace fast_cp::sm
