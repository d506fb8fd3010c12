#include "runtime/ticket.hpp"

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/runtime.hpp"

namespace fast_cp {

Reader reader_of(const Runtime& runtime, const OpenExchange& x) {
  const int rank = runtime.settings.rank;
  const Exchange& shape = x.request.shape;
  Reader reader;
  reader.exchanged = x.plan->peer_mask;
  reader.peers = runtime.remove_waits ? 0 : x.plan->peer_mask;
  reader.num_chunks = shape.num_chunks();
  reader.wait_row = int(first_row_without_peers(shape, rank));
  reader.kv_heads = int(shape.kv_heads[index_of(shape, rank)]);
  return reader;
}

namespace {

// A wait beside the reader, on a stream of its own: it tells what has not come in time, which the reader does not.
void watch(Runtime& runtime, OpenExchange& x, cudaStream_t stream) {
  if (runtime.remove_waits || x.watched) return;
  const cudaStream_t beside = runtime.streams.arming();
  runtime.streams.order(stream, beside);
  runtime.signals.wait_arrivals(x.slot, 0, x.plan->num_chunks(), x.plan->peer_mask, beside, true);
  cuda_check(cudaEventRecord(runtime.streams.event(x.slot, 0, kArmed), beside), "watching the arrivals");
  x.watched = true;
}

}  // namespace

const Ticket* take_ticket(Runtime& runtime, OpenExchange& x) {
  constexpr const char* kDoing = "ordering the reader of a ticket";
  require(x.request.ticket, "exchange '", x.request.tag, "' has no ticket; start it with ticket=True");
  for (int chunk = 0; chunk < x.plan->num_chunks(); ++chunk) {
    require(x.sent >> chunk & 1u, "the ticket of exchange '", x.request.tag, "' was asked for and its chunk ", chunk,
            " was not sent by this rank; send it first");
  }
  const cudaStream_t stream = runtime.stream();
  if (stream != *runtime.channels[x.request.tag].stream)
    cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, 0, kBegun)), kDoing);
  // What SMs copy would wait behind a reader that spins on all of them, and with it the peer's reader. Nobody announces
  // what the rank copies to itself.
  if (x.request.transfer != Transfer::kCopyEngine) {
    runtime.streams.join(stream, x.forked);
  } else {
    for (int chunk = x.plan->num_chunks() - 1; chunk >= 0; --chunk) {
      if (!x.plan->copies_own(chunk)) continue;
      cuda_check(cudaStreamWaitEvent(stream, runtime.streams.event(x.slot, chunk, kOwnCopied)), kDoing);
      break;  // one stream carries them all
    }
  }
  watch(runtime, x, stream);
  x.waited = ~0u >> (32 - x.plan->num_chunks());
  return runtime.signals.ticket(x.slot);
}

}  // namespace fast_cp
