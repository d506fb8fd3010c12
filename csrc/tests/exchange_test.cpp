// Whole exchanges between processes on the fake device: the runtime's real code for windows, turns, signals' order and
// graphs, with random shapes and late ranks. A rank that would wait for ever fails here after six seconds.
#include "exchange_cases.hpp"

using namespace cases;

namespace {

constexpr int64_t kLimitMs = 6000;  // long enough for a busy machine; the test of a missing rank waits for all of it

void wait_for_all(Runtime& runtime, Random& random, OpenExchange& open, bool sent) {
  for (int chunk = 0; chunk < open.plan->num_chunks(); ++chunk) {
    if (!sent) send_chunks(runtime, open, chunk, chunk + 1);
    if (open.request.ticket) continue;
    if (random.below(4) == 0) arm_chunk(runtime, open, chunk);
    wait_chunk(runtime, open, chunk);
  }
  if (open.request.ticket) poll_ticket(runtime, open);
}

void one_exchange(Runtime& runtime, Random& random, const Exchange& x, unsigned roles, const std::string& tag) {
  const int rank = runtime.settings.rank;
  const Held held = make(x, rank);
  const bool lazy = random.below(2), at_once = random.below(2);
  Request request = request_for(held, tag + (lazy ? ".lazy" : ""), roles, Transfer(random.below(3)), lazy);
  request.text = request.returning && random.below(2);
  request.generation = int(random.between(-1, 1));
  if (!request.returning && random.below(2)) request.own_chunks = int(random.below(x.num_chunks() + 1));
  request.ticket = !request.returning && equal_chunks(x) && random.below(2);
  OpenExchange& open = start_exchange(runtime, request);
  if (at_once) send_chunks(runtime, open, 0, x.num_chunks());
  if (fake::rank == random.below(x.world)) usleep(300);
  wait_for_all(runtime, random, open, at_once);
  runtime.check();
  join_exchange(runtime, open);
  const int64_t wrong = wrong_in(open, rank);
  check(wrong == 0, describe(x) + " roles " + std::to_string(roles) + ": " + std::to_string(wrong) + " wrong elements");
  if (!lazy) finish_exchange(runtime, open.request.tag);
  check(fake::all_joined(), "the caller's stream comes after all that was sent: " + describe(x));
}

void random_exchanges(Runtime& runtime, int rounds) {
  Random random(runtime.settings.world);  // the same on every rank
  for (int round = 0; round < rounds; ++round) {
    const Exchange x = random_exchange(random, runtime.settings.world);
    one_exchange(runtime, random, x, random.below(2) ? kAll : kKeysAndValues, "in" + std::to_string(random.below(3)));
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
    OpenExchange& open = start_exchange(runtime, request_for(held, tag, kAll, Transfer::kCopyEngine, lazy));
    send_chunks(runtime, open, 0, x.num_chunks());
    for (int chunk = 0; chunk < x.num_chunks(); ++chunk) wait_chunk(runtime, open, chunk);
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
      start_exchange(runtime, request_for(held, "missing", kKeysAndValues, Transfer::kCopyEngine, false));
  send_chunks(runtime, open, 0, x.num_chunks());
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

void run_rank(int rank, int world) {
  Runtime& runtime = Runtime::create({rank, world, 0, kPool, kLimitMs, ""});
  random_exchanges(runtime, 120);
  captured_exchanges(runtime, false);
  captured_exchanges(runtime, true);
  if (world == 3) missing_rank(runtime);
}

}  // namespace

int main() {
  int failed = 0;
  for (int world = 1; world <= 8; ++world) failed += run_ranks(world, [world](int rank) { run_rank(rank, world); });
  if (!failed) std::puts("exchanges: right for 1 to 8 processes, captured, late and missing ranks included");
  return failed ? 1 : 0;
}
