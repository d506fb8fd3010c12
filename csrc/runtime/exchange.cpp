#include "runtime/exchange.hpp"

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/runtime.hpp"
#include "runtime/ticket.hpp"
#include "transfer/copy_engine.hpp"
#include "transfer/sm.hpp"
#include "transfer/tma.hpp"

namespace fast_cp {

namespace {

// Puts `stream` after whatever stream used the tag last. Streams that are (not) being captured in a CUDA graph do not
// mix with others; then the order is the caller's business.
void follow(Runtime& runtime, Channel& channel, cudaStream_t stream) {
  const std::optional<cudaStream_t> last = channel.stream;
  if (last == stream) return;
  if (last && is_capturing(*last) == is_capturing(stream)) runtime.streams.order(*last, stream);
  channel.stream = stream;
}

// The caller's stream, in order with the tag's former uses.
cudaStream_t stream_for(Runtime& runtime, const OpenExchange& x) {
  const cudaStream_t stream = runtime.stream();
  follow(runtime, runtime.channels[x.request.tag], stream);
  return stream;
}

CopyList& copies_of(Runtime& runtime, const OpenExchange& x, int chunk, int peer = -1) {
  runtime.copy_list.clear();
  for (const Copy& c : x.plan->chunks[chunk]) {
    if (peer >= 0 && c.peer != peer) continue;
    runtime.copy_list.push_back({x.request.sources[c.role] + c.src_offset,
                                 runtime.heap.at(c.peer, x.offsets[c.role] + c.dst_offset), c.src_pitch, c.dst_pitch,
                                 c.row_bytes, c.rows, c.src_batch, c.dst_batch, c.batches});
  }
  return runtime.copy_list;
}

void mark(Runtime& runtime, OpenExchange& x, int chunk, Mark kind, cudaStream_t stream) {
  cuda_check(cudaEventRecord(runtime.streams.event(x.slot, chunk, kind), stream), "marking how far a stream has come");
  if (kind == kOwnCopied) x.last_marked = chunk;
}

// Puts the stream to `peer` after start's kernel, once.
void after_begin(Runtime& runtime, OpenExchange& x, int peer) {
  if (x.after_begin >> peer & 1u) return;
  cuda_check(cudaStreamWaitEvent(runtime.streams.to_peer(peer), runtime.streams.event(x.slot, 0, kBegun)),
             "waiting for the start of an exchange");
  x.after_begin |= runtime.streams.peers_beside(peer);
}

void send_by_copy_engine(Runtime& runtime, OpenExchange& x, int chunk) {
  const int rank = runtime.settings.rank;
  for (int peer : x.plan->peers) {
    if (peer == rank && !x.plan->copies_own(chunk)) continue;
    const cudaStream_t stream = runtime.streams.to_peer(peer);
    if (peer != rank && !x.free) after_begin(runtime, x, peer);
    copy_engine::enqueue(copies_of(runtime, x, chunk, peer), stream);
    if (peer == rank) {
      mark(runtime, x, chunk, kOwnCopied, stream);
    } else {
      after_begin(runtime, x, peer);
      runtime.signals.publish_arrival(x.slot, chunk, peer, stream);
    }
  }
}

// All tensors and peers in one launch, on one stream.
void send_by_kernel(Runtime& runtime, OpenExchange& x, int chunk) {
  const int first = x.plan->peers.front();
  const cudaStream_t stream = runtime.streams.to_peer(first);
  const CopyList& list = copies_of(runtime, x, chunk);
  if (!x.free) after_begin(runtime, x, first);
  x.request.transfer == Transfer::kSm ? sm::enqueue(list, stream) : tma::enqueue(list, stream);
  after_begin(runtime, x, first);
  for (int peer : x.plan->peers) {
    if (peer != runtime.settings.rank) runtime.signals.publish_arrival(x.slot, chunk, peer, stream);
  }
  x.last_marked = -1;
  if (x.plan->copies_own(chunk)) mark(runtime, x, chunk, kOwnCopied, stream);
}

bool by_copy_engine(const OpenExchange& x) { return x.request.transfer == Transfer::kCopyEngine; }

// The peer on whose stream the rank's own copies are, and all whose streams carry the chunks [first, last): as masks.
uint32_t own_lane(const Runtime& runtime, const OpenExchange& x) {
  return 1u << (by_copy_engine(x) ? runtime.settings.rank : x.plan->peers.front());
}
uint32_t lanes_of(const Runtime& runtime, const OpenExchange& x, int first, int last) {
  if (!by_copy_engine(x)) return own_lane(runtime, x);
  uint32_t lanes = x.plan->peer_mask;
  for (int chunk = first; chunk < last; ++chunk) {
    if (x.plan->copies_own(chunk)) lanes |= own_lane(runtime, x);
  }
  return lanes;
}

// What `stream` must come after before it reads a chunk.
void wait_here(Runtime& runtime, OpenExchange& x, int chunk, cudaStream_t stream) {
  constexpr const char* kDoing = "waiting for a chunk";
  const bool callers = stream == *runtime.channels[x.request.tag].stream;
  if (!callers) cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, 0, kBegun)), kDoing);
  if ((x.sent >> chunk & 1u) && x.plan->copies_own(chunk)) {  // an armed wait may come before its chunk is sent
    cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, chunk, kOwnCopied)), kDoing);
    if (chunk == x.last_marked && callers)
      x.forked &= ~own_lane(runtime, x);  // that was all its stream has carried
  }
  if (!runtime.remove_waits) runtime.signals.wait_arrivals(x.slot, chunk, 1, x.plan->peer_mask, stream);
}

void check_chunk(const OpenExchange& x, int chunk) {
  require(chunk >= 0 && chunk < x.plan->num_chunks(), "exchange '", x.request.tag, "' has chunks 0 to ",
          x.plan->num_chunks() - 1, ", not ", chunk);
}

// Closes the former use of this tag where the caller left that to the next one.
void close_former(Runtime& runtime, const Channel& channel) {
  if (!channel.open) return;
  const Request& former = channel.open->request;
  require(former.lazy_done, "exchange '", former.tag,
          "' was started again before done; call done after the last read of its windows");
  finish_exchange(runtime, former.tag);
}

Grant take_window(Runtime& runtime, const Request& request, int64_t bytes, cudaStream_t stream) {
  const bool capturing = is_capturing(stream), pin = capturing && !runtime.managed_capture;
  Grant grant = runtime.heap.windows().acquire(request.tag, bytes, {request.generation, capturing, pin});
  if (grant.moved) {  // nobody may still read, and no stream still use, the old places
    for (auto& [tag, channel] : runtime.channels) follow(runtime, channel, stream);
    runtime.signals.drain(grant.movable, stream);
  }
  runtime.tag_of_slot[grant.slot] = runtime.tag_of_slot[grant.sibling] = request.tag;
  return grant;
}

// Copies that need not ask the peers go at once: their streams fork before the kernel, and only announcements follow it.
void begin(Runtime& runtime, Channel& channel, OpenExchange& x, const Grant& grant, cudaStream_t stream) {
  x.free = x.request.in_turn && grant.both && (x.plan->peer_mask & ~channel.peers) == 0;
  channel.peers = x.plan->peer_mask;
  runtime.streams.fork(stream, 0);
  const Reader reader = x.request.ticket ? reader_of(runtime, x) : Reader{};
  runtime.signals.begin(x.slot, grant.sibling, x.free ? 0 : (1u << runtime.settings.world) - 1,
                        x.request.ticket ? &reader : nullptr, stream);
  mark(runtime, x, 0, kBegun, stream);
  x.fresh = true;
}

}  // namespace

OpenExchange& start_exchange(Runtime& runtime, Request request) {
  runtime.check();
  Channel& channel = runtime.channels[request.tag];
  close_former(runtime, channel);
  if (!channel.plan || !(channel.plan->pattern == request))
    channel.plan = plan_copies(request, runtime.settings.rank, runtime.settings.world);
  const cudaStream_t stream = runtime.stream();
  const Grant grant = take_window(runtime, request, channel.plan->bytes, stream);
  follow(runtime, channel, stream);
  OpenExchange x;
  x.plan = channel.plan;
  x.slot = grant.slot;
  x.request = std::move(request);
  for (int role = 0; role < kRoles; ++role) {
    if (!(x.request.roles >> role & 1u)) continue;
    x.offsets[role] = grant.offset + x.plan->offsets[role];
    x.windows[role] = runtime.heap.at(runtime.settings.rank, x.offsets[role]);
    if (x.request.in_place) x.request.sources[role] = x.windows[role];
  }
  begin(runtime, channel, x, grant, stream);
  runtime.heap.windows().set_open(x.slot, true);
  return channel.open.emplace(std::move(x));
}

OpenExchange& open_exchange(Runtime& runtime, const std::string& tag) {
  runtime.check();
  const auto found = runtime.channels.find(tag);
  require(found != runtime.channels.end() && found->second.open, "exchange '", tag, "' is not open; start it first");
  found->second.open->fresh = false;
  return *found->second.open;
}

void send_chunks(Runtime& runtime, OpenExchange& x, int first, int last) {
  for (int chunk = first; chunk < last; ++chunk) {
    check_chunk(x, chunk);
    require(!(x.sent >> chunk & 1u), "chunk ", chunk, " of exchange '", x.request.tag, "' was sent already");
  }
  const uint32_t lanes = lanes_of(runtime, x, first, last);
  x.fresh ? runtime.streams.fork_more(lanes) : runtime.streams.fork(runtime.stream(), lanes);
  x.fresh = false;
  x.forked |= lanes;
  for (int chunk = first; chunk < last; ++chunk) {
    by_copy_engine(x) ? send_by_copy_engine(runtime, x, chunk) : send_by_kernel(runtime, x, chunk);
    x.sent |= 1u << chunk;
  }
}

void wait_chunk(Runtime& runtime, OpenExchange& x, int chunk) {
  check_chunk(x, chunk);
  require(x.sent >> chunk & 1u, "chunk ", chunk, " of exchange '", x.request.tag,
          "' is awaited and was not sent by this rank; send it first");
  const cudaStream_t stream = runtime.stream();
  if (x.armed >> chunk & 1u)
    cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, chunk, kArmed)), "waiting for an armed chunk");
  else
    wait_here(runtime, x, chunk, stream);
  x.waited |= 1u << chunk;
}

void arm_chunk(Runtime& runtime, OpenExchange& x, int chunk) {
  check_chunk(x, chunk);
  require(!(x.armed >> chunk & 1u), "chunk ", chunk, " of exchange '", x.request.tag, "' is armed already");
  const cudaStream_t arming = runtime.streams.arming();
  runtime.streams.order(runtime.stream(), arming);
  wait_here(runtime, x, chunk, arming);
  mark(runtime, x, chunk, kArmed, arming);
  x.armed |= 1u << chunk;
}

void join_exchange(Runtime& runtime, OpenExchange& x) {
  runtime.streams.join(stream_for(runtime, x), x.forked);
  x.forked = 0;
  if (x.watched)
    cuda_check(cudaStreamWaitEvent(stream_for(runtime, x), runtime.streams.event(x.slot, 0, kArmed)), "ending a wait");
  x.watched = false;
  x.request.keep.clear();  // memory freed from here on is reused after the copies, in the order of the stream
}

void forget_exchange(Runtime& runtime, const std::string& tag) {
  const auto found = runtime.channels.find(tag);
  if (found == runtime.channels.end() || !found->second.open) return;
  runtime.heap.windows().set_open(found->second.open->slot, false);
  found->second.open.reset();
}

void finish_exchange(Runtime& runtime, const std::string& tag) {
  OpenExchange& x = open_exchange(runtime, tag);
  for (int chunk = 0; chunk < x.plan->num_chunks(); ++chunk) {
    if (!(x.sent >> chunk & 1u)) send_chunks(runtime, x, chunk, chunk + 1);
    if (!(x.waited >> chunk & 1u)) wait_chunk(runtime, x, chunk);
  }
  join_exchange(runtime, x);
  runtime.heap.windows().set_open(x.slot, false);
  runtime.channels[tag].open.reset();
}

}  // namespace fast_cp
