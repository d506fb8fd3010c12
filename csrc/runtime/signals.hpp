// Arrivals and their opposite. Every slot (one generation of one window) counts its uses in device memory; a use is
// announced by copying that count to the peer with the copy engine, on the stream that carried the payload, so no
// announcement waits for an SM. A rank waits with a kernel of one warp, one lane per peer, that gives up after a limit.
// Counting on the device makes a captured CUDA graph right when it is replayed.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/heap.hpp"

namespace fast_cp {

constexpr int kMaxWorld = 8;
constexpr int kMaxSlots = 128;
constexpr int kMaxChunks = 32;
constexpr int kBenchmarkSlot = kMaxSlots;  // a slot beyond the windows', for measuring round trips
constexpr int kConsumedLine = kMaxChunks;  // the line of a slot on which readers say that they are done
constexpr int64_t kSignalBytes = int64_t(kMaxSlots + 1) * (kMaxChunks + 1) * kMaxWorld * sizeof(uint64_t);

// Where a line of a slot begins in a rank's page of signals, in counts; the count of each peer lies there.
__host__ __device__ constexpr int64_t signal_index(int slot, int line) {
  return (int64_t(slot) * (kMaxChunks + 1) + line) * kMaxWorld;
}

// In pinned host memory, written once by the first wait that gave up.
struct ErrorRecord {
  uint32_t ready;
  int32_t peer, slot, line;
  uint64_t wanted, seen, limit_ns;
};

class Signals {
 public:
  Signals(Heap& heap, int rank, int world, int64_t timeout_ms);
  ~Signals();
  Signals(const Signals&) = delete;
  Signals& operator=(const Signals&) = delete;

  // Tells the peers in `mask` that this rank has read the former uses of `slot` and of `sibling`, the slot of the same
  // tag's other generation; waits until they have said the same of `slot`; counts a new use of it. All earlier uses of
  // the tag must come before it on `stream`.
  //
  // So nothing is to be said at the end of a use, and the host keeps no account: what is told are the device's counts,
  // which are right for calls and for replays of graphs, in any mixture. A peer learns of the end of use n at this
  // rank's begin of use n + 1 at the latest. With two generations a begin of use n waits for uses up to n - 2, of which
  // every peer tells at its begin of use n - 1, before its copies of that use, for which this rank has waited: so they
  // are known by then. With one generation begin waits for begin. Neither can lock: a begin tells before it waits, so
  // it needs no more of a peer than to arrive there, and on the way there a peer waits only for what this rank has done
  // before its own begin, since all make the same calls in the same order.
  void begin(int slot, int sibling, uint32_t mask, cudaStream_t stream);
  // Announces to `peer` that everything before it on `stream` has arrived there.
  void publish_arrival(int slot, int chunk, int peer, cudaStream_t stream);
  void wait_arrival(int slot, int chunk, uint32_t mask, cudaStream_t stream);
  // Tells all peers that this rank has read the last use of every one of `slots`, and waits until they have said so.
  void drain(const std::vector<int>& slots, cudaStream_t stream);
  // Ping-pong with `peer`, `count` times, by one kernel; the lower rank begins.
  void round_trips(int peer, int count, cudaStream_t stream);

  // What the first wait that gave up has recorded. Reads host memory only.
  bool failed() const;
  ErrorRecord error() const { return *record_; }
  int64_t timeout_ms() const { return int64_t(limit_ns_ / 1000000); }

 private:
  uint64_t* line(int rank, int slot, int line) const;

  Heap& heap_;
  int rank_, world_;
  uint64_t limit_ns_;
  uint64_t* epochs_ = nullptr;   // device memory: one count per slot
  unsigned* stopped_ = nullptr;  // device memory: set by the first wait that gives up; later ones do not wait
  ErrorRecord* record_ = nullptr;
  ErrorRecord* record_on_device_ = nullptr;
};

}  // namespace fast_cp
