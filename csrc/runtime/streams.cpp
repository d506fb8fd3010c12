#include "runtime/streams.hpp"

#include "runtime/cuda.hpp"
#include "runtime/signals.hpp"

namespace fast_cp {

namespace {

cudaEvent_t new_event() {
  cudaEvent_t event;
  cuda_check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "creating an event");
  return event;
}

}  // namespace

Streams::Streams(int rank, int world, int peer_streams) {
  int least = 0, greatest = 0;
  cuda_check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "asking for stream priorities");
  for (int peer = 0; peer < world; ++peer)
    lane_.push_back(peer == rank ? 0 : 1 + (peer - rank - 1 + world) % world % peer_streams);
  for (int i = 0; i <= 1 + peer_streams; ++i) {  // the first one is for the rank's own copies, the last for armed waits
    cudaStream_t stream;
    cuda_check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest), "creating a stream");
    streams_.push_back(stream);
    joins_.push_back(new_event());
  }
  fork_ = new_event();
  slot_events_.resize(kMaxSlots);
}

Streams::~Streams() {
  for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
  for (cudaEvent_t event : joins_) cudaEventDestroy(event);
  for (const auto& events : slot_events_) {
    for (cudaEvent_t event : events) cudaEventDestroy(event);
  }
  cudaEventDestroy(fork_);
}

uint32_t Streams::lanes(uint32_t mask) const {
  uint32_t lanes = 0;
  for (size_t peer = 0; peer < lane_.size(); ++peer) {
    if (mask >> peer & 1u) lanes |= 1u << lane_[peer];
  }
  return lanes;
}

uint32_t Streams::peers_beside(int peer) const {
  uint32_t peers = 0;
  for (size_t other = 0; other < lane_.size(); ++other) {
    if (lane_[other] == lane_[peer]) peers |= 1u << other;
  }
  return peers;
}

void Streams::hold(cudaEvent_t event, uint32_t mask) {
  const uint32_t held = lanes(mask);
  for (size_t lane = 0; lane < streams_.size(); ++lane) {
    if (held >> lane & 1u) cuda_check(cudaStreamWaitEvent(streams_[lane], event), "forking to the side streams");
  }
}

void Streams::fork(cudaStream_t stream, uint32_t mask) {
  cuda_check(cudaEventRecord(fork_, stream), "forking to the side streams");
  hold(fork_, mask);
}

void Streams::fork_more(uint32_t mask) { hold(fork_, mask); }

void Streams::join(cudaStream_t stream, uint32_t mask) {
  const uint32_t joined = lanes(mask);
  for (size_t lane = 0; lane < streams_.size(); ++lane) {
    if (!(joined >> lane & 1u)) continue;
    cuda_check(cudaEventRecord(joins_[lane], streams_[lane]), "joining the side streams");
    cuda_check(cudaStreamWaitEvent(stream, joins_[lane]), "joining the side streams");
  }
}

void Streams::order(cudaStream_t earlier, cudaStream_t later) {
  cuda_check(cudaEventRecord(fork_, earlier), "ordering two streams");
  cuda_check(cudaStreamWaitEvent(later, fork_), "ordering two streams");
}

cudaEvent_t Streams::event(int slot, int chunk, Mark kind) {
  std::vector<cudaEvent_t>& events = slot_events_[slot];
  while (events.size() < size_t(kMarks * (chunk + 1))) events.push_back(new_event());
  return events[kMarks * chunk + kind];
}

}  // namespace fast_cp
