// Which part of the pool each window gets. Plain C++17: the same calls in the same order give the same answer on every
// rank, so no rank has to ask another. Tested with g++ alone.
//
// A tag names a window. It is as large as the largest request so far (its high water), with an eighth to spare once it
// has grown and where that costs no window its second generation: requests creep up with the lengths of prompts, and
// captured graphs are lost when windows move. It exists in two generations where the pool allows, so that a rank may
// fill one while its peers still read the other. Each generation has a slot: the number of its signals. A generation
// that a captured CUDA graph uses is pinned: it never moves again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace fast_cp {

constexpr int64_t kWindowAlignment = 4096;
constexpr int64_t kSpare = 8;  // one part in so many

struct Region {
  int64_t offset, bytes;
};

struct Generation {
  int slot = -1;
  int64_t offset = -1;  // -1: the pool had no room for it
  bool pinned = false;
  bool open = false;  // in use between start and done; must not move
  bool fixed() const { return offset >= 0 && (pinned || open); }
};

struct Window {
  std::string tag;
  int64_t bytes = 0;
  int turn = 1;  // the generation used last
  std::array<Generation, 2> generations;
};

// What a call asks of its window.
struct Wanted {
  int generation = -1;     // 0 or 1; -1: take turns
  bool capturing = false;  // a CUDA graph records this call: no window may change places for it
  bool pin = false;        // what is granted never moves again
};

struct Grant {
  int slot = -1;
  int sibling = -1;  // the slot of the tag's other generation
  int64_t offset = -1;
  bool both = false;         // there is room for two generations, and neither is a graph's
  bool moved = false;        // the pool was cut anew: wait until every reader of the old places is done
  std::vector<int> movable;  // then: the slots of all that did not have to stay where it was
};

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// First fit of `bytes` between `begin` and `end` beside the regions already taken; -1 where nothing fits.
inline int64_t place(int64_t begin, int64_t end, std::vector<Region>& taken, int64_t bytes) {
  std::sort(taken.begin(), taken.end(), [](const Region& a, const Region& b) { return a.offset < b.offset; });
  int64_t cursor = begin;
  for (const Region& region : taken) {
    if (cursor + bytes <= region.offset) break;
    cursor = std::max(cursor, region.offset + region.bytes);
  }
  if (cursor + bytes > end) return -1;
  taken.push_back({cursor, bytes});
  return cursor;
}

class WindowPlan {
 public:
  WindowPlan(int64_t begin, int64_t end, int max_slots) : begin_(begin), end_(end), max_slots_(max_slots) {}

  // A generation of `tag`, at least `bytes` large. Where the pool has room for one generation only, it is that one.
  // Throws std::runtime_error with a sentence and changes nothing where that cannot be.
  Grant acquire(const std::string& tag, int64_t bytes, const Wanted& wanted = {}) {
    Window* window = find(tag);
    if (window && bytes <= window->bytes) return take(*window, wanted);
    if (wanted.capturing) {
      throw std::runtime_error("window '" + tag + "' needs " + std::to_string(bytes) + " bytes and has " +
                               std::to_string(window ? window->bytes : 0) +
                               "; run this shape once before capturing it in a CUDA graph");
    }
    WindowPlan trial = grown(tag, bytes);
    if (window) {
      try {
        WindowPlan ample = grown(tag, bytes + bytes / kSpare);
        if (ample.num_generations() == trial.num_generations()) trial = std::move(ample);
      } catch (const std::runtime_error&) {  // there is no room to spare
      }
    }
    if (trial.moved_since(*this)) ++trial.version_;
    std::vector<int> movable = movable_slots();
    *this = std::move(trial);
    Grant grant = take(*find(tag), wanted);
    grant.moved = true, grant.movable = std::move(movable);
    return grant;
  }

  void set_open(int slot, bool open) {
    if (Generation* generation = find(slot)) generation->open = open;
  }
  // Grows whenever a window that was there changes places: a graph captured before must not be replayed after.
  int64_t version() const { return version_; }
  const std::vector<Window>& windows() const { return windows_; }

 private:
  WindowPlan grown(const std::string& tag, int64_t bytes) const {
    WindowPlan plan = *this;
    plan.grow(plan.window_named(tag), round_up(std::max<int64_t>(bytes, 1), kWindowAlignment));
    return plan;
  }

  int num_generations() const {
    int count = 0;
    for (const Window& window : windows_) {
      for (const Generation& g : window.generations) count += g.offset >= 0;
    }
    return count;
  }

  static Grant take(Window& window, const Wanted& wanted) {
    const int turn = wanted.generation < 0 ? 1 - window.turn : wanted.generation;
    window.turn = window.generations[1].offset >= 0 ? turn : 0;
    Generation& generation = window.generations[window.turn];
    generation.pinned |= wanted.pin;
    const Generation& other = window.generations[1 - window.turn];
    return {generation.slot, other.slot, generation.offset, other.offset >= 0 && !generation.pinned && !other.pinned, false, {}};
  }

  // Slots whose readers must be done before windows change places: all but those that stay where they are.
  std::vector<int> movable_slots() const {
    std::vector<int> slots;
    for (const Window& window : windows_) {
      for (const Generation& g : window.generations) {
        if (!g.pinned && !g.open) slots.push_back(g.slot);
      }
    }
    return slots;
  }

  bool moved_since(const WindowPlan& before) const {
    for (size_t w = 0; w < before.windows_.size(); ++w) {
      for (int i : {0, 1}) {
        const Generation &then = before.windows_[w].generations[i], &now = windows_[w].generations[i];
        if (then.slot != now.slot || then.offset != now.offset) return true;
      }
    }
    return false;
  }

  Window& window_named(const std::string& tag) {
    if (Window* window = find(tag)) return *window;
    windows_.emplace_back();
    windows_.back().tag = tag;
    for (Generation& generation : windows_.back().generations) generation.slot = new_slot(tag);
    return windows_.back();
  }

  int new_slot(const std::string& tag) {
    if (slots_ >= max_slots_) {
      throw std::runtime_error("window '" + tag + "' needs signals, and all " + std::to_string(max_slots_) +
                               " slots are taken; use fewer tags, or capture fewer shapes in CUDA graphs");
    }
    return slots_++;
  }

  void grow(Window& window, int64_t bytes) {
    for (Generation& generation : window.generations) {
      if (generation.open) throw std::runtime_error("window '" + window.tag + "' cannot grow while it is in use");
      if (generation.pinned) {  // a captured graph still writes there: leave it, and take a new one
        retired_.push_back({generation.offset, window.bytes});
        generation = Generation{};
        generation.slot = new_slot(window.tag);
      }
    }
    window.bytes = bytes;
    window.turn = 1;
    cut();
  }

  // Cuts the pool anew around what must stay: first one generation of every window, then second ones while they fit.
  void cut() {
    std::vector<Region> taken = retired_;
    for (Window& window : windows_) {
      for (Generation& g : window.generations) {
        if (g.fixed())
          taken.push_back({g.offset, window.bytes});
        else
          g.offset = -1;
      }
    }
    for (Window& window : windows_) {
      if (window.bytes == 0 || has_place(window)) continue;
      window.generations[0].offset = place(begin_, end_, taken, window.bytes);
      if (window.generations[0].offset < 0) throw std::runtime_error(too_small(window));
    }
    for (Window& window : windows_) {
      if (window.bytes == 0) continue;
      for (Generation& g : window.generations) {
        if (g.offset < 0) g.offset = place(begin_, end_, taken, window.bytes);
      }
      if (window.generations[0].offset < 0) std::swap(window.generations[0], window.generations[1]);
    }
  }

  static bool has_place(const Window& w) { return w.generations[0].offset >= 0 || w.generations[1].offset >= 0; }

  std::string too_small(const Window& window) const {
    int64_t needed = begin_;
    for (const Region& region : retired_) needed += region.bytes;
    for (const Window& w : windows_) {
      int pinned = 0;
      for (const Generation& g : w.generations) pinned += g.fixed();
      needed += w.bytes * std::max(1, pinned);
    }
    if (needed <= end_) needed = end_ + window.bytes;  // enough in sum, but what must not move cuts it up
    return "the symmetric pool of " + std::to_string(end_) + " bytes has no room for window '" + window.tag + "' of " +
           std::to_string(window.bytes) + " bytes; pass pool_bytes=" + std::to_string(needed) +
           " or more to init_fast_cp";
  }

  Window* find(const std::string& tag) {
    for (Window& window : windows_) {
      if (window.tag == tag) return &window;
    }
    return nullptr;
  }

  Generation* find(int slot) {
    for (Window& window : windows_) {
      for (Generation& generation : window.generations) {
        if (generation.slot == slot) return &generation;
      }
    }
    return nullptr;
  }

  int64_t begin_, end_;
  int max_slots_;
  int slots_ = 0;
  std::vector<Window> windows_;
  std::vector<Region> retired_;  // pinned by graphs whose window has grown since
  int64_t version_ = 0;
};

}  // namespace fast_cp
