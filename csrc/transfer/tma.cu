#include "transfer/launch.hpp"
#include "transfer/tma.hpp"

namespace fast_cp::tma {

namespace {

constexpr int kStages = 4;
constexpr int kStageBytes = 16 * 1024;
constexpr int kSharedBytes = kStages * kStageBytes;

// One tile: `rows` pieces of `bytes`, either whole short rows or one part of a long row.
struct Piece {
  const char* src;
  char* dst;
  int64_t src_pitch, dst_pitch;
  uint32_t bytes, rows;
};

__host__ __device__ __forceinline__ int64_t rows_per_tile(const DeviceCopy& c) {
  return c.row_bytes >= kStageBytes ? 1 : kStageBytes / c.row_bytes;
}
__host__ __device__ __forceinline__ int64_t parts_per_row(const DeviceCopy& c) {
  return (c.row_bytes + kStageBytes - 1) / kStageBytes;
}
__host__ __device__ __forceinline__ int64_t tiles_per_batch(const DeviceCopy& c) {
  const int64_t rows = rows_per_tile(c);
  return (c.rows + rows - 1) / rows * parts_per_row(c);
}

__device__ __forceinline__ Piece piece_of(const DeviceCopy& c, int64_t tile) {
  const int64_t per_batch = tiles_per_batch(c), parts = parts_per_row(c);
  const int64_t batch = tile / per_batch, rest = tile - batch * per_batch;
  const int64_t part = rest % parts, row = rest / parts * rows_per_tile(c);
  const int64_t begin = part * kStageBytes;
  Piece piece;
  piece.src = c.src + batch * c.src_batch + row * c.src_pitch + begin;
  piece.dst = c.dst + batch * c.dst_batch + row * c.dst_pitch + begin;
  piece.src_pitch = c.src_pitch, piece.dst_pitch = c.dst_pitch;
  piece.bytes = uint32_t(min(c.row_bytes - begin, int64_t{kStageBytes}));
  piece.rows = uint32_t(min(c.rows - row, rows_per_tile(c)));
  return piece;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void init_barrier(uint32_t barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_phase(uint32_t barrier, uint32_t parity) {
  uint32_t done = 0;
  while (!done) {
    asm volatile("{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

__device__ __forceinline__ void load(uint32_t shared, const char* src, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(src), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void store(char* dst, uint32_t shared, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(shared), "r"(bytes)
               : "memory");
}

// The lanes of the warp share the rows of a piece. Bulk groups belong to a lane, so every lane commits one per tile.
__device__ __forceinline__ void load_piece(const Piece& piece, uint32_t stage, uint32_t barrier) {
  if (threadIdx.x == 0) expect_bytes(barrier, piece.bytes * piece.rows);
  __syncwarp();
  for (uint32_t row = threadIdx.x; row < piece.rows; row += 32) {
    load(stage + row * piece.bytes, piece.src + row * piece.src_pitch, piece.bytes, barrier);
  }
}

__device__ __forceinline__ void store_piece(const Piece& piece, uint32_t stage) {
  for (uint32_t row = threadIdx.x; row < piece.rows; row += 32) {
    store(piece.dst + row * piece.dst_pitch, stage + row * piece.bytes, piece.bytes);
  }
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

__global__ void __launch_bounds__(32) copy_kernel(const __grid_constant__ TiledCopies copies) {
  extern __shared__ __align__(128) unsigned char buffer[];
  __shared__ __align__(8) uint64_t barriers[kStages];
  const uint32_t first_stage = shared_address(buffer), first_barrier = shared_address(barriers);
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; ++stage) init_barrier(first_barrier + 8 * stage);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  }
  __syncwarp();
  const int64_t count = (copies.tiles - blockIdx.x + gridDim.x - 1) / gridDim.x;
  int load_item = 0, store_item = 0;
  const auto piece_at = [&](int64_t i, int& item) {
    const int64_t tile = blockIdx.x + i * gridDim.x;
    const TiledCopy& tiled = item_of(copies, tile, item);
    return piece_of(tiled.copy, tile - tiled.first_tile);
  };
  const auto load_tile = [&](int64_t i) {
    const int stage = int(i % kStages);
    load_piece(piece_at(i, load_item), first_stage + stage * kStageBytes, first_barrier + 8 * stage);
  };
  for (int64_t i = 0; i < min(count, int64_t{kStages - 1}); ++i) load_tile(i);
  for (int64_t i = 0; i < count; ++i) {
    const int stage = int(i % kStages);
    wait_phase(first_barrier + 8 * stage, uint32_t(i / kStages) & 1u);
    store_piece(piece_at(i, store_item), first_stage + stage * kStageBytes);
    if (i + kStages - 1 < count) {
      // The next load reuses the stage of the store before this one: that store must have read it.
      asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
      __syncwarp();
      load_tile(i + kStages - 1);
    }
  }
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  __threadfence_system();  // before the copy engine announces the arrival
}

}  // namespace

void prepare() {
  preload(copy_kernel);
  cuda_check(cudaFuncSetAttribute(copy_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
             "preparing copies by TMA");
}

void enqueue(const CopyList& copies, cudaStream_t stream) {
  const auto tiles_of = [](const DeviceCopy& copy) { return tiles_per_batch(copy) * copy.batches; };
  launch_tiled(copies, kBlocks, tiles_of, [&](const TiledCopies& tiled, int blocks) {
    copy_kernel<<<blocks, 32, kSharedBytes, stream>>>(tiled);
    cuda_check(cudaGetLastError(), "launching a copy by TMA");
  });
}

}  // namespace fast_cp::tma
