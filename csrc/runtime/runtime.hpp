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
  bool remove_waits = false;                // a test's hook
  bool managed_capture = false;             // graphs captured now are dropped by the caller when windows change places
  std::map<std::string, Channel> channels;  // by tag
  std::vector<std::string> tag_of_slot;     // for sentences
  CopyList copy_list;                       // of the call that runs: kept, so that its memory is
};

}  // namespace fast_cp
