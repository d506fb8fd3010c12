// K and V written by a projection straight into this rank's rows of the gathered windows, and sent group by group of
// heads while the next projection runs.
#include "fast_cp/error.hpp"
#include "ops/operators.hpp"
#include "ops/requests.hpp"
#include "runtime/cuda.hpp"

namespace fast_cp::ops {

namespace {

std::tuple<Tensor, Tensor> kv_projection_prepare(Tensor like, int64_t batch, Ints seq_lens, int64_t heads,
                                                 int64_t head_dim, int64_t num_groups, int64_t text_front,
                                                 int64_t text_back, Text tag, int64_t generation, bool own_last,
                                                 bool ticket) {
  Session session;
  Runtime& runtime = session.runtime;
  View view{};
  view.batch = batch, view.heads = heads, view.head_dim = head_dim;
  view.dtype = like.scalar_type();
  view.element_bytes = element_bytes_of(view.dtype, "like");
  require(heads >= 1 && view.head_bytes() > 0 && view.head_bytes() % 16 == 0, "kv_projection_prepare was asked for ",
          heads, " heads of ", view.head_bytes(), " bytes; at least one head is needed, and a multiple of 16 bytes");
  require(num_groups >= 1 && num_groups <= heads, num_groups, " groups were asked for and there are ", heads, " heads");
  Request request;
  request.tag = tag;
  request.shape =
      shape_of(runtime, {seq_lens, {heads}, {heads}, {text_front, text_back, 0, 0}, Ints(num_groups, 1)}, view, -1);
  request.shape.own_last = own_last, request.ticket = ticket;
  request.in_place = request.lazy_done = true;
  request.generation = checked_generation(generation);
  // a caller that names generations takes them in turn; a graph that does not is replayed by itself
  request.in_turn = generation >= 0 || !is_capturing(runtime.stream());
  request.roles = 1u << kKey | 1u << kValue;
  const int64_t pitch = heads * view.head_bytes();
  const WindowShape window = window_of(request.shape, runtime.settings.rank, kKey);
  request.strides[kKey] = request.strides[kValue] = {pitch, window.rows * pitch};
  const OpenExchange& x = start_exchange(runtime, std::move(request));
  return {window_tensor(runtime, x, kKey, view), window_tensor(runtime, x, kValue, view)};
}

void kv_projection_send_ce_group(Tensor k, Tensor v, int64_t group, Text tag) {
  Session session;
  OpenExchange& x = open_exchange(session.runtime, tag);
  require(x.request.in_place, "exchange '", tag, "' was not begun by kv_projection_prepare");
  send_chunks(session.runtime, x, int(group), int(group) + 1);
}

void projection_sync_prepare(Tensor k, Tensor v, int64_t group, Text tag) {
  Session session;
  arm_chunk(session.runtime, open_exchange(session.runtime, tag), int(group));
}

void projection_sync(Tensor k, Tensor v, int64_t group, Text tag) {
  Session session;
  OpenExchange& x = open_exchange(session.runtime, tag);
  wait_chunk(session.runtime, x, int(group));
  if (x.all_waited()) join_exchange(session.runtime, x);
}

// Joins nothing: the reader comes next on the caller's stream, and need not wait for what this rank sends.
Tensor projection_ticket(Tensor k, Tensor v, Text tag) {
  Session session;
  return ticket_tensor(session.runtime, open_exchange(session.runtime, tag));
}

}  // namespace

std::vector<Operator> projection_operators() {
  return {
      {"kv_projection_prepare(Tensor like, int batch, int[] seq_lens, int heads, int head_dim, int num_groups=1, int "
       "text_front=0, "
       "int text_back=0, str tag=\"kv_projection\", int generation=-1, bool own_last=False, bool ticket=False) -> "
       "(Tensor, Tensor)",
       TORCH_BOX(&kv_projection_prepare)},
      {"kv_projection_send_ce_group(Tensor(a!) k, Tensor(b!) v, int group, str tag=\"kv_projection\") -> ()",
       TORCH_BOX(&kv_projection_send_ce_group)},
      {"projection_sync_prepare(Tensor(a!) k, Tensor(b!) v, int group, str tag=\"kv_projection\") -> ()",
       TORCH_BOX(&projection_sync_prepare)},
      {"projection_sync(Tensor(a!) k, Tensor(b!) v, int group, str tag=\"kv_projection\") -> ()",
       TORCH_BOX(&projection_sync)},
      {"projection_ticket(Tensor k, Tensor v, str tag=\"kv_projection\") -> Tensor", TORCH_BOX(&projection_ticket)},
  };
}

}  // namespace fast_cp::ops
