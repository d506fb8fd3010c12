// The state of this process: one runtime, made by `create` and ended by `destroy`.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "runtime/exchange.hpp"
#include "runtime/heap.hpp"
#include "runtime/signals.hpp"
#include "runtime/streams.hpp"

namespace fast_cp {

struct Settings {
  int rank, world, device;
  int64_t pool_bytes, timeout_ms;
  std::string unique_id;
};

class Runtime {
 public:
  explicit Runtime(const Settings& settings);

  // Throws a sentence where the settings are wrong, or where this process has a runtime already. Collective.
  static Runtime& create(const Settings& settings);
  static Runtime& get();  // throws a sentence where there is none
  static bool exists();
  // With `collective` all ranks call it and all memory is given back; without, the peers may be dead: nothing waits.
  static void destroy(bool collective);
  static std::mutex& mutex();

  // Throws the sentence of the first wait that gave up, if one has.
  void check() const;
  std::string error_sentence() const;
  cudaStream_t stream() const;

  const Settings settings;
  Heap heap;
  Signals signals;
  Streams streams;
  bool remove_waits = false;                 // a test's hook
  std::map<std::string, OpenExchange> open;  // by tag
  std::vector<std::string> tag_of_slot;
  std::vector<cudaStream_t> stream_of_slot;  // the stream that used a slot last
  std::vector<bool> slot_used;
  std::vector<bool> closed_in_capture;  // its done was recorded in a graph, and has not happened yet
};

}  // namespace fast_cp
