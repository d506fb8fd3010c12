// CUDA, NVSHMEM and the signal kernels, as far as the exchanges use them, on ordinary memory: every rank is a process,
// the pools lie in memory that they share, streams carry out at once what they are given, and a graph capture keeps it
// for later. It makes the order of an exchange testable without a GPU; it says nothing about speed or memory ordering.
#pragma once

#include <sched.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <vector>

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/nvshmem.hpp"
#include "runtime/signals.hpp"
#include "transfer/sm.hpp"
#include "transfer/tma.hpp"

namespace fake {

inline char* pools = nullptr;  // of all ranks, one after the other
inline int64_t pool_bytes = 0;
inline int rank = 0;
inline int allocations = 0;
inline bool capturing = false;
inline std::vector<std::function<void()>> graph;

inline void run(std::function<void()> work) {
  if (capturing)
    graph.push_back(std::move(work));
  else
    work();
}

inline void replay() {
  for (auto& work : graph) work();
}

inline void share_pools(int world, int64_t bytes) {
  pool_bytes = bytes;
  void* memory = mmap(nullptr, world * bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  fast_cp::require(memory != MAP_FAILED, "no shared memory");
  pools = static_cast<char*>(memory);
}

inline void copy_rows(char* dst, int64_t dst_pitch, const char* src, int64_t src_pitch, int64_t bytes, int64_t rows) {
  for (int64_t row = 0; row < rows; ++row) std::memcpy(dst + row * dst_pitch, src + row * src_pitch, bytes);
}

}  // namespace fake

cudaError_t cudaGetDeviceCount(int* count) { return *count = 8, cudaSuccess; }
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaFree(void*) { return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int* access, int, int) { return *access = 1, cudaSuccess; }
cudaError_t cudaDeviceGetP2PAttribute(int* value, cudaDeviceP2PAttr, int, int) { return *value = 1, cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaMemset(void*, int, size_t) { return cudaSuccess; }  // shared memory is zero, and a peer may be writing
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, cudaSuccess; }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) { return *stream = nullptr, cudaSuccess; }
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) { return *event = nullptr, cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned) { return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  fake::run([=] { std::memcpy(dst, src, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t bytes, size_t rows,
                              cudaMemcpyKind, cudaStream_t) {
  fake::run([=] {
    fake::copy_rows(static_cast<char*>(dst), dst_pitch, static_cast<const char*>(src), src_pitch, bytes, rows);
  });
  return cudaSuccess;
}

namespace fast_cp {

void cuda_check(cudaError_t status, const char* doing) { require(status == cudaSuccess, doing, " failed"); }
cudaStream_t current_stream(int) { return nullptr; }
bool is_capturing(cudaStream_t) { return fake::capturing; }
DeviceGuard::DeviceGuard(int) {}
DeviceGuard::~DeviceGuard() = default;

namespace nvshmem {
void start(const std::string&, int rank, int, int64_t) { fake::rank = rank, fake::allocations = 0; }
void* allocate(size_t) {
  static char barrier;
  return fake::allocations++ == 0 ? fake::pools + fake::rank * fake::pool_bytes : &barrier;
}
void release(void*) {}
void* peer_address(void*, int peer) { return fake::pools + peer * fake::pool_bytes; }
void stop() {}
}  // namespace nvshmem

// Both kernels take any list of pitched copies, flattened as the real ones do it.
inline void enqueue_rows(const CopyList& copies) {
  for (const DeviceCopy& given : copies) {
    const DeviceCopy c = flattened(given);
    for (int64_t b = 0; b < c.batches; ++b) {
      fake::run([=] {
        fake::copy_rows(c.dst + b * c.dst_batch, c.dst_pitch, c.src + b * c.src_batch, c.src_pitch, c.row_bytes,
                        c.rows);
      });
    }
  }
}
void sm::prepare() {}
void sm::enqueue(const CopyList& copies, cudaStream_t) { enqueue_rows(copies); }
void tma::prepare() {}
void tma::enqueue(const CopyList& copies, cudaStream_t) { enqueue_rows(copies); }

Signals::Signals(Heap& heap, int rank, int world, int64_t timeout_ms)
    : heap_(heap),
      rank_(rank),
      world_(world),
      limit_ns_(timeout_ms * 1000000),
      epochs_(new uint64_t[kMaxSlots + 1]()),
      record_(new ErrorRecord()) {}
Signals::~Signals() { delete[] epochs_, delete record_; }
uint64_t* Signals::line(int rank, int slot, int line) const {
  return reinterpret_cast<uint64_t*>(
      heap_.at(rank, ((int64_t(slot) * (kMaxChunks + 1) + line) * kMaxWorld) * sizeof(uint64_t)));
}
void Signals::publish(int slot, int index, int peer, cudaStream_t) {
  fake::run([=] { __atomic_store_n(line(peer, slot, index) + rank_, epochs_[slot], __ATOMIC_RELEASE); });
}
void Signals::publish_arrival(int slot, int chunk, int peer, cudaStream_t s) { publish(slot, chunk, peer, s); }
void Signals::publish_consumed(int slot, int peer, cudaStream_t s) { publish(slot, kConsumedLine, peer, s); }

inline void await(const uint64_t* flag, uint64_t wanted, uint64_t limit_ns, ErrorRecord* record, ErrorRecord told) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < wanted && !record->ready) {
    sched_yield();
    if (std::chrono::steady_clock::now() < end) continue;
    told.ready = 1, told.wanted = wanted, told.seen = *flag, told.limit_ns = limit_ns;
    *record = told;
  }
}

void Signals::wait_arrival(int slot, int chunk, uint32_t mask, cudaStream_t) {
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || !(mask >> peer & 1u)) continue;
    fake::run([=] {
      await(line(rank_, slot, chunk) + peer, epochs_[slot], limit_ns_, record_, {0, peer, slot, chunk, 0, 0, 0});
    });
  }
}
void Signals::begin(int slot, uint32_t mask, cudaStream_t s) {
  wait_arrival(slot, kConsumedLine, mask, s);
  fake::run([=] { ++epochs_[slot]; });
}
void Signals::drain(const std::vector<int>& slots, cudaStream_t s) {
  for (int slot : slots) wait_arrival(slot, kConsumedLine, (1u << world_) - 1, s);
}
bool Signals::failed() const { return record_->ready != 0; }

}  // namespace fast_cp
