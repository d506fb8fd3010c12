// The copy list as the SM and TMA kernels take it: by value, in the kernel's parameters, split into tiles.
#pragma once

#include <algorithm>

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "transfer/transfer.hpp"

namespace fast_cp {

constexpr int kCopiesPerLaunch = 32;
constexpr int kVector = 16;  // bytes

struct TiledCopy {
  DeviceCopy copy;
  int64_t first_tile;  // of the launch
};

struct TiledCopies {
  int count = 0;
  int64_t tiles = 0;
  TiledCopy items[kCopiesPerLaunch];
};

inline bool vector_aligned(const DeviceCopy& c) {
  const int64_t all = reinterpret_cast<int64_t>(c.src) | reinterpret_cast<int64_t>(c.dst) | c.src_pitch | c.dst_pitch |
                      c.row_bytes | c.src_batch | c.dst_batch;
  return all % kVector == 0;
}

// The item that `tile` belongs to. Tiles of one block only grow, so the search goes on from the last answer.
__device__ __forceinline__ const TiledCopy& item_of(const TiledCopies& copies, int64_t tile, int& item) {
  while (item + 1 < copies.count && copies.items[item + 1].first_tile <= tile) ++item;
  return copies.items[item];
}

// Calls `launch(copies, blocks)` for up to kCopiesPerLaunch copies at a time. `tiles_of` counts the tiles of one copy.
template <typename TilesOf, typename Launch>
void launch_tiled(const CopyList& list, int max_blocks, TilesOf tiles_of, Launch launch) {
  TiledCopies copies;
  const auto flush = [&] {
    if (copies.count > 0) launch(copies, int(std::min<int64_t>(copies.tiles, max_blocks)));
    copies.count = 0, copies.tiles = 0;
  };
  for (const DeviceCopy& given : list) {
    const DeviceCopy copy = flattened(given);
    require(
        vector_aligned(copy),
        "a transfer by SM or TMA needs addresses, rows and strides that are multiples of 16 bytes; use transfer ce");
    copies.items[copies.count++] = {copy, copies.tiles};
    copies.tiles += tiles_of(copy);
    if (copies.count == kCopiesPerLaunch) flush();
  }
  flush();
}

}  // namespace fast_cp
