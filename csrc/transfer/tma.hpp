// Bulk copies through shared memory (cp.async.bulk, SM90 and newer): few registers, one warp per block.
#pragma once

#include "transfer/transfer.hpp"

namespace fast_cp::tma {

constexpr int kBlocks = 64;

// Once per device, before the first enqueue.
void prepare();

void enqueue(const CopyList& copies, cudaStream_t stream);

}  // namespace fast_cp::tma
