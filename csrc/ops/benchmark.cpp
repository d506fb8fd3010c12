// What the benchmarks and the doctor measure: a bare copy to a peer, and the round trip of a flag. No exchange uses
// them.
#include <torch/csrc/stable/ops.h>

#include "fast_cp/error.hpp"
#include "ops/checks.hpp"
#include "ops/operators.hpp"
#include "runtime/cuda.hpp"
#include "transfer/copy_engine.hpp"
#include "transfer/sm.hpp"
#include "transfer/tma.hpp"

namespace fast_cp {

Transfer transfer_named(const std::string& name) {
  if (name == "ce") return Transfer::kCopyEngine;
  if (name == "sm") return Transfer::kSm;
  if (name == "tma") return Transfer::kTma;
  fail("transfer '", name, "' is not known here; choose ce (copy engine), sm or tma");
}

namespace ops {

namespace {

int checked_peer(const Runtime& runtime, int64_t peer) {
  require(peer >= 0 && peer < runtime.settings.world && peer != runtime.settings.rank, "rank ", peer,
          " is not a peer of rank ", runtime.settings.rank, " among ", runtime.settings.world);
  return int(peer);
}

// On the caller's stream, unannounced: callers put a barrier around it. Returns the peer-written window of this rank.
Tensor peer_copy(Tensor src, int64_t peer_rank, Text tag, Text transfer) {
  Session session;
  Runtime& runtime = session.runtime;
  const int peer = checked_peer(runtime, peer_rank);
  const View view = view_of(runtime, src, "src");
  const int64_t bytes = view.batch * view.rows * view.heads * view.head_bytes();
  const Grant grant = runtime.heap.windows().acquire(tag, bytes);
  CopyList list{{view.data, runtime.heap.at(peer, grant.offset), view.strides.row, view.heads * view.head_bytes(),
                 view.heads * view.head_bytes(), view.rows, view.strides.batch,
                 view.rows * view.heads * view.head_bytes(), view.batch}};
  const cudaStream_t stream = runtime.stream();
  switch (transfer_named(transfer)) {
    case Transfer::kCopyEngine:
      copy_engine::enqueue(list, stream);
      break;
    case Transfer::kSm:
      sm::enqueue(list, stream);
      break;
    case Transfer::kTma:
      tma::enqueue(list, stream);
      break;
  }
  const Ints sizes{view.batch, view.rows, view.heads, view.head_dim};
  const Ints strides{view.rows * view.heads * view.head_dim, view.heads * view.head_dim, view.head_dim, 1};
  return torch::stable::from_blob(runtime.heap.at(runtime.settings.rank, grant.offset), sizes, strides,
                                  torch::stable::Device(torch::headeronly::DeviceType::CUDA, runtime.settings.device),
                                  view.dtype);
}

// "kernel": one kernel stores and polls. "ce": announced by copy engine and awaited by a kernel, as exchanges do it.
void round_trip(int64_t peer_rank, int64_t count, Text by) {
  Session session;
  Runtime& runtime = session.runtime;
  const int peer = checked_peer(runtime, peer_rank);
  const cudaStream_t stream = runtime.stream();
  require(by == "kernel" || by == "ce", "a round trip goes by kernel or ce, not by '", by, "'");
  runtime.tag_of_slot[kBenchmarkSlot] = "round_trip";
  if (by == "kernel") return runtime.signals.round_trips(peer, int(count), stream);
  const bool first = runtime.settings.rank < peer;
  for (int64_t i = 0; i < count; ++i) {
    runtime.signals.begin(kBenchmarkSlot, kBenchmarkSlot, 0, nullptr, stream);
    if (first) runtime.signals.publish_arrival(kBenchmarkSlot, 0, peer, stream);
    runtime.signals.wait_arrivals(kBenchmarkSlot, 0, 1, 1u << peer, stream);
    if (!first) runtime.signals.publish_arrival(kBenchmarkSlot, 0, peer, stream);
  }
}

}  // namespace

std::vector<Operator> benchmark_operators() {
  return {
      {"fast_cp_peer_copy(Tensor src, int peer, str tag=\"peer_copy\", str transfer=\"ce\") -> Tensor",
       TORCH_BOX(&peer_copy)},
      {"fast_cp_round_trip(int peer, int count=1, str by=\"kernel\") -> ()", TORCH_BOX(&round_trip)},
  };
}

}  // namespace ops
}  // namespace fast_cp
