#include "runtime/runtime.hpp"

#include <algorithm>

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/nvshmem.hpp"
#include "transfer/sm.hpp"
#include "transfer/tma.hpp"

namespace fast_cp {

namespace {

constexpr int64_t kSmallestPool = int64_t{1} << 20;

Runtime* g_runtime = nullptr;  // never destroyed at exit: CUDA may be gone by then
bool g_abandoned = false;

void check_settings(const Settings& s) {
  require(s.world >= 1 && s.world <= kMaxWorld, "Fast CP runs on 1 to ", kMaxWorld, " GPUs of one node, not ", s.world);
  require(s.rank >= 0 && s.rank < s.world, "rank ", s.rank, " is not one of the ", s.world, " ranks");
  require(s.pool_bytes >= kSmallestPool, "a pool of ", s.pool_bytes,
          " bytes is too small; pass pool_bytes=", kSmallestPool, " or more");
  require(s.timeout_ms > 0, "timeout_ms must be positive, not ", s.timeout_ms);
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count), "counting the GPUs");
  require(s.device >= 0 && s.device < count, "device ", s.device, " was asked for and ", count, " GPUs are visible");
}

// Streams to the peers: one over PCIe, whose bandwidth they share, several over NVLink. Without a known PCIe pair among
// the visible GPUs, peers are taken to be connected by NVLink.
int peer_streams(int device, int world) {
  int count = 0;
  cuda_check(cudaGetDeviceCount(&count), "counting the GPUs");
  for (int other = 0; other < count; ++other) {
    int access = 0, atomics = 0;
    if (other == device) continue;
    cuda_check(cudaDeviceCanAccessPeer(&access, device, other), "asking for peer access");
    if (!access) continue;
    cuda_check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other),
               "asking for the peer link");
    if (!atomics) return 1;
  }
  return std::clamp(world - 1, 1, kMostPeerStreams);
}

// NVSHMEM starts before the members that need it.
const Settings& started(const Settings& s) {
  check_settings(s);
  cuda_check(cudaSetDevice(s.device), "making the device current");
  cuda_check(cudaFree(nullptr), "starting CUDA on the device");
  sm::prepare();  // fails here, with a sentence, where this library has no image for the GPU
  tma::prepare();
  nvshmem::start(s.unique_id, s.rank, s.world, s.pool_bytes);
  return s;
}

}  // namespace

Runtime::Runtime(const Settings& s)
    : settings(started(s)),
      heap(s.pool_bytes, kSignalBytes, s.rank, s.world, kMaxSlots),
      signals(heap, s.rank, s.world, s.timeout_ms),
      streams(s.rank, s.world, peer_streams(s.device, s.world)),
      tag_of_slot(kMaxSlots + 1) {}

Runtime& Runtime::create(const Settings& settings) {
  require(!g_runtime, "this process has a Fast CP runtime already",
          g_runtime ? sentence(" (rank ", g_runtime->settings.rank, " of ", g_runtime->settings.world, ")") : "",
          "; finalize it first, or use backend nccl for the second group");
  require(!g_abandoned,
          "Fast CP was ended in this process without its peers and cannot start again; start a new process");
  g_runtime = new Runtime(settings);
  return *g_runtime;
}

Runtime& Runtime::get() {
  require(g_runtime,
          "this operator needs a Fast CP runtime and the process has none; call init_fast_cp on every rank first");
  return *g_runtime;
}

bool Runtime::exists() { return g_runtime != nullptr; }

void Runtime::destroy(bool collective) {
  if (!g_runtime) return;
  DeviceGuard guard(g_runtime->settings.device);
  // No peer waits to hear that this rank has read its last windows: only a further start would, on every rank.
  if (collective && !g_runtime->signals.failed()) {  // after a failed wait the peers may never come
    cuda_check(cudaDeviceSynchronize(), "finishing the work on the GPU");
    g_runtime->channels.clear();
    g_runtime->heap.close(true);
    nvshmem::stop();
    delete g_runtime;
  } else {
    g_abandoned = true;  // the memory is given back when the process ends
  }
  g_runtime = nullptr;
}

std::mutex& Runtime::mutex() {
  static std::mutex mutex;
  return mutex;
}

cudaStream_t Runtime::stream() const { return current_stream(settings.device); }

void Runtime::check() const {
  if (signals.failed()) fail(error_sentence());
}

std::string Runtime::error_sentence() const {
  const ErrorRecord e = signals.error();
  const std::string& tag = tag_of_slot[e.slot];
  const std::string where = sentence("window '", tag, "' (slot ", e.slot, ")");
  const std::string limit = sentence("rank ", settings.rank, " waited ", double(e.limit_ns) / 1e9, " s for ");
  const std::string advice =
      "; look at what that rank does: an error there, another call order or shape, or a pause longer than timeout_s";
  if (e.line == kBegunLine) {
    return sentence(limit, "rank ", e.peer, " to start use ", e.wanted, " of ", where, ": it has started use ", e.seen,
                    advice);
  }
  if (e.line == kConsumedLine) {
    return sentence(limit, "rank ", e.peer, " to finish reading ", where, ": it has finished use ", e.seen, " and use ",
                    e.wanted, " was expected", advice);
  }
  return sentence(limit, "chunk ", e.line, " of ", where, " from rank ", e.peer, ": it has announced use ", e.seen,
                  " and use ", e.wanted, " was expected", advice);
}

}  // namespace fast_cp
