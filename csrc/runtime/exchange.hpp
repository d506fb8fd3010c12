// One use of a window, from start to done: which chunks are sent, awaited, armed.
//
//   start   tells the peers that the former uses have been read, waits until they said so of this window, and counts
//           a new use; where uses are in turn it only counts. With a ticket it also waits until they have started
//   send    forks the side streams from the caller's stream: copies of one chunk, then the announcement to each peer
//   wait    makes the caller's stream wait for a chunk from every peer
//   ticket  stands for all waits: the kernel that reads waits by itself (runtime/ticket.hpp)
//   done    joins the side streams; the next start of the tag tells the peers that the window has been read
// Every rank makes the same calls in the same order. Sends and waits may be made on other streams than start and done,
// as long as the caller forks and joins those.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <optional>
#include <string>

#include "runtime/copies.hpp"
#include "runtime/streams.hpp"

namespace fast_cp {

class Runtime;

struct OpenExchange {
  Request request;
  std::shared_ptr<const CopyPlan> plan;
  int slot = -1;
  char* windows[kRoles] = {};                // this rank's
  int64_t offsets[kRoles] = {};              // of each role's window in the pool, equal on all ranks
  uint32_t forked = 0;                       // peers whose side streams have not been joined since they were forked
  uint32_t after_begin = 0;                  // peers whose side streams come after start's kernel
  bool free = false;   // the peers have read the window's former use: known without asking them
  bool fresh = false;  // nothing has been called since start
  uint32_t sent = 0, waited = 0, armed = 0;  // a bit per chunk
  bool watched = false;                      // a wait runs beside a reader that waits by itself
  int last_marked = -1;  // the chunk whose event comes after everything on the stream of the rank's own copies
  bool all_waited() const { return waited == ~0u >> (32 - plan->num_chunks()); }
};

// What is known of a tag between calls.
struct Channel {
  std::optional<OpenExchange> open;
  std::shared_ptr<const CopyPlan> plan;  // of its last use
  uint32_t peers = 0;                    // that its last use was exchanged with
  std::optional<cudaStream_t> stream;    // that its last call was made on
};

OpenExchange& start_exchange(Runtime& runtime, Request request);
OpenExchange& open_exchange(Runtime& runtime, const std::string& tag);
void send_chunks(Runtime& runtime, OpenExchange& exchange, int first, int last);
void wait_chunk(Runtime& runtime, OpenExchange& exchange, int chunk);
// Launches the wait for a chunk now, on a stream of its own; the later wait_chunk is an event only.
void arm_chunk(Runtime& runtime, OpenExchange& exchange, int chunk);
// The caller's stream goes on when the copies this rank sends have been carried out.
void join_exchange(Runtime& runtime, OpenExchange& exchange);
void finish_exchange(Runtime& runtime, const std::string& tag);
// Drops an exchange of which nothing has run, because the capture that recorded it failed.
void forget_exchange(Runtime& runtime, const std::string& tag);

}  // namespace fast_cp
