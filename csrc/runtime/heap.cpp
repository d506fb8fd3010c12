#include "runtime/heap.hpp"

#include "fast_cp/error.hpp"
#include "runtime/cuda.hpp"
#include "runtime/nvshmem.hpp"

namespace fast_cp {

Heap::Heap(int64_t pool_bytes, int64_t signal_bytes, int rank, int world, int max_slots)
    : pool_bytes_(pool_bytes), windows_(round_up(signal_bytes, kWindowAlignment), pool_bytes, max_slots) {
  base_ = nvshmem::allocate(pool_bytes);
  cuda_check(cudaMemset(base_, 0, signal_bytes), "zeroing the signals");
  cuda_check(cudaDeviceSynchronize(), "zeroing the signals");
  // NVSHMEM's allocation ends in a barrier of all ranks: after this one every rank's signals are zero.
  barrier_ = nvshmem::allocate(kWindowAlignment);
  for (int peer = 0; peer < world; ++peer) {
    void* address = peer == rank ? base_ : nvshmem::peer_address(base_, peer);
    require(address, "rank ", rank, " cannot reach the memory of rank ", peer,
            ": their GPUs have no peer access; use backend nccl, or GPUs connected by NVLink or one PCIe root");
    bases_.push_back(static_cast<char*>(address));
  }
}

Heap::~Heap() { close(false); }

void Heap::close(bool collective) {
  if (collective && base_) {
    nvshmem::release(barrier_);
    nvshmem::release(base_);
  }
  base_ = barrier_ = nullptr;
  bases_.clear();
}

}  // namespace fast_cp
