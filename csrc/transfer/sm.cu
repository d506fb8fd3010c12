#include "transfer/launch.hpp"
#include "transfer/sm.hpp"

namespace fast_cp::sm {

namespace {

constexpr int kThreads = 512;
constexpr int kUnroll = 4;
constexpr int kTile = kThreads * kUnroll;  // vectors

struct Place {
  int64_t src, dst;
};

// Where vector `index` of a copy lies. Counts fit 32 bits (checked before launching), which keeps the divisions cheap.
__device__ __forceinline__ Place place_of(const DeviceCopy& copy, uint32_t index) {
  const uint32_t row_vectors = uint32_t(copy.row_bytes / kVector), rows = uint32_t(copy.rows);
  const uint32_t line = index / row_vectors, column = index - line * row_vectors;
  const uint32_t batch = line / rows, row = line - batch * rows;
  const int64_t offset = int64_t(column) * kVector;
  return {batch * copy.src_batch + row * copy.src_pitch + offset,
          batch * copy.dst_batch + row * copy.dst_pitch + offset};
}

__device__ __forceinline__ void copy_tile(const DeviceCopy& copy, uint32_t first, uint32_t vectors) {
  uint4 values[kUnroll];
  int64_t targets[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const uint32_t index = first + i * kThreads + threadIdx.x;
    if (index >= vectors) break;
    const Place place = place_of(copy, index);
    values[i] = *reinterpret_cast<const uint4*>(copy.src + place.src);
    targets[i] = place.dst;
  }
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    const uint32_t index = first + i * kThreads + threadIdx.x;
    if (index < vectors) *reinterpret_cast<uint4*>(copy.dst + targets[i]) = values[i];
  }
}

__global__ void __launch_bounds__(kThreads) copy_kernel(const __grid_constant__ TiledCopies copies) {
  int item = 0;
  for (int64_t tile = blockIdx.x; tile < copies.tiles; tile += gridDim.x) {
    const TiledCopy& tiled = item_of(copies, tile, item);
    const DeviceCopy& copy = tiled.copy;
    const uint32_t vectors = uint32_t(copy.row_bytes / kVector * copy.rows * copy.batches);
    copy_tile(copy, uint32_t(tile - tiled.first_tile) * kTile, vectors);
  }
  __threadfence_system();  // before the copy engine announces the arrival
}

}  // namespace

void prepare() { preload(copy_kernel); }

void enqueue(const CopyList& copies, cudaStream_t stream) {
  const auto tiles_of = [](const DeviceCopy& copy) {
    const int64_t vectors = copy.row_bytes / kVector * copy.rows * copy.batches;
    require(vectors < (int64_t{1} << 32) - kTile, "one copy of ", vectors * kVector,
            " bytes is too large for transfer sm; use transfer ce");
    return (vectors + kTile - 1) / kTile;
  };
  launch_tiled(copies, kBlocks, tiles_of, [&](const TiledCopies& tiled, int blocks) {
    copy_kernel<<<blocks, kThreads, 0, stream>>>(tiled);
    cuda_check(cudaGetLastError(), "launching a copy by SM");
  });
}

}  // namespace fast_cp::sm
