// CUDA and NVSHMEM, as far as the exchanges use them, on ordinary memory: every rank is a process,
// the pools lie in memory that they share, streams carry out at once what they are given, and a graph capture keeps it
// for later. It makes the order of an exchange testable without a GPU; it says nothing about speed or memory ordering.
// It counts calls into CUDA, and notes what each stream has carried and which streams were put after which.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/nvshmem.hpp"
#include "transfer/sm.hpp"
#include "transfer/tma.hpp"

namespace fake {

inline char* pools = nullptr;  // of all ranks, one after the other
inline int64_t pool_bytes = 0;
inline int rank = 0;
inline int allocations = 0;
inline bool capturing = false;
inline bool silent = false;  // this rank never says that it has read
inline int calls = 0;        // into CUDA, launches included

struct Stream {
  int work = 0;    // pieces it has carried
  int joined = 0;  // of them, those that the caller's streams were put after
  bool callers = false;
  int after[2] = {0, 0};  // the work of the caller's streams that it comes after, by event
};
struct Event {
  Stream* stream = nullptr;
  int work = 0;
};
inline Stream callers[2] = {{0, 0, true, {}}, {0, 0, true, {}}};
inline int current = 0;                                // the caller's stream
inline std::vector<Stream*> side;                      // the library's streams
inline std::vector<std::pair<int, int>> put_in_order;  // of the caller's streams: the second was put after the first
inline int after_work = 0;                             // and after how much of its work, the last time

inline Stream* stream(cudaStream_t handle) { return reinterpret_cast<Stream*>(handle); }
inline Event* event(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }
inline void count(cudaStream_t on) { ++calls, ++stream(on)->work; }

// Whether the caller's streams come after all that side streams have carried.
inline bool all_joined() {
  for (const Stream* s : side) {
    if (s->joined < s->work) return false;
  }
  return true;
}
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
cudaError_t cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned, int) {
  fake::side.push_back(new fake::Stream());
  return *stream = reinterpret_cast<cudaStream_t>(fake::side.back()), cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return *event = reinterpret_cast<cudaEvent_t>(new fake::Event()), cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  ++fake::calls;
  *fake::event(event) = {fake::stream(stream), fake::stream(stream)->work};
  return cudaSuccess;
}
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  ++fake::calls;
  const fake::Event& e = *fake::event(event);
  if (!fake::stream(stream)->callers) {
    if (!e.stream->callers) return cudaSuccess;
    int& after = fake::stream(stream)->after[e.stream - fake::callers];
    return after = std::max(after, e.work), cudaSuccess;
  }
  e.stream->joined = std::max(e.stream->joined, e.work);
  if (!e.stream->callers) return cudaSuccess;
  fake::put_in_order.push_back({int(e.stream - fake::callers), int(fake::stream(stream) - fake::callers)});
  fake::after_work = e.work;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind, cudaStream_t stream) {
  fake::count(stream);
  fake::run([=] { std::memcpy(dst, src, bytes); });
  return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void* dst, size_t dst_pitch, const void* src, size_t src_pitch, size_t bytes, size_t rows,
                              cudaMemcpyKind, cudaStream_t stream) {
  fake::count(stream);
  fake::run([=] {
    fake::copy_rows(static_cast<char*>(dst), dst_pitch, static_cast<const char*>(src), src_pitch, bytes, rows);
  });
  return cudaSuccess;
}

namespace fast_cp {

void cuda_check(cudaError_t status, const char* doing) { require(status == cudaSuccess, doing, " failed"); }
cudaStream_t current_stream(int) { return reinterpret_cast<cudaStream_t>(&fake::callers[fake::current]); }
bool is_capturing(cudaStream_t) { return ++fake::calls, fake::capturing; }
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
void sm::enqueue(const CopyList& copies, cudaStream_t stream) { fake::count(stream), enqueue_rows(copies); }
void tma::prepare() {}
void tma::enqueue(const CopyList& copies, cudaStream_t stream) { fake::count(stream), enqueue_rows(copies); }

}  // namespace fast_cp
