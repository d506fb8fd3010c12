// A request, and the copies that it needs: planned once, since the next request of a tag is usually the same.
#pragma once

#include <array>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "fast_cp/copy_plan.hpp"
#include "transfer/transfer.hpp"

namespace fast_cp {

// What decides which copies are made. Requests with equal patterns differ in addresses alone.
struct Pattern {
  Exchange shape;
  bool returning = false;  // the output's way back; else Q, K, V
  bool text = false;       // the way back carries the rows of replicated text
  bool in_place = false;   // the sources are this rank's rows of its own windows
  int own_chunks = -1;     // chunks whose own K and V rows are copied into the rank's own windows; -1: all
  bool ticket = false;     // whoever reads the windows waits by itself (runtime/ticket.hpp)
  unsigned roles = 0;      // a bit per Role
  std::array<SourceStrides, kRoles> strides{};

  auto tied() const { return std::tie(shape, returning, text, in_place, own_chunks, ticket, roles, strides); }
  bool operator==(const Pattern& other) const { return tied() == other.tied(); }
};

struct Request : Pattern {
  std::string tag;
  Transfer transfer = Transfer::kCopyEngine;
  int generation = -1;     // of the window: 0 or 1; -1: take turns
  // Promised: the uses of this tag take the generations in turn, among the same peers, and each waits for all chunks.
  // Then whoever has sent use n - 1 has read use n - 2, and what has arrived of n - 1 says so: nobody need be asked.
  bool in_turn = false;
  bool lazy_done = false;  // done is implied by the next start with this tag
  const char* sources[kRoles] = {};
  std::vector<std::shared_ptr<void>> keep;  // what must not be freed while copies read it
};

struct CopyPlan {
  Pattern pattern;               // what it was made for
  int64_t bytes = 0;             // of all windows together
  int64_t offsets[kRoles] = {};  // of each role's window, from the first one
  std::vector<std::vector<Copy>> chunks;
  std::vector<int> peers;   // in the order of sending
  uint32_t peer_mask = 0;   // those this rank exchanges with, itself excluded
  uint32_t own_chunks = 0;  // a bit per chunk of which the rank copies something to itself
  int num_chunks() const { return int(chunks.size()); }
  bool copies_own(int chunk) const { return own_chunks >> chunk & 1u; }
};

// Throws a sentence where the request makes no sense for `world` ranks.
std::shared_ptr<const CopyPlan> plan_copies(const Request& request, int rank, int world);

}  // namespace fast_cp
