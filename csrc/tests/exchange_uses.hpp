// What the rules of an exchange are tried on, between two processes on the fake device: a small gather, a runtime with
// a time limit, one use from start to done, by waits or by a ticket, and what a rank has told its peer.
#pragma once

#include "exchange_cases.hpp"

namespace cases {

constexpr int kWorld = 2;
constexpr int64_t kLimitMs = 6000;
constexpr int64_t kShortLimitMs = 1500;  // for what must not come

inline Exchange gather(std::vector<int64_t> chunks = {1}, int64_t rows = 6) {
  Exchange x;
  x.world = kWorld, x.chunks = std::move(chunks), x.head_bytes = 2 * kElement;
  x.seq = {rows, rows + 1}, x.q_heads = x.kv_heads = {4};
  return x;
}

inline Runtime& begin(int rank, int64_t limit_ms = kLimitMs) {
  return Runtime::create({rank, kWorld, 0, kPool, limit_ms, ""});
}

inline Request keys_and_values(const Held& held, const std::string& tag = "kv", int generation = -1) {
  Request request = request_for(held, tag, kKeysAndValues, Transfer::kCopyEngine, false);
  request.generation = generation;
  return request;
}

// One use from start to done; returns its slot. What is wrong in the windows is added when the use is carried out.
inline int use(Runtime& runtime, const Request& request, int64_t* wrong) {
  OpenExchange& open = start_exchange(runtime, request);
  send_chunks(runtime, open, 0, open.plan->num_chunks());
  for (int chunk = 0; chunk < open.plan->num_chunks(); ++chunk) wait_chunk(runtime, open, chunk);
  fake::run([wrong, copy = open, &runtime] { *wrong += wrong_in(copy, runtime.settings.rank); });
  const int slot = open.slot;
  finish_exchange(runtime, request.tag);
  return slot;
}

inline int use(Runtime& runtime, const Request& request) {
  int64_t wrong = 0;
  const int slot = use(runtime, request, &wrong);
  check(wrong == 0, sentence("rank ", runtime.settings.rank, ": ", wrong, " wrong elements"));
  return slot;
}

// What this rank has told its peer of a slot.
inline uint64_t told(Runtime& runtime, int slot) {
  const int rank = runtime.settings.rank;
  const auto* page = reinterpret_cast<const uint64_t*>(runtime.heap.at(1 - rank, 0));
  return page[signal_index(slot, kConsumedLine) + rank];
}

// What `peer` has told this rank on a line.
inline uint64_t count_on(Runtime& runtime, int slot, int line, int peer) {
  return reinterpret_cast<const uint64_t*>(runtime.heap.at(runtime.settings.rank, 0))[signal_index(slot, line) + peer];
}

inline std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

// The sources are those of `held`, which must live as long as anything of the request is carried out.
inline Request with_ticket(const Held& held, const std::string& tag = "kv", int generation = -1) {
  Request request = keys_and_values(held, tag, generation);
  request.ticket = true;
  return request;
}

// One use whose reader polls the ticket; returns its slot.
inline int read_by_ticket(Runtime& runtime, const Request& request, int64_t* wrong) {
  OpenExchange& open = start_exchange(runtime, request);
  send_chunks(runtime, open, 0, open.plan->num_chunks());
  poll_ticket(runtime, open);
  fake::run([wrong, copy = open, &runtime] { *wrong += wrong_in(copy, runtime.settings.rank); });
  const int slot = open.slot;
  finish_exchange(runtime, request.tag);
  return slot;
}

inline void expect_right(Runtime& runtime, const Request& request, const std::string& what) {
  int64_t wrong = 0;
  read_by_ticket(runtime, request, &wrong);
  check(wrong == 0, sentence(what, ": ", wrong, " wrong elements on rank ", runtime.settings.rank));
  check(fake::all_joined(), what + ": done joins the sends");
}

}  // namespace cases
