#include <cstring>

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/signals.hpp"

namespace fast_cp {

namespace {

// What every waiting kernel needs to give up in an orderly way.
struct Limits {
  uint64_t limit_ns;
  unsigned* stopped;
  ErrorRecord* record;
};

__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ void store_relaxed(uint64_t* flag, uint64_t value) {
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}

__device__ void give_up(const Limits& limits, int peer, int slot, int line, uint64_t wanted, uint64_t seen) {
  if (atomicCAS(limits.stopped, 0u, 1u) != 0u) return;
  volatile ErrorRecord* record = limits.record;
  record->peer = peer, record->slot = slot, record->line = line;
  record->wanted = wanted, record->seen = seen, record->limit_ns = limits.limit_ns;
  __threadfence_system();
  record->ready = 1;
}

// True when `flag` reached `wanted`; false after the limit, or at once where another wait has given up before.
__device__ bool await(const uint64_t* flag, uint64_t wanted, const Limits& limits, int peer, int slot, int line) {
  uint64_t seen = load_acquire(flag);
  if (seen >= wanted) return true;
  const uint64_t start = nanoseconds();
  while (seen < wanted) {
    if (*reinterpret_cast<volatile unsigned*>(limits.stopped)) return false;
    if (nanoseconds() - start > limits.limit_ns) {
      give_up(limits, peer, slot, line, wanted, seen);
      return false;
    }
    seen = load_acquire(flag);
  }
  return true;
}

// The pages of signals of all ranks, as this rank reaches them.
struct Pages {
  uint64_t* of[kMaxWorld];
  int rank;
};

// After a fence: one for all that a thread tells. A release by each store would wait for the store before it to arrive.
__device__ __forceinline__ void tell_consumed(const Pages& pages, int peer, int slot, uint64_t count) {
  store_relaxed(pages.of[peer] + signal_index(slot, kConsumedLine) + pages.rank, count);
}

__device__ __forceinline__ bool await_consumed(const Pages& pages, int peer, int slot, uint64_t count,
                                               const Limits& limits) {
  const uint64_t* flag = pages.of[pages.rank] + signal_index(slot, kConsumedLine) + peer;
  return await(flag, count, limits, peer, slot, kConsumedLine);
}

// What begin does for a reader that waits by itself: whom it meets, and where it writes the ticket, if anywhere.
struct Meeting {
  uint32_t exchanged;
  Ticket* at;
  Ticket ticket;
};

// A thread per peer. All of them tell before any of them waits.
__global__ void begin_kernel(const __grid_constant__ Pages pages, uint64_t* epochs, uint32_t mask, int slot,
                             int sibling, Limits limits, const __grid_constant__ Meeting meeting) {
  const int peer = threadIdx.x;
  const uint64_t former = epochs[slot];
  const bool asked = mask >> peer & 1u, met = meeting.exchanged >> peer & 1u;
  if (asked || met) __threadfence_system();
  if (asked) {
    tell_consumed(pages, peer, slot, former);
    tell_consumed(pages, peer, sibling, epochs[sibling]);
  }
  if (met) store_relaxed(pages.of[peer] + signal_index(slot, kBegunLine) + pages.rank, former + 1);
  __syncwarp();
  if (asked) await_consumed(pages, peer, slot, former, limits);
  const uint64_t* begun = pages.of[pages.rank] + signal_index(slot, kBegunLine);
  if (met) await(begun + peer, former + 1, limits, peer, slot, kBegunLine);
  __syncwarp();
  if (peer != 0) return;
  epochs[slot] = former + 1;
  if (!meeting.at) return;
  *meeting.at = meeting.ticket;
  meeting.at->wanted = former + 1, meeting.at->began = nanoseconds();
}

// `reader`: the ticket of a kernel that may have given up where this wait ends too late, whatever has come by then.
__global__ void wait_kernel(const uint64_t* arrivals, const uint64_t* epoch, uint32_t mask, int slot, int first,
                            int count, const Ticket* reader, Limits limits) {
  const int peer = threadIdx.x;
  if (!(mask >> peer & 1u)) return;
  for (int i = 0; i < count; ++i) await(arrivals + i * kMaxWorld + peer, *epoch, limits, peer, slot, first + i);
  if (reader && nanoseconds() - reader->began > 2 * limits.limit_ns)
    give_up(limits, peer, slot, first, *epoch, load_acquire(arrivals + peer));
}

struct SlotSet {
  uint32_t bits[kMaxSlots / 32];
};

// A thread per slot. All of them tell before any of them waits: a peer that waits here for one slot tells of all.
__global__ void drain_kernel(const __grid_constant__ Pages pages, const uint64_t* epochs, SlotSet slots, int world,
                             Limits limits) {
  const int slot = threadIdx.x;
  const bool asked = slots.bits[slot / 32] >> (slot % 32) & 1u;
  __threadfence_system();
  for (int peer = 0; asked && peer < world; ++peer) {
    if (peer != pages.rank) tell_consumed(pages, peer, slot, epochs[slot]);
  }
  __syncthreads();
  for (int peer = 0; asked && peer < world; ++peer) {
    if (peer != pages.rank) await_consumed(pages, peer, slot, epochs[slot], limits);
  }
}

__global__ void round_trip_kernel(uint64_t* mine, uint64_t* theirs, uint64_t* epoch, bool first, int peer, int count,
                                  Limits limits) {
  uint64_t turn = *epoch;
  for (int i = 0; i < count; ++i) {
    ++turn;
    if (first) store_release(theirs, turn);
    if (!await(mine, turn, limits, peer, kBenchmarkSlot, 0)) break;
    if (!first) store_release(theirs, turn);
  }
  *epoch += count;
}

Pages pages_of(const Heap& heap, int rank, int world) {
  Pages pages{};
  for (int peer = 0; peer < world; ++peer) pages.of[peer] = reinterpret_cast<uint64_t*>(heap.at(peer, 0));
  pages.rank = rank;
  return pages;
}

void preload_kernels() {
  preload(begin_kernel), preload(wait_kernel), preload(drain_kernel), preload(round_trip_kernel);
}

}  // namespace

Signals::Signals(Heap& heap, int rank, int world, int64_t timeout_ms)
    : heap_(heap), rank_(rank), world_(world), limit_ns_(uint64_t(timeout_ms) * 1000000) {
  static_assert(kMaxSlots % 32 == 0 && kMaxWorld <= 32);
  preload_kernels();
  const size_t counts = (kMaxSlots + 1) * sizeof(uint64_t);
  cuda_check(cudaMalloc(&epochs_, counts + sizeof(unsigned)), "allocating the signals' counts");
  stopped_ = reinterpret_cast<unsigned*>(epochs_ + kMaxSlots + 1);
  cuda_check(cudaMemset(epochs_, 0, counts + sizeof(unsigned)), "zeroing the signals' counts");
  cuda_check(cudaMalloc(&tickets_, kMaxSlots * sizeof(Ticket)), "allocating the tickets");
  cuda_check(cudaMemset(tickets_, 0, kMaxSlots * sizeof(Ticket)), "zeroing the tickets");
  cuda_check(cudaHostAlloc(&record_, sizeof(ErrorRecord), cudaHostAllocMapped | cudaHostAllocPortable),
             "allocating the error record");
  std::memset(record_, 0, sizeof(ErrorRecord));
  void* mapped = nullptr;
  cuda_check(cudaHostGetDevicePointer(&mapped, record_, 0), "mapping the error record");
  record_on_device_ = static_cast<ErrorRecord*>(mapped);
  cuda_check(cudaDeviceSynchronize(), "zeroing the signals' counts");
}

Signals::~Signals() {
  cudaFree(epochs_);
  cudaFree(tickets_);
  cudaFreeHost(record_);
}

uint64_t* Signals::line(int rank, int slot, int line) const {
  return reinterpret_cast<uint64_t*>(heap_.at(rank, 0)) + signal_index(slot, line);
}

void Signals::begin(int slot, int sibling, uint32_t mask, const Reader* reader, cudaStream_t stream) {
  Meeting meeting{};
  if (reader) meeting = {reader->exchanged, tickets_ + slot, blank_ticket(slot, *reader)};
  begin_kernel<<<1, 32, 0, stream>>>(pages_of(heap_, rank_, world_), epochs_, mask & ~(1u << rank_), slot, sibling,
                                     Limits{limit_ns_, stopped_, record_on_device_}, meeting);
  cuda_check(cudaGetLastError(), "launching the start of an exchange");
}

void Signals::publish_arrival(int slot, int chunk, int peer, cudaStream_t stream) {
  uint64_t* flag = line(peer, slot, chunk) + rank_;
  cuda_check(cudaMemcpyAsync(flag, epochs_ + slot, sizeof(uint64_t), cudaMemcpyDeviceToDevice, stream),
             "sending a signal to a peer");
}

void Signals::wait_arrivals(int slot, int first, int count, uint32_t mask, cudaStream_t stream, bool beside_reader) {
  mask &= ~(1u << rank_);
  if (!mask) return;
  wait_kernel<<<1, 32, 0, stream>>>(line(rank_, slot, first), epochs_ + slot, mask, slot, first, count,
                                    beside_reader ? tickets_ + slot : nullptr,
                                    Limits{limit_ns_, stopped_, record_on_device_});
  cuda_check(cudaGetLastError(), "launching a wait for an arrival");
}

void Signals::drain(const std::vector<int>& slots, cudaStream_t stream) {
  SlotSet set{};
  for (int slot : slots) set.bits[slot / 32] |= 1u << (slot % 32);
  drain_kernel<<<1, kMaxSlots, 0, stream>>>(pages_of(heap_, rank_, world_), epochs_, set, world_,
                                            Limits{limit_ns_, stopped_, record_on_device_});
  cuda_check(cudaGetLastError(), "launching a wait for the readers of all windows");
}

void Signals::round_trips(int peer, int count, cudaStream_t stream) {
  round_trip_kernel<<<1, 1, 0, stream>>>(line(rank_, kBenchmarkSlot, 0) + peer, line(peer, kBenchmarkSlot, 0) + rank_,
                                         epochs_ + kBenchmarkSlot, rank_ < peer, peer, count,
                                         Limits{limit_ns_, stopped_, record_on_device_});
  cuda_check(cudaGetLastError(), "launching the round trips");
}

bool Signals::failed() const { return *const_cast<const volatile uint32_t*>(&record_->ready) != 0; }

}  // namespace fast_cp
