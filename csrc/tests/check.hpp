// What both tests share: count, report, and a small generator of random numbers that is the same everywhere.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>

inline int failures = 0;

inline void check(bool ok, const std::string& what) {
  if (ok) return;
  if (++failures <= 20) std::fprintf(stderr, "FAILED: %s\n", what.c_str());
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed * 2654435769u + 88172645463325252u) {}
  int64_t below(int64_t n) {
    state_ ^= state_ << 13, state_ ^= state_ >> 7, state_ ^= state_ << 17;
    return int64_t(state_ % uint64_t(n));
  }
  int64_t between(int64_t low, int64_t high) { return low + below(high - low + 1); }

 private:
  uint64_t state_;
};
