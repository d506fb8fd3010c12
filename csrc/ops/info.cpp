// fast_cp_device_info: what this library is, and what the device and its peers can do. It never throws for what is
// missing: it says it.
#include "fast_cp/error.hpp"
#include "ops/checks.hpp"
#include "ops/json.hpp"
#include "ops/operators.hpp"
#include "runtime/nvshmem.hpp"

namespace fast_cp::ops {

namespace {

std::string version_text(int version) { return sentence(version / 1000, ".", version % 1000 / 10); }

std::string images() {
  std::vector<std::string> list;
  std::string name;
  for (const char c : std::string(FAST_CP_IMAGES) + ";") {
    if (c != ';')
      name += c;
    else if (!name.empty())
      list.push_back(json_text("sm_" + name)), name.clear();
  }
  return json_array(list);
}

std::string operators() {
  std::vector<std::string> list;
  for (const Operator& op : all_operators()) list.push_back(json_text(op.name()));
  return json_array(list);
}

std::string nvshmem_facts() {
  JsonObject facts;
  facts.add("built", nvshmem::built_against().text());
  try {
    const nvshmem::Facts& opened = nvshmem::open();
    facts.add("loaded", opened.loaded.text()).add("path", opened.path).add("origin", opened.origin);
  } catch (const std::exception& error) {
    facts.raw("loaded", "null").add("problem", error.what());
  }
  return facts.str();
}

int attribute(cudaDeviceAttr which, int device) {
  int value = 0;
  cuda_check(cudaDeviceGetAttribute(&value, which, device), "asking for the device's properties");
  return value;
}

// Peers among the visible GPUs. Native atomics between two GPUs exist over NVLink and not over PCIe.
std::string peers(int device, int count) {
  std::vector<std::string> list;
  for (int other = 0; other < count; ++other) {
    if (other == device) continue;
    int access = 0, atomics = 0, rank = 0;
    cuda_check(cudaDeviceCanAccessPeer(&access, device, other), "asking for peer access");
    if (access) {
      cuda_check(cudaDeviceGetP2PAttribute(&atomics, cudaDevP2PAttrNativeAtomicSupported, device, other),
                 "asking for the peer link");
      cuda_check(cudaDeviceGetP2PAttribute(&rank, cudaDevP2PAttrPerformanceRank, device, other),
                 "asking for the peer link");
    }
    JsonObject peer;
    peer.add("device", other).add("p2p", access != 0).add("nvlink", atomics != 0).add("performance_rank", rank);
    list.push_back(peer.str());
  }
  return json_array(list);
}

void add_device(JsonObject& info, int device, int count) {
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, device), "asking for the device's properties");
  info.add("name", properties.name);
  info.add("sm", properties.major * 10 + properties.minor);
  info.add("multiprocessors", properties.multiProcessorCount);
  info.add("memory_bytes", int64_t(properties.totalGlobalMem));
  info.add("copy_engines", attribute(cudaDevAttrAsyncEngineCount, device));
  info.raw("peers", peers(device, count));
}

std::string device_info(int64_t device) {
  JsonObject info;
  int driver = 0, runtime = 0, count = 0;
  cudaDriverGetVersion(&driver);
  cudaRuntimeGetVersion(&runtime);
  info.add("device", device).add("cuda_driver", version_text(driver)).add("cuda_runtime", version_text(runtime));
  try {
    cuda_check(cudaGetDeviceCount(&count), "counting the GPUs");
    require(device >= 0 && device < count, "device ", device, " was asked for and ", count, " GPUs are visible");
    add_device(info, int(device), count);
    info.add("available", true);
  } catch (const std::exception& error) {
    info.add("available", false).add("problem", error.what());
  }
  info.raw("images", images()).raw("nvshmem", nvshmem_facts()).add("runtime", Runtime::exists());
  return info.raw("operators", operators()).str();
}

}  // namespace

std::vector<Operator> info_operators() { return {{"fast_cp_device_info(int device) -> str", TORCH_BOX(&device_info)}}; }

}  // namespace fast_cp::ops
