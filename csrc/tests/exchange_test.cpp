// Whole exchanges between processes on the fake device: the runtime's real code for windows, turns, signals' order and
// graphs, with random shapes and late ranks. A rank that would wait for ever fails here after six seconds.
#include <sys/wait.h>
#include <unistd.h>

#include "copy_plan_oracle.hpp"
#include "fake_device.hpp"
#include "runtime/runtime.hpp"

using namespace oracle;

namespace {

constexpr int64_t kPool = 24 << 20;
constexpr int64_t kLimitMs = 6000;  // long enough for a busy machine; the test of a missing rank waits for all of it

struct Held {  // this rank's tensors, and what it must receive
  Exchange x;
  std::array<Source, kRoles> sources;
};

Exchange random_exchange(Random& random, int world) {
  Exchange x;
  x.world = world;
  do x.ulysses = int(random.between(1, world));
  while (world % x.ulysses != 0);
  x.num_chunks = int(random.between(1, 3)), x.batch = random.between(1, 2), x.head_bytes = 2 * kElement;
  for (int r = 0; r < world; ++r)
    x.seq.push_back(random.below(5) == 0 ? 0 : random.between(1, random.below(4) ? 9 : 60));
  for (int i = 0; i < x.ulysses; ++i)
    x.kv_heads.push_back(random.between(1, 4)), x.q_heads.push_back(2 * x.kv_heads.back());
  x.q_text_front = x.kv_text_front = random.between(0, 2);
  return x;
}

Request request_for(const Held& held, const std::string& tag, unsigned roles, Transfer transfer, bool lazy) {
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

Held make(const Exchange& x, int rank) {
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
int64_t wrong_in(const OpenExchange& open, int rank) {
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
      const int64_t at = ((b * shape.rows + row) * shape.heads + head) * dim_of(x) + d;
      return want == kUntouched ? target.data[at] : want;  // text rows are the receiver's own
    });
  }
  return outcome.wrong;
}

void one_exchange(Runtime& runtime, Random& random, const Exchange& x, unsigned roles, const std::string& tag) {
  const int rank = runtime.settings.rank;
  const Held held = make(x, rank);
  const bool lazy = random.below(2), at_once = random.below(2);
  Request request = request_for(held, tag + (lazy ? ".lazy" : ""), roles, Transfer(random.below(3)), lazy);
  request.text = request.returning && random.below(2);
  OpenExchange& open = start_exchange(runtime, request);
  if (at_once) send_chunks(runtime, open, 0, x.num_chunks);
  if (fake::rank == random.below(x.world)) usleep(300);
  for (int chunk = 0; chunk < x.num_chunks; ++chunk) {
    if (!at_once) send_chunks(runtime, open, chunk, chunk + 1);
    if (random.below(4) == 0) arm_chunk(runtime, open, chunk);
    wait_chunk(runtime, open, chunk);
  }
  runtime.check();
  join_exchange(runtime, open);
  const int64_t wrong = wrong_in(open, rank);
  check(wrong == 0, describe(x) + " roles " + std::to_string(roles) + ": " + std::to_string(wrong) + " wrong elements");
  if (!lazy) finish_exchange(runtime, open.request.tag);
}

void random_exchanges(Runtime& runtime, int rounds) {
  Random random(runtime.settings.world);  // the same on every rank
  const unsigned kv = 1u << kKey | 1u << kValue;
  for (int round = 0; round < rounds; ++round) {
    const Exchange x = random_exchange(random, runtime.settings.world);
    one_exchange(runtime, random, x, random.below(2) ? kv | 1u << kQuery : kv, "in" + std::to_string(random.below(3)));
    one_exchange(runtime, random, x, 1u << kOutput, "out");
  }
}

// A captured exchange that was never replayed must not stop a later call; replays and calls take turns afterwards.
void captured_exchanges(Runtime& runtime, bool lazy) {
  Random random(5);
  Exchange x = random_exchange(random, runtime.settings.world);
  const Held held = make(x, runtime.settings.rank);
  const std::string tag = lazy ? "graph.lazy" : "graph";
  int64_t wrong = 0;
  const auto call = [&] {
    OpenExchange& open = start_exchange(
        runtime, request_for(held, tag, 1u << kKey | 1u << kValue | 1u << kQuery, Transfer::kCopyEngine, lazy));
    send_chunks(runtime, open, 0, x.num_chunks);
    for (int chunk = 0; chunk < x.num_chunks; ++chunk) wait_chunk(runtime, open, chunk);
    join_exchange(runtime, open);
    const OpenExchange copy = open;
    fake::run([&wrong, copy, &runtime] { wrong += wrong_in(copy, runtime.settings.rank); });
    if (!lazy) finish_exchange(runtime, tag);
  };
  for (int i = 0; i < 3; ++i) call();
  fake::graph.clear();
  fake::capturing = true;
  call();
  fake::capturing = false;
  for (int i = 0; i < 3; ++i) call();
  for (int i = 0; i < 20; ++i) {
    fake::replay();
    if (i % 3 == 0) call();
    if (fake::rank == i % runtime.settings.world) usleep(200);
  }
  runtime.check();
  check(wrong == 0, sentence("captured, lazy ", lazy, ": ", wrong, " wrong elements"));
}

// Ranks that stop: the others must report whom they miss, and go on at once afterwards.
void missing_rank(Runtime& runtime) {
  Random random(9);
  Exchange x = random_exchange(random, runtime.settings.world);
  if (runtime.settings.rank == 0) return;
  const Held held = make(x, runtime.settings.rank);
  OpenExchange& open =
      start_exchange(runtime, request_for(held, "missing", 1u << kKey | 1u << kValue, Transfer::kCopyEngine, false));
  send_chunks(runtime, open, 0, x.num_chunks);
  wait_chunk(runtime, open, 0);
  std::string error;
  try {
    runtime.check();
  } catch (const std::exception& e) {
    error = e.what();
  }
  const bool named = error.find("from rank 0") != std::string::npos && error.find("'missing'") != std::string::npos &&
                     error.find("chunk 0") != std::string::npos;
  check(named, "the error names rank, window and chunk: " + error);
}

int run_rank(int rank, int world) {
  try {
    Runtime& runtime = Runtime::create({rank, world, 0, kPool, kLimitMs, ""});
    random_exchanges(runtime, 120);
    captured_exchanges(runtime, false);
    captured_exchanges(runtime, true);
    if (world == 3) missing_rank(runtime);
  } catch (const std::exception& error) {
    check(false, sentence("rank ", rank, " of ", world, ": ", error.what()));
  }
  return failures ? 1 : 0;
}

}  // namespace

int main() {
  int failed = 0;
  for (int world : {1, 2, 3, 4, 6}) {
    fake::share_pools(world, kPool);
    for (int rank = 0; rank < world; ++rank) {
      if (fork() == 0) _exit(run_rank(rank, world));
    }
    for (int rank = 0; rank < world; ++rank) {
      int status = 0;
      wait(&status);
      failed += status != 0;
    }
    munmap(fake::pools, world * kPool);
  }
  if (!failed) std::puts("exchanges: right for 1 to 6 processes, captured, late and missing ranks included");
  return failed ? 1 : 0;
}
