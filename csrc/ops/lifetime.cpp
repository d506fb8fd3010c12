// Beginning and end of the runtime, its errors, what captured graphs need, and the hook by which tests remove waits.
#include "fast_cp/error.hpp"
#include "ops/checks.hpp"
#include "ops/operators.hpp"
#include "runtime/nvshmem.hpp"

namespace fast_cp::ops {

namespace {

void use_nvshmem(Text path) { nvshmem::use_fallback(path); }

std::string unique_id(int64_t pool_bytes) { return nvshmem::unique_id(pool_bytes); }

void init(Text unique_id, int64_t rank, int64_t world, int64_t device, int64_t pool_bytes, int64_t timeout_ms) {
  std::lock_guard<std::mutex> lock(Runtime::mutex());
  Settings settings{int(rank), int(world), int(device), pool_bytes, timeout_ms, unique_id};
  Runtime::create(settings);
}

void finalize(bool collective) {
  std::lock_guard<std::mutex> lock(Runtime::mutex());
  Runtime::destroy(collective);
}

int64_t check() {
  Runtime& runtime = Runtime::get();
  runtime.check();
  return runtime.heap.windows().version();
}

void forget(Text tag) {
  Session session;
  forget_exchange(session.runtime, tag);
}

void manage_capture(bool on) {
  Session session;
  session.runtime.managed_capture = on;
}

void test_hook(Text name, bool value) {
  Session session;
  require(name == "remove_waits", "there is no test hook '", name, "'; the one there is: remove_waits");
  session.runtime.remove_waits = value;
}

}  // namespace

std::vector<Operator> lifetime_operators() {
  return {
      {"fast_cp_use_nvshmem(str path) -> ()", TORCH_BOX(&use_nvshmem)},
      {"fast_cp_unique_id(int pool_bytes) -> str", TORCH_BOX(&unique_id)},
      {"fast_cp_init(str unique_id, int rank, int world, int device, int pool_bytes, int timeout_ms=10000) -> ()",
       TORCH_BOX(&init)},
      {"fast_cp_finalize(bool collective=True) -> ()", TORCH_BOX(&finalize)},
      {"fast_cp_check() -> int", TORCH_BOX(&check)},
      {"fast_cp_forget(str tag) -> ()", TORCH_BOX(&forget)},
      {"fast_cp_manage_capture(bool on) -> ()", TORCH_BOX(&manage_capture)},
      {"fast_cp_test_hook(str name, bool value) -> ()", TORCH_BOX(&test_hook)},
  };
}

}  // namespace fast_cp::ops
