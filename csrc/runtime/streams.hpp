// Side streams that carry payloads, so that the caller's stream goes on computing. All forks and joins are events, so
// they can be captured in a CUDA graph.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace fast_cp {

// What an event of a chunk stands for: the rank's own copies, an armed wait; of chunk 0 also: start's kernel, and (as
// armed) the wait beside a reader that waits by itself.
enum Mark : int { kOwnCopied = 0, kArmed = 1, kBegun = 2 };
constexpr int kMarks = 3;

// The most streams to peers. A captured call is a graph with a branch for each of them, for the rank's own copies, for a
// wait and for the caller; a reader that spins while a copy is queued behind it would never end, so there must be
// fewer branches than a GPU has queues (8, unless CUDA_DEVICE_MAX_CONNECTIONS says otherwise).
constexpr int kMostPeerStreams = 3;

class Streams {
 public:
  // `peer_streams` (at least one) carry what goes to the peers, who take them in turn, counted from this rank on. The
  // rank's own copies have a stream of their own.
  Streams(int rank, int world, int peer_streams);
  ~Streams();
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;

  cudaStream_t to_peer(int peer) const { return streams_[lane_[peer]]; }
  // A stream for waits that are launched before they are needed.
  cudaStream_t arming() const { return streams_.back(); }

  // Everything on `stream` so far comes before what the streams to the peers in `mask` carry next.
  void fork(cudaStream_t stream, uint32_t mask);
  // The same for more streams, where nothing has come to the caller's stream since.
  void fork_more(uint32_t mask);
  // Everything that the forked streams carry so far comes before what `stream` runs next.
  void join(cudaStream_t stream, uint32_t mask);
  // `later` goes on after everything that is on `earlier` now.
  void order(cudaStream_t earlier, cudaStream_t later);

  // The peers that share the stream of `peer`, itself included: a bit each.
  uint32_t peers_beside(int peer) const;

  // Events of one slot, made at first use.
  cudaEvent_t event(int slot, int chunk, Mark kind);

 private:
  uint32_t lanes(uint32_t mask) const;  // a bit per stream
  void hold(cudaEvent_t event, uint32_t mask);

  std::vector<cudaStream_t> streams_;
  std::vector<int> lane_;           // the stream of each peer
  std::vector<cudaEvent_t> joins_;  // one per stream
  cudaEvent_t fork_ = nullptr;
  std::vector<std::vector<cudaEvent_t>> slot_events_;
};

}  // namespace fast_cp
