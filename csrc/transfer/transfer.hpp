// What the three ways to move bytes have in common: a list of pitched copies between device addresses.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace fast_cp {

struct DeviceCopy {
  const char* src;
  char* dst;
  int64_t src_pitch, dst_pitch;  // bytes from row to row
  int64_t row_bytes, rows;
  int64_t src_batch, dst_batch;  // bytes from batch to batch
  int64_t batches;
};
using CopyList = std::vector<DeviceCopy>;

enum class Transfer { kCopyEngine, kSm, kTma };

// "ce", "sm" or "tma"; throws a sentence for anything else.
Transfer transfer_named(const std::string& name);

// The same copy in as few dimensions as possible: contiguous rows become one, and contiguous batches too.
inline DeviceCopy flattened(DeviceCopy copy) {
  if (copy.src_pitch == copy.row_bytes && copy.dst_pitch == copy.row_bytes) copy.row_bytes *= copy.rows, copy.rows = 1;
  if (copy.rows > 1 || copy.batches == 1) return copy;
  copy.rows = copy.batches, copy.batches = 1;
  copy.src_pitch = copy.src_batch, copy.dst_pitch = copy.dst_batch;
  if (copy.src_pitch == copy.row_bytes && copy.dst_pitch == copy.row_bytes) copy.row_bytes *= copy.rows, copy.rows = 1;
  return copy;
}

}  // namespace fast_cp
