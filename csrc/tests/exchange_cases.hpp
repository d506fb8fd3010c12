// Random exchanges between processes on the fake device, and what every rank must find in its windows.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include "copy_plan_oracle.hpp"
#include "fake_signals.hpp"
#include "runtime/runtime.hpp"
#include "runtime/ticket.hpp"

namespace cases {

using namespace oracle;

constexpr int64_t kPool = 24 << 20;
constexpr unsigned kKeysAndValues = 1u << kKey | 1u << kValue, kAll = kKeysAndValues | 1u << kQuery;

struct Held {  // this rank's tensors, and what it must receive
  Exchange x;
  std::array<Source, kRoles> sources;
};

inline Exchange random_exchange(Random& random, int world) {
  Exchange x;
  x.world = world;
  do x.ulysses = int(random.between(1, world));
  while (world % x.ulysses != 0);
  x.chunks.resize(random.between(1, 3)), x.chunks[0] = random.between(1, 4);
  for (int64_t& weight : x.chunks) weight = std::max<int64_t>(weight, 1);
  x.batch = random.between(1, 2), x.head_bytes = 2 * kElement;
  for (int r = 0; r < world; ++r)
    x.seq.push_back(random.below(5) == 0 ? 0 : random.between(1, random.below(4) ? 9 : 60));
  for (int i = 0; i < x.ulysses; ++i)
    x.kv_heads.push_back(random.between(1, 4)), x.q_heads.push_back(2 * x.kv_heads.back());
  x.q_text_front = x.kv_text_front = random.between(0, 2);
  x.own_last = random.below(2);
  return x;
}

inline Request request_for(const Held& held, const std::string& tag, unsigned roles, Transfer transfer, bool lazy) {
  Request request;
  request.tag = tag, request.shape = held.x, request.roles = roles, request.transfer = transfer,
  request.lazy_done = lazy;
  request.returning = roles == 1u << kOutput;
  for (int role = 0; role < kRoles; ++role) {
    request.sources[role] = reinterpret_cast<const char*>(held.sources[role].data.data());
    request.strides[role] = held.sources[role].strides;
  }
  return request;
}

inline Held make(const Exchange& x, int rank) {
  Held held{x, {}};
  const int64_t dim = dim_of(x);
  for (int role : {kQuery, kKey, kValue}) {
    held.sources[role] =
        make_source(rank, role, x.batch, x.seq[rank], sum_of(is_kv(role) ? x.kv_heads : x.q_heads), dim, {0, 0});
  }
  const WindowShape out = window_of(x, rank, kQuery);
  held.sources[kOutput] = make_source(rank, kOutput, x.batch, out.rows, out.heads, dim, {2, 0});
  return held;
}

// Compares the windows with the definition, and spoils them: a later use must not find an earlier one's numbers.
inline int64_t wrong_in(const OpenExchange& open, int rank) {
  const Exchange& x = open.request.shape;
  Outcome outcome;
  for (int role = 0; role < kRoles; ++role) {
    if (!(open.request.roles >> role & 1u)) continue;
    const WindowShape shape = window_of(x, rank, role, open.request.text);
    if (window_bytes(x, rank, role, open.request.text) == 0) continue;
    Target target;
    target.reset(window_bytes(x, rank, role, open.request.text));
    std::memcpy(target.data.data(), open.windows[role], target.data.size() * kElement);
    std::memset(open.windows[role], 0x77, target.data.size() * kElement);
    std::fill(target.writes.begin(), target.writes.end(), 1);
    compare(target, shape, dim_of(x), outcome, [&](int64_t b, int64_t row, int64_t head, int64_t d) {
      const int64_t want = role == kOutput ? expected_returned(x, rank, open.request.text, b, row, head, d)
                                           : expected_sent(x, rank, role, b, row, head, d);
      const int64_t found = target.data[((b * shape.rows + row) * shape.heads + head) * dim_of(x) + d];
      if (want == kUntouched) return found;  // text rows are the receiver's own
      const bool home = role != kOutput && stays_home(x, rank, role, row, head, open.request.own_chunks);
      return home ? (found == want ? ~want : found) : want;
    });
  }
  return outcome.wrong;
}

inline bool equal_chunks(const Exchange& x) {
  return std::all_of(x.chunks.begin(), x.chunks.end(), [&](int64_t weight) { return weight == x.chunks[0]; });
}

// Runs a reader that waits by itself, chunk by chunk.
inline void poll_ticket(Runtime& runtime, OpenExchange& open) {
  const Ticket* ticket = take_ticket(runtime, open);
  for (int chunk = 0; chunk < open.plan->num_chunks(); ++chunk) fake::run([=] { await_by(*ticket, chunk); });
}

// Runs `body(rank)` in a process for each of `world` ranks that share their pools; returns how many failed.
template <typename Body>
int run_ranks(int world, Body body) {
  fake::share_pools(world, kPool);
  for (int rank = 0; rank < world; ++rank) {
    if (fork() != 0) continue;
    try {
      body(rank);
    } catch (const std::exception& error) {
      check(false, sentence("rank ", rank, " of ", world, ": ", error.what()));
    }
    _exit(failures ? 1 : 0);
  }
  int failed = 0;
  for (int rank = 0; rank < world; ++rank) {
    int status = 0;
    wait(&status);
    failed += status != 0;
  }
  munmap(fake::pools, world * kPool);
  return failed;
}

}  // namespace cases
