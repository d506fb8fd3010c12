// The only place that knows NVSHMEM. It is opened at run time: torch has usually mapped its own copy already, and that
// copy is then the one that runs, whatever else is installed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace fast_cp::nvshmem {

struct Version {
  int major = 0, minor = 0, patch = 0;
  std::string text() const;
};

struct Facts {
  Version built, loaded;
  std::string path;    // the file that is mapped
  std::string origin;  // how it was found
};

// Remembers where the copy in torch's environment lies, for the case that nothing else is found. Opens nothing.
void use_fallback(const std::string& path);

// Opens the host library: what the process has mapped already, else $NVSHMEM_HOME/lib, else the fallback. Throws a
// sentence where none is found or its major version differs.
const Facts& open();

Version built_against();

// An identifier that one rank makes and all ranks pass to `start`, as hexadecimal text. NVSHMEM may read its settings
// here already, so the pool's size is wanted here too.
std::string unique_id(int64_t pool_bytes);

// Collective over the `world` ranks that share `id`. The current CUDA device is this rank's.
void start(const std::string& id, int rank, int world, int64_t pool_bytes);

// Collective, with a barrier at its end. Never null.
void* allocate(size_t bytes);
void release(void* pointer);

// Where `pointer` of rank `peer` is mapped here, or null where there is no peer access.
void* peer_address(void* pointer, int peer);

// Collective.
void stop();

}  // namespace fast_cp::nvshmem
