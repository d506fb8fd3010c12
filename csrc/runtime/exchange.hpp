// One use of a window, from start to done: which copies go where, which chunks are sent, awaited, armed.
//
//   start   waits until the peers have read the window's former use, and counts a new one
//   send    forks the side streams from the caller's stream: copies of one chunk, then the announcement to each peer
//   wait    makes the caller's stream wait for a chunk from every peer
//   done    joins the side streams and tells the peers that the window has been read
// Every rank makes the same calls in the same order.
#pragma once

#include <cuda_runtime.h>

#include <memory>
#include <string>
#include <vector>

#include "fast_cp/copy_plan.hpp"
#include "transfer/transfer.hpp"

namespace fast_cp {

class Runtime;

struct Request {
  std::string tag;
  Exchange shape;
  Transfer transfer = Transfer::kCopyEngine;
  bool returning = false;  // the output's way back; else Q, K, V
  bool text = false;       // the way back carries the rows of replicated text
  bool in_place = false;   // the sources are this rank's rows of its own windows
  bool lazy_done = false;  // done is implied by the next start with this tag
  unsigned roles = 0;      // a bit per Role
  const char* sources[kRoles] = {};
  SourceStrides strides[kRoles] = {};
  std::vector<std::shared_ptr<void>> keep;  // what must not be freed while copies read it
};

struct OpenExchange {
  Request request;
  int slot = -1;
  char* windows[kRoles] = {};    // this rank's
  int64_t offsets[kRoles] = {};  // of each role's window in the pool, equal on all ranks
  std::vector<std::vector<Copy>> chunks;
  std::vector<int> peers;  // in the order of sending
  uint32_t peer_mask = 0;  // peers this rank exchanges with, itself excluded
  uint32_t forked = 0;     // peers whose side streams have not been joined since they were forked
  std::vector<char> sent, waited, armed, own_event;
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

}  // namespace fast_cp
