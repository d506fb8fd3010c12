// K and V of all ranks into every rank's window: the whole exchange of AGKV in one call.
#include "fast_cp/error.hpp"
#include "ops/operators.hpp"
#include "ops/requests.hpp"
#include "runtime/cuda.hpp"

namespace fast_cp::ops {

namespace {

std::tuple<Tensor, Tensor> all_gather_kv(Tensor k, Tensor v, Ints seq_lens, int64_t text_front, int64_t text_back,
                                         Text tag, Text transfer) {
  Session session;
  Runtime& runtime = session.runtime;
  const View like = view_of(runtime, k, "k");
  if (seq_lens.empty()) seq_lens.assign(runtime.settings.world, like.rows);
  const Split split{seq_lens, {like.heads}, {like.heads}, {text_front, text_back, 0, 0}};
  Request request = qkv_request(runtime, std::nullopt, k, v, split, tag, transfer);
  request.lazy_done = true;
  request.in_turn = !is_capturing(runtime.stream());
  OpenExchange& x = start_exchange(runtime, std::move(request));
  send_chunks(runtime, x, 0, 1);
  wait_chunk(runtime, x, 0);
  join_exchange(runtime, x);
  return {window_tensor(runtime, x, kKey, like), window_tensor(runtime, x, kValue, like)};
}

}  // namespace

std::vector<Operator> gather_operators() {
  return {
      {"all_gather_kv_4d(Tensor k, Tensor v, int[] seq_lens=[], int text_front=0, int text_back=0, str "
       "tag=\"all_gather_kv\", "
       "str transfer=\"ce\") -> (Tensor, Tensor)",
       TORCH_BOX(&all_gather_kv)},
  };
}

}  // namespace fast_cp::ops
