// Windows whose reader waits by itself, between two processes on the fake device: what a ticket says, what has been
// announced, what is launched, what comes after what, and what is refused.
#include "exchange_uses.hpp"

using namespace cases;

namespace {

int slot_of_last = -1;

Ticket ticket_of(Runtime& runtime, const Request& request) {
  OpenExchange& open = start_exchange(runtime, request);
  slot_of_last = open.slot;
  send_chunks(runtime, open, 0, open.plan->num_chunks());
  const Ticket ticket = *take_ticket(runtime, open);
  finish_exchange(runtime, request.tag);
  return ticket;
}

void a_ticket_says_what_to_poll(int rank) {
  Runtime& runtime = begin(rank);
  Exchange x = gather({1, 1});
  x.kv_text_front = 3;
  const auto ask = [&](bool own_last, int own_chunks) {
    x.own_last = own_last;
    const Held held = make(x, rank);
    Request request = with_ticket(held, "kv", 0);
    request.own_chunks = own_chunks;
    return ticket_of(runtime, request);
  };
  const Ticket plain = ask(false, -1);
  check(plain.peers == 1u << (1 - rank), "the peer");
  check(plain.wanted == 1 && ask(false, -1).wanted == 2, "the number of the use");
  check(plain.num_chunks == 2 && plain.kv_heads == 4 && plain.limit_ns > 2 * kLimitMs * 1000000, "counts and limit");
  check(plain.wait_row == 3 + (rank == 1 ? 6 : 13), "rows of rank 1 are the last");
  const auto* page = reinterpret_cast<const uint64_t*>(runtime.heap.at(rank, 0));
  check(plain.arrivals == reinterpret_cast<uintptr_t>(page + signal_index(slot_of_last, 0)), "the line of chunk 0");
  const Ticket home = ask(true, 0);
  check(home.wait_row == 3 + (rank == 1 ? 6 : 7), "own rows come last on both ranks");
  runtime.remove_waits = true;
  const Ticket removed = ask(true, -1);
  check(removed.peers == 0 && removed.wait_row == home.wait_row, "without waits nothing is polled");
}

// Copies within a GPU may be made by SMs, of which a reader leaves none.
void a_reader_comes_after_own_copies(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather({1, 1, 1, 1, 1, 1}), rank);
  for (int own_chunks : {2, -1, 0}) {
    Request request = with_ticket(held, "kv", 0);
    request.own_chunks = own_chunks;
    OpenExchange& open = start_exchange(runtime, request);
    send_chunks(runtime, open, 0, 6);
    poll_ticket(runtime, open);
    const fake::Stream* own = fake::stream(runtime.streams.to_peer(rank));
    check(own->joined == own->work, "the reader's stream comes after them");
    const int64_t wrong = wrong_in(open, rank);
    check(wrong == 0, sentence(wrong, " wrong elements with ", own_chunks, " own chunks"));
    finish_exchange(runtime, "kv");
  }
}

void a_reader_that_gives_up_names_the_chunk(int rank) {
  Runtime& runtime = begin(rank, kShortLimitMs);
  const Held held = make(gather({1, 1}), rank);
  OpenExchange& open = start_exchange(runtime, with_ticket(held));
  if (rank == 0) return;  // it has begun and sends nothing
  send_chunks(runtime, open, 0, 2);
  poll_ticket(runtime, open);
  const std::string error = error_of([&] { runtime.check(); });
  check(error.find("for chunk 0 of window 'kv'") != std::string::npos, "the missing chunk: " + error);
}

void a_ticket_stands_for_all_waits(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather({1, 1}), rank);
  OpenExchange& open = start_exchange(runtime, with_ticket(held));
  send_chunks(runtime, open, 0, 2);
  const int work = fake::callers[0].work;
  poll_ticket(runtime, open);
  check(open.all_waited() && fake::callers[0].work == work, "a ticket launches nothing on the reader's stream");
  check(!fake::all_joined(), "nor does the reader wait for what its rank sends");
  finish_exchange(runtime, "kv");
  check(fake::callers[0].work == work, "done launches no waits");
  check(fake::all_joined(), "done joins the sends all the same");
  OpenExchange& waiting = start_exchange(runtime, with_ticket(held));
  send_chunks(runtime, waiting, 0, 2);
  for (int chunk : {0, 1}) wait_chunk(runtime, waiting, chunk);
  check(wrong_in(waiting, rank) == 0, "plain waits are allowed too");
  finish_exchange(runtime, "kv");
  check(fake::all_joined(), "joined after plain waits");
}

// Copies by SMs could not begin behind a reader that holds all of them.
void a_reader_comes_after_copies_by_sm(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  Request request = with_ticket(held);
  for (Transfer transfer : {Transfer::kSm, Transfer::kTma}) {
    request.transfer = transfer;
    OpenExchange& open = start_exchange(runtime, request);
    send_chunks(runtime, open, 0, 1);
    check(!fake::all_joined(), "a side stream carries the copies");
    take_ticket(runtime, open);
    for (int peer : {0, 1}) {
      const fake::Stream* s = fake::stream(runtime.streams.to_peer(peer));
      check(s->joined == s->work, "the reader's stream comes after copies by SM");
    }
    finish_exchange(runtime, "kv");
  }
}

void a_reader_on_another_stream_comes_after_start(int rank) {
  Runtime& runtime = begin(rank);
  const Held held = make(gather(), rank);
  OpenExchange& open = start_exchange(runtime, with_ticket(held));
  const int begun = fake::callers[0].work;
  send_chunks(runtime, open, 0, 1);
  ++fake::callers[0].work;  // something else of the caller's
  fake::current = 1;
  take_ticket(runtime, open);
  fake::current = 0;
  check(fake::put_in_order == std::vector<std::pair<int, int>>{{0, 1}}, "the reader's stream follows");
  check(fake::after_work == begun, "start alone");
  finish_exchange(runtime, "kv");
}

void what_makes_no_sense_ends_in_a_sentence(int rank) {
  Runtime& runtime = begin(rank);
  const auto says = [](const std::string& error, const char* part) {
    check(error.find(part) != std::string::npos, sentence("'", part, "' in: ", error));
  };
  const Held whole = make(gather(), rank), weighted = make(gather({1, 2}), rank), halves = make(gather({1, 1}), rank);
  const Request uneven = with_ticket(weighted);
  says(error_of([&] { start_exchange(runtime, uneven); }), "different weights");
  Request back = request_for(whole, "back", 1u << kOutput, Transfer::kCopyEngine, false);
  back.ticket = true;
  says(error_of([&] { start_exchange(runtime, back); }), "the way back");
  OpenExchange& none = start_exchange(runtime, keys_and_values(whole));
  send_chunks(runtime, none, 0, 1);
  says(error_of([&] { take_ticket(runtime, none); }), "has no ticket");
  finish_exchange(runtime, "kv");
  OpenExchange& half = start_exchange(runtime, with_ticket(halves));
  send_chunks(runtime, half, 0, 1);
  says(error_of([&] { take_ticket(runtime, half); }), "chunk 1 was not sent");
  check(half.waited == 0, "a refused ticket counts as no wait");
  finish_exchange(runtime, "kv");
}

}  // namespace

int main() {
  int failed = 0;
  for (auto* rule :
       {a_ticket_says_what_to_poll, a_reader_comes_after_own_copies, a_reader_that_gives_up_names_the_chunk,
        a_ticket_stands_for_all_waits, a_reader_comes_after_copies_by_sm, a_reader_on_another_stream_comes_after_start,
        what_makes_no_sense_ends_in_a_sentence}) {
    failed += run_ranks(kWorld, rule);
  }
  if (!failed) std::puts("tickets: all rules kept");
  return failed ? 1 : 0;
}
