#include "runtime/nvshmem.hpp"

#include <dlfcn.h>
#include <nvshmem_host.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "fast_cp/error.hpp"

namespace fast_cp::nvshmem {

namespace {

constexpr int64_t kOwnBytes = int64_t{64} << 20;  // what NVSHMEM keeps for itself in its symmetric memory
constexpr const char* kLibrary = "libnvshmem_host.so.3";

struct Api {
  Facts facts;
  decltype(&nvshmemx_get_uniqueid) get_uniqueid;
  decltype(&nvshmemx_set_attr_uniqueid_args) set_attr_uniqueid_args;
  decltype(&nvshmemx_hostlib_init_attr) hostlib_init_attr;
  decltype(&nvshmemx_hostlib_finalize) hostlib_finalize;
  decltype(&nvshmem_malloc) malloc;
  decltype(&nvshmem_free) free;
  decltype(&nvshmem_ptr) ptr;
  void (*version)(int*, int*, int*);
};

template <typename Function>
void find(void* library, const char* name, Function& function) {
  void* symbol = dlsym(library, name);
  require(symbol, "the NVSHMEM host library lacks ", name, "; install nvidia-nvshmem-cu13 ", built_against().text(),
          " or newer");
  function = reinterpret_cast<Function>(symbol);
}

std::string& fallback() {
  static std::string path;
  return path;
}

void* open_library(std::string& origin) {
  if (void* library = dlopen(kLibrary, RTLD_NOW | RTLD_NOLOAD)) {
    origin = "already mapped by this process";
    return library;
  }
  std::string tried;
  const auto attempt = [&](const std::string& path, const char* found_by) -> void* {
    void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL);
    if (library)
      origin = found_by;
    else
      tried += sentence("; ", path, ": ", dlerror());
    return library;
  };
  if (const char* home = std::getenv("NVSHMEM_HOME"); home && *home) {
    if (void* library = attempt(sentence(home, "/lib/", kLibrary), "NVSHMEM_HOME")) return library;
  }
  if (!fallback().empty()) {
    if (void* library = attempt(fallback(), "the environment of torch")) return library;
  }
  fail("NVSHMEM's host library ", kLibrary,
       " was looked for in this process, NVSHMEM_HOME and torch's environment, and not found", tried,
       "; install nvidia-nvshmem-cu13 or set NVSHMEM_HOME to a folder with lib/", kLibrary);
}

std::string file_of(void* symbol) {
  Dl_info info;
  return dladdr(symbol, &info) && info.dli_fname ? info.dli_fname : kLibrary;
}

Api load() {
  Api api{};
  void* library = open_library(api.facts.origin);
  find(library, "nvshmemx_vendor_get_version_info", api.version);
  find(library, "nvshmemx_get_uniqueid", api.get_uniqueid);
  find(library, "nvshmemx_set_attr_uniqueid_args", api.set_attr_uniqueid_args);
  find(library, "nvshmemx_hostlib_init_attr", api.hostlib_init_attr);
  find(library, "nvshmemx_hostlib_finalize", api.hostlib_finalize);
  find(library, "nvshmem_malloc", api.malloc);
  find(library, "nvshmem_free", api.free);
  find(library, "nvshmem_ptr", api.ptr);
  Version& loaded = api.facts.loaded;
  api.version(&loaded.major, &loaded.minor, &loaded.patch);
  api.facts.built = built_against();
  api.facts.path = file_of(reinterpret_cast<void*>(api.version));
  require(loaded.major == api.facts.built.major, "this library was built against NVSHMEM ", api.facts.built.text(),
          " and the process has ", loaded.text(), " from ", api.facts.path,
          "; rebuild against its headers, or install NVSHMEM ", api.facts.built.major, ".x");
  return api;
}

Api& api() {
  static Api loaded = load();  // a failed attempt throws and is made again at the next call
  return loaded;
}

std::string to_hex(const void* data, size_t bytes) {
  static const char digits[] = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < bytes; ++i) {
    const unsigned char value = static_cast<const unsigned char*>(data)[i];
    text += digits[value >> 4], text += digits[value & 15];
  }
  return text;
}

nvshmemx_uniqueid_t from_hex(const std::string& text) {
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  require(text.size() == 2 * sizeof(id), "the unique id has ", text.size(), " characters and ", 2 * sizeof(id),
          " were expected; pass what fast_cp_unique_id gave on one rank, to all ranks");
  std::vector<unsigned char> bytes;
  for (size_t i = 0; i < text.size(); i += 2) bytes.push_back(std::strtoul(text.substr(i, 2).c_str(), nullptr, 16));
  std::memcpy(&id, bytes.data(), sizeof(id));
  return id;
}

// One node only: no network transport. NVLink multicast is never used. What the user has set stays.
void set_defaults(int64_t pool_bytes) {
  setenv("NVSHMEM_REMOTE_TRANSPORT", "none", 0);
  setenv("NVSHMEM_DISABLE_NVLS", "1", 0);
  setenv("NVSHMEM_SYMMETRIC_SIZE", std::to_string(pool_bytes + kOwnBytes).c_str(), 0);
}

}  // namespace

std::string Version::text() const { return sentence(major, ".", minor, ".", patch); }

Version built_against() {
  return {NVSHMEM_VENDOR_MAJOR_VERSION, NVSHMEM_VENDOR_MINOR_VERSION, NVSHMEM_VENDOR_PATCH_VERSION};
}

void use_fallback(const std::string& path) { fallback() = path; }

const Facts& open() { return api().facts; }

std::string unique_id(int64_t pool_bytes) {
  set_defaults(pool_bytes);
  nvshmemx_uniqueid_t id = NVSHMEMX_UNIQUEID_INITIALIZER;
  const int status = api().get_uniqueid(&id);
  require(status == 0, "NVSHMEM could not make a unique id (status ", status, "); set NVSHMEM_DEBUG=INFO to see why");
  return to_hex(&id, sizeof(id));
}

void start(const std::string& id_text, int rank, int world, int64_t pool_bytes) {
  Api& nv = api();
  set_defaults(pool_bytes);
  nvshmemx_uniqueid_t id = from_hex(id_text);
  nvshmemx_init_attr_t attributes = NVSHMEMX_INIT_ATTR_INITIALIZER;
  int status = nv.set_attr_uniqueid_args(rank, world, &id, &attributes);
  require(status == 0, "NVSHMEM refused rank ", rank, " of ", world, " (status ", status, ")");
  status = nv.hostlib_init_attr(NVSHMEMX_INIT_WITH_UNIQUEID, &attributes);
  require(status == 0, "NVSHMEM ", nv.facts.loaded.text(), " could not start rank ", rank, " of ", world, " (status ",
          status, "); set NVSHMEM_DEBUG=INFO to see why");
}

void* allocate(size_t bytes) {
  void* pointer = api().malloc(bytes);
  require(pointer, "NVSHMEM could not allocate ", bytes,
          " bytes on every GPU; free GPU memory or pass a smaller pool_bytes to init_fast_cp");
  return pointer;
}

void release(void* pointer) { api().free(pointer); }
void* peer_address(void* pointer, int peer) { return api().ptr(pointer, peer); }
void stop() { api().hostlib_finalize(); }

}  // namespace fast_cp::nvshmem
