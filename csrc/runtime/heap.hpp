// One symmetric allocation, made once and collectively: a page of signals, then the windows (fast_cp/window_plan.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "fast_cp/window_plan.hpp"

namespace fast_cp {

class Heap {
 public:
  // Collective. Zeroes the signals before any peer can write them.
  Heap(int64_t pool_bytes, int64_t signal_bytes, int rank, int world, int max_slots);
  ~Heap();
  Heap(const Heap&) = delete;
  Heap& operator=(const Heap&) = delete;

  // Frees the allocation (collective) or forgets it, where the peers are gone.
  void close(bool collective);

  // `offset` bytes into the pool of `rank`, as mapped here.
  char* at(int rank, int64_t offset) const { return bases_[rank] + offset; }
  WindowPlan& windows() { return windows_; }
  int64_t pool_bytes() const { return pool_bytes_; }

 private:
  int64_t pool_bytes_;
  void* base_ = nullptr;
  void* barrier_ = nullptr;
  std::vector<char*> bases_;
  WindowPlan windows_;
};

}  // namespace fast_cp
