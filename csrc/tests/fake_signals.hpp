// The signals of runtime/signals.cu on ordinary memory (see fake_device.hpp): what the kernels do, in their order, by
// whoever launches them; and a reader that waits by itself.
#pragma once

#include <sched.h>

#include <chrono>

#include "fake_device.hpp"
#include "runtime/signals.hpp"

namespace fast_cp {

Signals::Signals(Heap& heap, int rank, int world, int64_t timeout_ms)
    : heap_(heap),
      rank_(rank),
      world_(world),
      limit_ns_(timeout_ms * 1000000),
      epochs_(new uint64_t[kMaxSlots + 1]()),
      tickets_(new Ticket[kMaxSlots]()),
      record_(new ErrorRecord()),
      record_on_device_(record_) {}
Signals::~Signals() { delete[] epochs_, delete[] tickets_, delete record_; }
uint64_t* Signals::line(int rank, int slot, int line) const {
  return reinterpret_cast<uint64_t*>(heap_.at(rank, 0)) + signal_index(slot, line);
}
// Where each slot's count has last been counted on: the caller's stream, and how much of its work.
inline fake::Event counted[kMaxSlots];
void Signals::publish_arrival(int slot, int chunk, int peer, cudaStream_t stream) {
  const fake::Event& count = counted[slot];
  require(fake::stream(stream)->after[count.stream - fake::callers] >= count.work, "announced before it was counted");
  fake::count(stream);
  fake::run([=] { __atomic_store_n(line(peer, slot, chunk) + rank_, epochs_[slot], __ATOMIC_RELEASE); });
}

inline void await(const uint64_t* flag, uint64_t wanted, uint64_t limit_ns, ErrorRecord* record, ErrorRecord told) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(limit_ns);
  while (__atomic_load_n(flag, __ATOMIC_ACQUIRE) < wanted && !record->ready) {
    sched_yield();
    if (std::chrono::steady_clock::now() < end) continue;
    told.ready = 1, told.wanted = wanted, told.seen = *flag, told.limit_ns = limit_ns;
    *record = told;
  }
}

// What the kernels do, in their order.
inline void tell_consumed(uint64_t* flag, uint64_t count) {
  if (!fake::silent) __atomic_store_n(flag, count, __ATOMIC_RELEASE);
}
void Signals::wait_arrivals(int slot, int first, int count, uint32_t mask, cudaStream_t stream, bool) {
  mask &= ~(1u << rank_);
  if (!mask) return;
  fake::count(stream);
  fake::run([=] {
    for (int chunk = first; chunk < first + count; ++chunk) {
      for (int peer = 0; peer < world_; ++peer) {
        if (mask >> peer & 1u)
          await(line(rank_, slot, chunk) + peer, epochs_[slot], limit_ns_, record_, {0, peer, slot, chunk, 0, 0, 0});
      }
    }
  });
}
void Signals::begin(int slot, int sibling, uint32_t mask, const Reader* reader, cudaStream_t stream) {
  for (int peer = 0; peer < world_; ++peer) {
    if (peer == rank_ || !(mask >> peer & 1u)) continue;
    fake::run([=] {
      for (int told : {slot, sibling}) tell_consumed(line(peer, told, kConsumedLine) + rank_, epochs_[told]);
    });
  }
  const Reader met = reader ? *reader : Reader{};
  const auto each = [=](auto&& what) {
    for (int peer = 0; peer < world_; ++peer) {
      if (met.exchanged >> peer & 1u) fake::run([=] { what(peer, epochs_[slot] + 1); });
    }
  };
  each([=](int peer, uint64_t use) { __atomic_store_n(line(peer, slot, kBegunLine) + rank_, use, __ATOMIC_RELEASE); });
  fake::count(stream);
  counted[slot] = {fake::stream(stream), fake::stream(stream)->work};
  const int calls = fake::calls;
  wait_arrivals(slot, kConsumedLine, 1, mask, stream);
  fake::calls = calls;  // one kernel does all of it
  each([=](int peer, uint64_t use) {
    await(line(rank_, slot, kBegunLine) + peer, use, limit_ns_, record_, {0, peer, slot, kBegunLine, 0, 0, 0});
  });
  fake::run([=] { ++epochs_[slot]; });
  if (!reader) return;
  fake::run([=] { (tickets_[slot] = blank_ticket(slot, met)).wanted = epochs_[slot]; });
}
void Signals::drain(const std::vector<int>& slots, cudaStream_t stream) {
  for (int slot : slots) {
    for (int peer = 0; peer < world_; ++peer) {
      if (peer != rank_) tell_consumed(line(peer, slot, kConsumedLine) + rank_, epochs_[slot]);
    }
  }
  for (int slot : slots) wait_arrivals(slot, kConsumedLine, 1, (1u << world_) - 1, stream);
}
bool Signals::failed() const { return record_->ready != 0; }

// What a kernel does that waits by itself, with nothing but its ticket, before it reads a chunk.
inline void await_by(const Ticket& ticket, int chunk) {
  for (int peer = 0; peer < kMaxWorld; ++peer) {
    if (!(ticket.peers >> peer & 1u)) continue;
    const auto* flag = reinterpret_cast<const uint64_t*>(ticket.arrivals + (chunk * kMaxWorld + peer) * 8);
    ErrorRecord untold{};  // it goes on and says nothing
    await(flag, ticket.wanted, ticket.limit_ns, &untold, {});
  }
}

}  // namespace fast_cp
