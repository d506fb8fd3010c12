#include "runtime/copies.hpp"

#include <algorithm>

#include "fast_cp/error.hpp"
#include "fast_cp/window_plan.hpp"
#include "runtime/signals.hpp"

namespace fast_cp {

namespace {

void check_request(const Request& request, int world) {
  const std::string problem = problem_with(request.shape);
  require(problem.empty(), "exchange '", request.tag, "': ", problem);
  require(request.shape.world == world, "exchange '", request.tag, "': ", request.shape.world,
          " sequence lengths were given and the runtime has ", world, " ranks");
  require(request.shape.num_chunks() <= kMaxChunks, "exchange '", request.tag, "': at most ", kMaxChunks,
          " chunks, not ", request.shape.num_chunks());
  const std::vector<int64_t>& weights = request.shape.chunks;
  const bool equal = std::equal(weights.begin() + 1, weights.end(), weights.begin());
  require(!request.ticket || equal, "exchange '", request.tag,
          "': a ticket was asked for chunks of different weights; give them equal weights");
  require(!request.ticket || !request.returning, "exchange '", request.tag, "': there are no tickets for the way back");
  require(!request.tag.empty(), "an exchange needs a tag that names its window");
}

// Places the windows of all roles one after the other. Sizes are those of the rank that needs most: the same
// everywhere.
void lay_out(CopyPlan& plan) {
  for (int role = 0; role < kRoles; ++role) {
    if (!(plan.pattern.roles >> role & 1u)) continue;
    plan.offsets[role] = plan.bytes;
    plan.bytes += round_up(largest_window_bytes(plan.pattern.shape, role, plan.pattern.text), kWindowAlignment);
  }
}

}  // namespace

std::shared_ptr<const CopyPlan> plan_copies(const Request& request, int rank, int world) {
  check_request(request, world);
  auto plan = std::make_shared<CopyPlan>();
  plan->pattern = request;
  lay_out(*plan);
  const Pattern& p = plan->pattern;
  const std::vector<Copy> copies = p.returning
                                       ? plan_return(p.shape, rank, p.strides[kOutput], p.text)
                                       : plan_send(p.shape, rank, p.strides.data(), p.roles, p.in_place, p.own_chunks);
  plan->chunks.resize(p.shape.num_chunks());
  for (const Copy& copy : copies) {
    plan->chunks[copy.chunk].push_back(copy);
    if (copy.peer == rank) plan->own_chunks |= 1u << copy.chunk;
  }
  plan->peers = p.returning ? peers_in_order(first_of_group(p.shape, rank), p.shape.ulysses, rank)
                            : peers_in_order(0, p.shape.world, rank);
  for (int peer : plan->peers) {
    if (peer != rank) plan->peer_mask |= 1u << peer;
  }
  return plan;
}

}  // namespace fast_cp
