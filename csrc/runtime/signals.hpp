// Arrivals and their opposite. Every slot (one generation of one window) counts its uses in device memory; a use is
// announced by copying that count to the peer with the copy engine, on the stream that carried the payload, so no
// announcement waits for an SM. A rank waits with a kernel of one warp, one lane per peer, that gives up after a limit.
// Counting on the device makes a captured CUDA graph right when it is replayed.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/heap.hpp"

namespace fast_cp {

constexpr int kMaxWorld = 8;
constexpr int kMaxSlots = 128;
constexpr int kMaxChunks = 32;
constexpr int kBenchmarkSlot = kMaxSlots;  // a slot beyond the windows', for measuring round trips
// Lines of a slot: one per chunk, on which arrivals are announced, and two more.
constexpr int kConsumedLine = kMaxChunks;   // readers say here that they are done
constexpr int kBegunLine = kMaxChunks + 1;  // peers say here that they have begun a use
constexpr int kLines = kMaxChunks + 2;
constexpr int64_t kSignalBytes = int64_t(kMaxSlots + 1) * kLines * kMaxWorld * sizeof(uint64_t);

// Where a line of a slot begins in a rank's page of signals, in counts; the count of each peer lies there.
__host__ __device__ constexpr int64_t signal_index(int slot, int line) {
  return (int64_t(slot) * kLines + line) * kMaxWorld;
}

// In pinned host memory, written once by the first wait that gave up.
struct ErrorRecord {
  uint32_t ready;
  int32_t peer, slot, line;
  uint64_t wanted, seen, limit_ns;
};
// What a kernel polls that reads the windows of one use and waits by itself; in device memory, one per slot, written by
// the start of the use. Chunk c of peer p has arrived when an acquire load (of the system) of the count at
// `arrivals + (c * kMaxWorld + p) * 8` finds `wanted` or more. The kernel polls those of `peers`; it goes on without
// them where `*stopped` is not 0, or after `limit_ns` of %globaltimer, and says nothing. That is more than twice as long
// as other waits have: the one beside it, which tells, ends it in time. Where that one could not run before (it needs an
// SM), it tells of every end that comes too late for the kernel to have waited for it, counted from `began`.
struct Ticket {
  uint64_t arrivals;   // address of this rank's line of chunk 0
  uint64_t wanted;     // the number of this use
  uint64_t limit_ns;
  uint64_t stopped;    // address of a uint32: set by the first wait that gives up; others do not wait any more
  uint32_t peers;      // a bit per peer that sends
  int32_t num_chunks;  // of equal weight: head groups of the window's heads, as copy_plan.hpp splits them
  int32_t wait_row;    // rows of the K and V windows from here on hold nothing of a peer
  int32_t kv_heads;    // of this rank's windows
  uint64_t began;      // when the use was started, by %globaltimer
};
static_assert(offsetof(Ticket, arrivals) == 0 && offsetof(Ticket, wanted) == 8 && offsetof(Ticket, limit_ns) == 16);
static_assert(offsetof(Ticket, stopped) == 24 && offsetof(Ticket, peers) == 32 && offsetof(Ticket, num_chunks) == 36);
static_assert(offsetof(Ticket, wait_row) == 40 && offsetof(Ticket, kv_heads) == 44 && sizeof(Ticket) == 56);

constexpr uint64_t kReadersGraceNs = 1000000000;

// What a start must know of a reader that waits by itself.
struct Reader {
  uint32_t exchanged = 0;  // peers of the exchange: all have begun the use before this rank's reader runs
  uint32_t peers = 0;      // see Ticket; so below
  int num_chunks = 0, wait_row = 0, kv_heads = 0;
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
  //
  // With a `reader` it also tells `exchanged` that this rank has begun the use, waits until they have said so, and
  // writes the slot's ticket. The reader may then spin on all SMs: what it waits for needs nothing of this rank any
  // more, since every peer's stream has come past this begin, and copies and announcements go by copy engine. (What SMs
  // copy, and what stays within the GPU, comes before the reader: see take_ticket.) So between the start and the last
  // send of such a use, no other kernel that spins may be launched on the rank's GPU.
  // That cannot lock either. All that a begin tells, it tells before its first wait, so the handshake needs no more of
  // a peer than to arrive at this begin of this use. Suppose that all stand still, and look at the wait that is first
  // in the order of calls, which is every rank's. A begin it cannot be: whoever has not told there stands at an earlier
  // one. A reader it cannot be: its peers have begun the use, and what they send was sent before the reader, in the
  // order of calls, so its sender stands at an earlier one. The generations do not matter, since the handshake is about
  // the use that begins, not about a former one; nor do graphs: the counts are the device's, and so replay meets call.
  // A peer that has begun use n - 1 has read use n - 2, in the order of its stream. So where each use of a tag has a
  // reader, uses are in turn even if a reader polls less than all chunks (a rank without tokens polls none).
  void begin(int slot, int sibling, uint32_t mask, const Reader* reader, cudaStream_t stream);
  // In device memory; what start has written there is valid until the slot's next use begins.
  const Ticket* ticket(int slot) const { return tickets_ + slot; }
  // Announces to `peer` that everything before it on `stream` has arrived there.
  void publish_arrival(int slot, int chunk, int peer, cudaStream_t stream);
  // Waits for `count` chunks from `first` on, from each peer in `mask`. `beside_reader`: beside a kernel that polls the
  // slot's ticket.
  void wait_arrivals(int slot, int first, int count, uint32_t mask, cudaStream_t stream, bool beside_reader = false);
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
  // All but the count, which the device knows.
  Ticket blank_ticket(int slot, const Reader& reader) const {
    const auto address = [](const void* pointer) { return uint64_t(reinterpret_cast<uintptr_t>(pointer)); };
    return {address(line(rank_, slot, 0)), 0, 2 * limit_ns_ + kReadersGraceNs, address(stopped_),
            reader.peers, reader.num_chunks, reader.wait_row, reader.kv_heads, 0};
  }

  Heap& heap_;
  int rank_, world_;
  uint64_t limit_ns_;
  uint64_t* epochs_ = nullptr;   // device memory: one count per slot
  unsigned* stopped_ = nullptr;  // device memory: set by the first wait that gives up; later ones do not wait
  Ticket* tickets_ = nullptr;    // device memory: one per slot
  ErrorRecord* record_ = nullptr;
  ErrorRecord* record_on_device_ = nullptr;
};

}  // namespace fast_cp
