#include "runtime/exchange.hpp"

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/runtime.hpp"
#include "transfer/copy_engine.hpp"
#include "transfer/sm.hpp"
#include "transfer/tma.hpp"

namespace fast_cp {

namespace {

// The caller's stream, after whatever stream used `slot` last. Streams that are (not) being captured in a CUDA graph do
// not mix with others; then the order is the caller's business.
cudaStream_t stream_for(Runtime& runtime, int slot) {
  const cudaStream_t stream = runtime.stream();
  cudaStream_t& last = runtime.stream_of_slot[slot];
  if (runtime.slot_used[slot] && last != stream && is_capturing(last) == is_capturing(stream))
    runtime.streams.order(last, stream);
  last = stream;
  runtime.slot_used[slot] = true;
  return stream;
}

void check_request(const Runtime& runtime, const Request& request) {
  const std::string problem = problem_with(request.shape);
  require(problem.empty(), "exchange '", request.tag, "': ", problem);
  require(request.shape.world == runtime.settings.world, "exchange '", request.tag, "': ", request.shape.world,
          " sequence lengths were given and the runtime has ", runtime.settings.world, " ranks");
  require(request.shape.num_chunks <= kMaxChunks, "exchange '", request.tag, "': at most ", kMaxChunks, " chunks, not ",
          request.shape.num_chunks);
  require(!request.tag.empty(), "an exchange needs a tag that names its window");
}

// Places the windows of all roles one after the other. Sizes are those of the rank that needs most: the same
// everywhere.
int64_t lay_out(const Request& request, int64_t offsets[kRoles]) {
  int64_t total = 0;
  for (int role = 0; role < kRoles; ++role) {
    if (!(request.roles >> role & 1u)) continue;
    offsets[role] = total;
    total += round_up(largest_window_bytes(request.shape, role, request.text), kWindowAlignment);
  }
  return total;
}

void plan_copies(OpenExchange& x, int rank) {
  const Request& r = x.request;
  const std::vector<Copy> plan = r.returning ? plan_return(r.shape, rank, r.strides[kOutput], r.text)
                                             : plan_send(r.shape, rank, r.strides, r.roles, r.in_place);
  x.chunks.resize(r.shape.num_chunks);
  for (const Copy& copy : plan) x.chunks[copy.chunk].push_back(copy);
  x.peers = r.returning ? peers_in_order(first_of_group(r.shape, rank), r.shape.ulysses, rank)
                        : peers_in_order(0, r.shape.world, rank);
  for (int peer : x.peers) {
    if (peer != rank) x.peer_mask |= 1u << peer;
  }
  for (auto* flags : {&x.sent, &x.waited, &x.armed, &x.own_event}) flags->assign(r.shape.num_chunks, 0);
}

DeviceCopy resolve(const Runtime& runtime, const OpenExchange& x, const Copy& c) {
  return {x.request.sources[c.role] + c.src_offset,
          runtime.heap.at(c.peer, x.offsets[c.role] + c.dst_offset),
          c.src_pitch,
          c.dst_pitch,
          c.row_bytes,
          c.rows,
          c.src_batch,
          c.dst_batch,
          c.batches};
}

CopyList copies_of(const Runtime& runtime, const OpenExchange& x, int chunk, int peer = -1) {
  CopyList list;
  for (const Copy& copy : x.chunks[chunk]) {
    if (peer < 0 || copy.peer == peer) list.push_back(resolve(runtime, x, copy));
  }
  return list;
}

void record_own(Runtime& runtime, OpenExchange& x, int chunk, cudaStream_t stream) {
  cuda_check(cudaEventRecord(runtime.streams.event(x.slot, chunk, 0), stream), "marking the rank's own copies");
  x.own_event[chunk] = 1;
}

void send_by_copy_engine(Runtime& runtime, OpenExchange& x, int chunk) {
  const int rank = runtime.settings.rank;
  for (int peer : x.peers) {
    const cudaStream_t stream = runtime.streams.to_peer(peer);
    const CopyList list = copies_of(runtime, x, chunk, peer);
    copy_engine::enqueue(list, stream);
    if (peer != rank)
      runtime.signals.publish_arrival(x.slot, chunk, peer, stream);
    else if (!list.empty())
      record_own(runtime, x, chunk, stream);
  }
}

// All tensors and peers in one launch, on one stream.
void send_by_kernel(Runtime& runtime, OpenExchange& x, int chunk) {
  const cudaStream_t stream = runtime.streams.to_peer(x.peers.front());
  const CopyList list = copies_of(runtime, x, chunk);
  x.request.transfer == Transfer::kSm ? sm::enqueue(list, stream) : tma::enqueue(list, stream);
  for (int peer : x.peers) {
    if (peer != runtime.settings.rank) runtime.signals.publish_arrival(x.slot, chunk, peer, stream);
  }
  record_own(runtime, x, chunk, stream);
}

void publish_consumed(Runtime& runtime, int slot, cudaStream_t stream) {
  runtime.closed_in_capture[slot] = is_capturing(stream);
  for (int step = 1; step < runtime.settings.world; ++step) {
    runtime.signals.publish_consumed(slot, (runtime.settings.rank + step) % runtime.settings.world, stream);
  }
}

void check_chunk(const OpenExchange& x, int chunk) {
  require(chunk >= 0 && chunk < x.request.shape.num_chunks, "exchange '", x.request.tag, "' has chunks 0 to ",
          x.request.shape.num_chunks - 1, ", not ", chunk);
}

// Closes the former use of this tag where the caller left that to the next one.
void close_former(Runtime& runtime, const std::string& tag) {
  const auto former = runtime.open.find(tag);
  if (former == runtime.open.end()) return;
  require(former->second.request.lazy_done, "exchange '", tag,
          "' was started again before done; call done after the last read of its windows");
  finish_exchange(runtime, tag);
}

Grant take_window(Runtime& runtime, const Request& request, int64_t bytes) {
  const std::vector<int> movable = runtime.heap.windows().movable_slots();
  const Grant grant = runtime.heap.windows().acquire(request.tag, bytes, is_capturing(runtime.stream()));
  if (grant.moved) {  // windows changed places: nobody may still read, and no stream still use, the old ones
    for (int slot : movable) {
      const cudaStream_t stream = stream_for(runtime, slot);
      if (runtime.closed_in_capture[slot]) publish_consumed(runtime, slot, stream);
    }
    runtime.signals.drain(movable, runtime.stream());
  }
  runtime.tag_of_slot[grant.slot] = request.tag;
  return grant;
}

}  // namespace

OpenExchange& start_exchange(Runtime& runtime, Request request) {
  runtime.check();
  check_request(runtime, request);
  close_former(runtime, request.tag);
  OpenExchange x;
  const int64_t bytes = lay_out(request, x.offsets);
  const Grant grant = take_window(runtime, request, bytes);
  x.slot = grant.slot;
  x.request = std::move(request);
  for (int role = 0; role < kRoles; ++role) {
    if (!(x.request.roles >> role & 1u)) continue;
    x.offsets[role] += grant.offset;
    x.windows[role] = runtime.heap.at(runtime.settings.rank, x.offsets[role]);
    if (x.request.in_place) x.request.sources[role] = x.windows[role];
  }
  plan_copies(x, runtime.settings.rank);
  const cudaStream_t stream = stream_for(runtime, x.slot);
  // A replayed graph has no call in between that would say that its former replay's readers are done: they are, in the
  // order of the stream, when this call runs.
  const bool unsaid = runtime.heap.windows().pinned(x.slot) || runtime.closed_in_capture[x.slot];
  if (x.request.lazy_done && unsaid) publish_consumed(runtime, x.slot, stream);
  runtime.signals.begin(x.slot, (1u << runtime.settings.world) - 1, stream);
  runtime.heap.windows().set_open(x.slot, true);
  const std::string tag = x.request.tag;
  return runtime.open[tag] = std::move(x);
}

OpenExchange& open_exchange(Runtime& runtime, const std::string& tag) {
  runtime.check();
  const auto found = runtime.open.find(tag);
  require(found != runtime.open.end(), "exchange '", tag, "' is not open; start it first");
  return found->second;
}

void send_chunks(Runtime& runtime, OpenExchange& x, int first, int last) {
  const cudaStream_t stream = stream_for(runtime, x.slot);
  const bool by_copy_engine = x.request.transfer == Transfer::kCopyEngine;
  uint32_t lanes = 0;
  for (int peer : x.peers) {
    if (peer != runtime.settings.rank || !x.request.in_place) lanes |= 1u << peer;
  }
  if (!by_copy_engine) lanes = 1u << x.peers.front();
  runtime.streams.fork(stream, lanes);
  x.forked |= lanes;
  for (int chunk = first; chunk < last; ++chunk) {
    check_chunk(x, chunk);
    require(!x.sent[chunk], "chunk ", chunk, " of exchange '", x.request.tag, "' was sent already");
    by_copy_engine ? send_by_copy_engine(runtime, x, chunk) : send_by_kernel(runtime, x, chunk);
    x.sent[chunk] = 1;
  }
}

void wait_chunk(Runtime& runtime, OpenExchange& x, int chunk) {
  check_chunk(x, chunk);
  require(x.sent[chunk], "chunk ", chunk, " of exchange '", x.request.tag,
          "' is awaited and was not sent by this rank; send it first");
  const cudaStream_t stream = stream_for(runtime, x.slot);
  if (x.own_event[chunk])
    cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, chunk, 0)),
               "waiting for the rank's own copies");
  if (x.armed[chunk]) {
    cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, chunk, 1)), "waiting for an armed chunk");
  } else if (!runtime.remove_waits) {
    runtime.signals.wait_arrival(x.slot, chunk, x.peer_mask, stream);
  }
  x.waited[chunk] = 1;
}

void arm_chunk(Runtime& runtime, OpenExchange& x, int chunk) {
  check_chunk(x, chunk);
  require(!x.armed[chunk], "chunk ", chunk, " of exchange '", x.request.tag, "' is armed already");
  runtime.streams.fork_arming(stream_for(runtime, x.slot));
  const cudaStream_t arming = runtime.streams.arming();
  if (!runtime.remove_waits) runtime.signals.wait_arrival(x.slot, chunk, x.peer_mask, arming);
  cuda_check(cudaEventRecord(runtime.streams.event(x.slot, chunk, 1), arming), "arming a wait");
  x.armed[chunk] = 1;
}

void join_exchange(Runtime& runtime, OpenExchange& x) {
  if (!x.forked) return;
  runtime.streams.join(stream_for(runtime, x.slot), x.forked);
  x.forked = 0;
  x.request.keep.clear();  // memory freed from here on is reused after the copies, in the order of the stream
}

void finish_exchange(Runtime& runtime, const std::string& tag) {
  OpenExchange& x = open_exchange(runtime, tag);
  for (int chunk = 0; chunk < x.request.shape.num_chunks; ++chunk) {
    if (!x.sent[chunk]) send_chunks(runtime, x, chunk, chunk + 1);
    if (!x.waited[chunk]) wait_chunk(runtime, x, chunk);
  }
  join_exchange(runtime, x);
  publish_consumed(runtime, x.slot, stream_for(runtime, x.slot));
  runtime.heap.windows().set_open(x.slot, false);
  runtime.open.erase(tag);
}

}  // namespace fast_cp
