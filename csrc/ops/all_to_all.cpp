// Ulysses and the hybrid in one call each way. The names differ from upstream's all_to_all_single_4d.
#include "ops/operators.hpp"
#include "ops/requests.hpp"
#include "runtime/cuda.hpp"

namespace fast_cp::ops {

namespace {

OpenExchange& run(Runtime& runtime, Request request) {
  request.lazy_done = true;
  OpenExchange& x = start_exchange(runtime, std::move(request));
  send_chunks(runtime, x, 0, 1);
  wait_chunk(runtime, x, 0);
  join_exchange(runtime, x);
  return x;
}

std::tuple<Tensor, Tensor, Tensor> all_to_all_qkv(Tensor q, Tensor k, Tensor v, Ints seq_lens, Ints q_heads,
                                                  Ints kv_heads, Ints text, Text tag, Text transfer) {
  Session session;
  Runtime& runtime = session.runtime;
  Request request = qkv_request(runtime, q, k, v, {seq_lens, q_heads, kv_heads, text}, tag, transfer);
  request.in_turn = !is_capturing(runtime.stream());
  const OpenExchange& x = run(runtime, std::move(request));
  const View like = view_of(runtime, k, "k");
  return {window_tensor(runtime, x, kQuery, like), window_tensor(runtime, x, kKey, like),
          window_tensor(runtime, x, kValue, like)};
}

Tensor all_to_all_out(Tensor o, Ints seq_lens, Ints q_heads, Ints text, bool send_text, Text tag,
                      Text transfer) {
  Session session;
  Runtime& runtime = session.runtime;
  const OpenExchange& x =
      run(runtime, return_request(runtime, o, {seq_lens, q_heads, q_heads, text}, send_text, tag, transfer));
  return window_tensor(runtime, x, kOutput, view_of(runtime, o, "o"));
}

}  // namespace

std::vector<Operator> all_to_all_operators() {
  return {
      {"fast_cp_all_to_all_qkv_4d(Tensor q, Tensor k, Tensor v, int[] seq_lens, int[] q_heads, int[] kv_heads, "
       "int[] text=[0, 0, 0, 0], str tag=\"all_to_all_qkv\", str transfer=\"ce\") -> (Tensor, Tensor, Tensor)",
       TORCH_BOX(&all_to_all_qkv)},
      {"fast_cp_all_to_all_out_4d(Tensor o, int[] seq_lens, int[] q_heads, int[] text=[0, 0, 0, 0], bool "
       "send_text=False, "
       "str tag=\"all_to_all_out\", str transfer=\"ce\") -> Tensor",
       TORCH_BOX(&all_to_all_out)},
  };
}

}  // namespace fast_cp::ops
