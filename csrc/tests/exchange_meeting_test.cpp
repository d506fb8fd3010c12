// Starts that meet, since the reader of the windows waits by itself, between two processes on the fake device: late and
// missing ranks, replays beside calls, one generation or two, rows that a projection writes in place.
#include "exchange_uses.hpp"

using namespace cases;

namespace {

void a_start_meets_the_peers(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  for (int i = 0; i < 12; ++i) {
    Request request = with_ticket(held, "kv", i % 2);
    request.in_turn = i % 3 > 0;
    if (i % 2 == rank) usleep(2000);
    OpenExchange& open = start_exchange(runtime, request);
    check(count_on(runtime, open.slot, kBegunLine, 1 - rank) >= uint64_t(i / 2 + 1), "the peer has begun this use");
    finish_exchange(runtime, "kv");
  }
  runtime.check();
}

void a_rank_that_does_not_start_is_named(int rank) {
  Runtime& runtime = begin(rank, kShortLimitMs);
  if (rank == 0) return;
  const Held held = make(gather(), rank);
  start_exchange(runtime, with_ticket(held));
  const std::string error = error_of([&] { runtime.check(); });
  check(error.find("for rank 0 to start use 1 of window 'kv'") != std::string::npos, "the missing rank: " + error);
}

// One rank replays its own graph of two uses, the other calls; generations of both kinds, ranks late in turn.
void replays_meet_calls(int rank) {
  for (int64_t rows : {6, 50000}) {  // the second leaves room for one generation
    Runtime& runtime = rows == 6 ? begin(rank) : Runtime::get();
    runtime.managed_capture = true;
    const Held held = make(gather({1, 1}, rows), rank);
    int64_t wrong = 0;
    const auto both = [&] {
      for (int generation : {0, 1}) {
        Request request = with_ticket(held, sentence("kv", rows), generation);
        request.in_turn = true;
        read_by_ticket(runtime, request, &wrong);
      }
    };
    both();
    fake::graph.clear();
    fake::capturing = rank == 0;
    if (rank == 0) both();
    fake::capturing = false;
    check(fake::all_joined(), "what is captured is joined");
    for (int round = 0; round < (rows == 6 ? 30 : 3); ++round) {
      if (round % 2 == rank) usleep(300);
      rank == 0 ? fake::replay() : both();
      if (round % 7 == 0) both();
    }
    runtime.check();
    check(wrong == 0, sentence("replays on one rank: ", wrong, " wrong elements on rank ", rank));
  }
}

// As a projection uses them: the rank's rows lie in its windows already, and the next prepare ends the last use.
void projected_rows_are_neither_copied_nor_polled(int rank) {
  Runtime& runtime = begin(rank);
  Exchange x = gather({1, 1});
  x.own_last = true;
  Held held = make(x, rank);
  const int64_t pitch = 4 * x.head_bytes, rows = x.seq[rank];
  for (int i = 0; i < 6; ++i) {
    Request request = with_ticket(held, "kv", i % 2);
    request.in_place = request.lazy_done = request.in_turn = true;
    for (int role : {kKey, kValue}) request.strides[role] = {pitch, 13 * pitch};
    OpenExchange& open = start_exchange(runtime, request);
    for (int role : {kKey, kValue})
      std::memcpy(open.windows[role] + kv_row(x, rank, rank) * pitch, held.sources[role].data.data(), rows * pitch);
    send_chunks(runtime, open, 0, 1), send_chunks(runtime, open, 1, 2);
    const Ticket* ticket = take_ticket(runtime, open);
    check(ticket->wait_row == 13 - rows, "own rows are there");
    poll_ticket(runtime, open);
    check(wrong_in(open, rank) == 0, "all rows, in the order of this rank");
  }
  finish_exchange(runtime, "kv");
  check(fake::all_joined(), "done ends it too");
}

// A rank without tokens may have nothing to attend, and so poll nothing: its copies must not come too early even so.
void uses_in_turn_hold_where_a_rank_polls_nothing(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather({1, 1}), rank);
  for (int i = 0; i < 40; ++i) {
    Request request = with_ticket(held, "kv", i % 2);
    request.in_turn = true;
    if (rank == 0) {
      OpenExchange& open = start_exchange(runtime, request);
      send_chunks(runtime, open, 0, 2);
      take_ticket(runtime, open);
      finish_exchange(runtime, "kv");
    } else {
      usleep(200);
      expect_right(runtime, request, "beside a rank that polls nothing");
    }
  }
  runtime.check();
}

}  // namespace

int main() {
  int failed = 0;
  for (auto* rule : {a_start_meets_the_peers, a_rank_that_does_not_start_is_named, replays_meet_calls,
                     projected_rows_are_neither_copied_nor_polled, uses_in_turn_hold_where_a_rank_polls_nothing}) {
    failed += run_ranks(kWorld, rule);
  }
  if (!failed) std::puts("meetings: all rules kept");
  return failed ? 1 : 0;
}
