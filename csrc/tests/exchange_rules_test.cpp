// The rules of an exchange one by one, between two processes on the fake device: what is told when, graphs replayed on
// one rank and eager calls on the other, the rank's own rows, generations, the order of streams, and calls into CUDA.
#include <map>

#include "exchange_uses.hpp"

using namespace cases;

namespace {

void done_is_told_at_the_next_begin(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  const int first = use(runtime, keys_and_values(held));
  check(told(runtime, first) == 0, "done itself tells nothing");
  const int second = start_exchange(runtime, keys_and_values(held)).slot;
  check(second != first && told(runtime, first) == 1, "the other generation's begin tells it");
  check(told(runtime, second) == 0, "a use that has just begun has not been read");
  finish_exchange(runtime, "kv");
  check(use(runtime, keys_and_values(held)) == first && told(runtime, second) == 1, "and so in turn");
}

void moving_windows_tell_before_they_wait(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  const int slot = use(runtime, keys_and_values(held));
  const int64_t version = runtime.heap.windows().version();
  use(runtime, keys_and_values(make(gather({1}, 6000), rank)));
  check(told(runtime, slot) == 1, "all that may move is told");
  check(runtime.heap.windows().version() > version, "the version has grown");
}

void a_rank_that_tells_nothing_is_named(int rank) {
  Runtime& runtime = begin(rank, kShortLimitMs);
  fake::silent = rank == 0;
  const Held held = make(gather(), rank);
  std::string error;
  try {
    for (int i = 0; i < 4; ++i) use(runtime, keys_and_values(held));
    runtime.check();
  } catch (const std::exception& e) {
    error = e.what();
  }
  if (rank == 0) return;  // it gives up in its turn, since the other one has
  failures = 0;           // what that use brought is not right, of course
  check(error.find("for rank 0 to finish reading window 'kv'") != std::string::npos, "the silent rank: " + error);
}

// One rank replays its own graph of two uses, the other one calls; then the windows move, and both call.
void replays_and_calls_mix(int rank) {
  Runtime& runtime = begin(rank);
  runtime.managed_capture = true;
  const Held held = make(gather({1, 2}), rank);
  int64_t wrong = 0;
  const auto both = [&] {
    for (int generation : {0, 1}) use(runtime, keys_and_values(held, "kv", generation), &wrong);
  };
  both();
  const int64_t version = runtime.heap.windows().version();
  if (rank == 0) {
    fake::capturing = true;
    use(runtime, keys_and_values(held, "kv", 0), &wrong), use(runtime, keys_and_values(held, "kv", 1), &wrong);
    fake::capturing = false;
  }
  for (int round = 0; round < 30; ++round) {
    if (round % 2 == rank) usleep(300);
    rank == 0 ? fake::replay() : both();
    if (round % 7 == 0) both();
  }
  for (const Window& window : runtime.heap.windows().windows())
    for (const Generation& g : window.generations) check(!g.pinned, "a managed capture pins nothing");
  check(runtime.heap.windows().version() == version, "a capture moves nothing");
  use(runtime, keys_and_values(make(gather({1, 2}, 6000), rank)));
  check(runtime.heap.windows().version() > version, "growth moves them, captured or not");
  runtime.check();
  check(wrong == 0, sentence("replays on one rank: ", wrong, " wrong elements on rank ", rank));
}

void own_rows_stay_where_they_lie(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather({1, 1, 2}), rank);
  for (Transfer transfer : {Transfer::kCopyEngine, Transfer::kSm}) {
    for (int own_chunks : {0, 1, 3}) {
      Request request = keys_and_values(held);
      request.own_chunks = own_chunks, request.transfer = transfer;
      use(runtime, request);
      check(fake::all_joined(), sentence("joined with ", own_chunks, " own chunks"));
    }
  }
}

void generations_are_those_asked_for(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  const int zero = use(runtime, keys_and_values(held, "kv", 0)), one = use(runtime, keys_and_values(held, "kv", 1));
  check(zero != one, "two generations");
  for (int generation : {1, 1, 0, 0, 1}) {
    check(use(runtime, keys_and_values(held, "kv", generation)) == (generation ? one : zero), "the one asked for");
  }
  check(use(runtime, keys_and_values(held)) == zero, "then it is the other one's turn");
}

void uses_of_one_tag_follow_each_other_on_any_stream(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  use(runtime, keys_and_values(held)), use(runtime, keys_and_values(held));
  check(fake::put_in_order.empty(), "one stream needs no order");
  fake::current = 1;
  use(runtime, keys_and_values(held));
  check(fake::put_in_order == std::vector<std::pair<int, int>>{{0, 1}}, "the second stream after the first, once");
}

void plans_are_kept(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  const auto plan_of = [&](const Request& request) {
    use(runtime, request);
    return runtime.channels["kv"].plan;
  };
  const auto first = plan_of(keys_and_values(held));
  check(plan_of(keys_and_values(held)) == first, "the same request has the same plan");
  Request other = keys_and_values(held);
  other.own_chunks = 0;
  check(plan_of(other) != first, "another pattern has another plan");
  check(plan_of(keys_and_values(make(gather({1, 1}), rank))) != first, "another shape has another plan");
}

// What the caller computes may be spread over streams of its own.
void the_callers_streams_are_left_alone(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather({1, 1}), rank);
  use(runtime, keys_and_values(held, "kv", 0));
  const int work = fake::callers[0].work;
  Request request = keys_and_values(held, "kv", 1);
  request.in_turn = true;
  OpenExchange& open = start_exchange(runtime, std::move(request));
  send_chunks(runtime, open, 0, 2);
  check(fake::callers[0].work == work + 1, "start and send launch one kernel on the caller's stream");
  ++fake::callers[0].work;  // attention to the rank's own keys
  fake::current = 1;
  wait_chunk(runtime, open, 1);
  fake::current = 0;
  check(fake::after_work == work + 1, "a wait on another stream comes after start alone");
  wait_chunk(runtime, open, 0);
  check(wrong_in(open, rank) == 0, "what arrived is right");
  finish_exchange(runtime, "kv");
  check(fake::all_joined(), "joined, also what was awaited elsewhere");
}

// Peers share streams where there are many, evenly, and none shares the one of the rank's own copies.
void few_streams_carry_what_goes_to_peers(int rank) {
  for (int world = 1; world <= kMaxWorld; ++world) {
    if (rank >= world) continue;
    const int expected = std::min(world - 1, kMostPeerStreams);
    Streams streams(rank, world, std::max(expected, 1));
    std::map<cudaStream_t, uint32_t> carries;
    for (int peer = 0; peer < world; ++peer) {
      if (peer != rank) carries[streams.to_peer(peer)] |= 1u << peer;
    }
    check(int(carries.size()) == expected, sentence(carries.size(), " streams to the peers at world ", world));
    check(!carries.count(streams.to_peer(rank)) && !carries.count(streams.arming()), "not the rank's own, nor a wait's");
    for (const auto& [stream, peers] : carries) {
      const int shared = __builtin_popcount(peers), fair = (world - 1) / expected;
      check(shared == fair || shared == fair + 1, "shared evenly");
      for (int peer = 0; peer < world; ++peer)
        check(!(peers >> peer & 1u) || streams.peers_beside(peer) == peers, "each knows those beside it");
    }
  }
}

// Uses in turn need not ask, so a rank that tells nothing is not missed; with room for one generation they ask.
void uses_in_turn_ask_nobody(int rank) {
  Runtime& runtime = begin(rank, kShortLimitMs);
  fake::silent = true;
  const Held held = make(gather({1, 2}), rank);
  for (int i = 0; i < 40; ++i) {
    if (i % 3 == rank) usleep(400);
    Request request = keys_and_values(held, "kv", i % 2);
    request.in_turn = true;
    const int slot = use(runtime, request);
    check(told(runtime, slot) == 0, "nothing is told");
  }
  runtime.check();
  fake::silent = false;
  const Held large = make(gather({1}, 50000), rank);  // more than half of the pool
  Request request = keys_and_values(large, "large");
  request.in_turn = true;
  const int slot = use(runtime, request);
  use(runtime, request);
  check(told(runtime, slot) == 1, "one generation: told, and waited for");
  runtime.check();
}

void a_forgotten_exchange_leaves_no_trace(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  const int first = use(runtime, keys_and_values(held));
  if (rank == 0) {  // its capture fails in the middle; nothing of it has run
    fake::capturing = true;
    start_exchange(runtime, keys_and_values(held));
    fake::capturing = false, fake::graph.clear();
    forget_exchange(runtime, "kv"), forget_exchange(runtime, "kv"), forget_exchange(runtime, "never used");
  }
  check(use(runtime, keys_and_values(held, "kv", 1)) != first, "the next use is like any other");
  use(runtime, keys_and_values(held, "kv", 0));
}

// Calls into CUDA of one use at world 2. start: is it captured, fork, begin, its mark; send: two streams (2), after
// begin, the copies of K and V to the peer and to itself (4), the announcement, the mark of the own copies; wait: that
// mark, the arrival; done: join (2).
void few_calls_into_cuda(int rank) {
  Runtime& runtime = begin(rank);
  const auto calls_of = [&](const Exchange& x, int own_chunks) {
    const Held held = make(x, rank);
    Request request = keys_and_values(held);
    request.own_chunks = own_chunks;
    for (int i = 0; i < 2; ++i) use(runtime, request);
    const int before = fake::calls;
    use(runtime, request);
    return fake::calls - before;
  };
  const int all = calls_of(gather(), -1), none = calls_of(gather(), 0), two = calls_of(gather({1, 1}), -1);
  check(all <= 17, sentence(all, " calls, 17 at most"));
  check(none <= 12, sentence(none, " calls without own copies, 12 at most"));
  check(two <= 25, sentence(two, " calls in two chunks, 25 at most"));
}

}  // namespace

int main() {
  int failed = 0;
  for (auto* rule :
       {done_is_told_at_the_next_begin, moving_windows_tell_before_they_wait, a_rank_that_tells_nothing_is_named,
        replays_and_calls_mix, own_rows_stay_where_they_lie, generations_are_those_asked_for,
        uses_of_one_tag_follow_each_other_on_any_stream, the_callers_streams_are_left_alone,
        few_streams_carry_what_goes_to_peers, a_forgotten_exchange_leaves_no_trace, uses_in_turn_ask_nobody, plans_are_kept, few_calls_into_cuda}) {
    failed += run_ranks(kWorld, rule);
  }
  if (!failed) std::puts("exchange rules: all kept");
  return failed ? 1 : 0;
}
