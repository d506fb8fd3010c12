// The exchange in its parts, for callers that overlap it with attention: start, send, wait, done, both ways.
#include "ops/requests.hpp"

#include "fast_cp/error.hpp"
#include "ops/operators.hpp"

namespace fast_cp::ops {

Request qkv_request(const Runtime& runtime, const std::optional<Tensor>& q, const Tensor& k, const Tensor& v,
                    const Split& split, const std::string& tag, const std::string& transfer) {
  const View key = view_of(runtime, k, "k"), value = view_of(runtime, v, "v");
  require_alike(key, value, "k and v");
  require(key.heads == value.heads, "k has ", key.heads, " heads and v has ", value.heads);
  Request request;
  request.tag = tag;
  request.transfer = transfer_named(transfer);
  request.shape = shape_of(runtime, split, key, key.rows);
  require(sum_of(split.kv_heads) == key.heads, "kv_heads add up to ", sum_of(split.kv_heads), " and k has ", key.heads,
          " heads");
  add_source(request, kKey, key, k);
  add_source(request, kValue, value, v);
  if (!q) return request;
  const View query = view_of(runtime, *q, "q");
  require_alike(query, key, "q and k");
  require(sum_of(split.q_heads) == query.heads, "q_heads add up to ", sum_of(split.q_heads), " and q has ", query.heads,
          " heads");
  add_source(request, kQuery, query, *q);
  return request;
}

Request return_request(const Runtime& runtime, const Tensor& o, const Split& split, bool send_text,
                       const std::string& tag, const std::string& transfer) {
  const View out = view_of(runtime, o, "o");
  Request request;
  request.tag = tag;
  request.transfer = transfer_named(transfer);
  request.returning = true;
  request.text = send_text;
  request.shape = shape_of(runtime, split, out, -1);
  const WindowShape held = window_of(request.shape, runtime.settings.rank, kQuery);
  require(out.rows == held.rows && out.heads == held.heads, "o is (batch, ", out.rows, ", ", out.heads,
          ", head_dim) and this rank's share of the output is (batch, ", held.rows, ", ", held.heads, ", head_dim)");
  add_source(request, kOutput, out, o);
  return request;
}

Exchange shape_of(const Runtime& runtime, const Split& split, const View& like, int64_t own_rows) {
  Exchange shape;
  shape.world = runtime.settings.world;
  shape.ulysses = int(split.kv_heads.size());
  shape.chunks = split.chunks;
  shape.batch = like.batch, shape.head_bytes = like.head_bytes();
  shape.seq = split.seq_lens, shape.q_heads = split.q_heads, shape.kv_heads = split.kv_heads;
  require(split.text.size() == 4, "text has ", split.text.size(),
          " numbers and [kv_front, kv_back, q_front, q_back] was expected");
  shape.kv_text_front = split.text[0], shape.kv_text_back = split.text[1];
  shape.q_text_front = split.text[2], shape.q_text_back = split.text[3];
  require(shape.ulysses > 0,
          "kv_heads is empty; give the key heads of each rank of an ulysses group ([heads] for AGKV)");
  const std::string problem = problem_with(shape);
  require(problem.empty(), problem);
  const int64_t expected = shape.seq[runtime.settings.rank];
  require(own_rows < 0 || own_rows == expected, "this rank passed ", own_rows, " tokens and seq_lens says ", expected);
  return shape;
}

int checked_generation(int64_t generation) {
  require(generation >= -1 && generation <= 1, "generation is ", generation,
          "; give 0 or 1, or -1 to let the two take turns");
  return int(generation);
}

namespace {

std::tuple<Tensor, Tensor, Tensor> exchange_start(std::optional<Tensor> q, Tensor k, Tensor v, Ints seq_lens,
                                                  Ints q_heads, Ints kv_heads, Ints chunks, Ints text, Text tag,
                                                  Text transfer, bool send_now, int64_t own_chunks,
                                                  int64_t generation, bool in_turn, bool own_last, bool ticket) {
  Session session;
  Runtime& runtime = session.runtime;
  require(own_chunks >= -1, "own_chunks is ", own_chunks, "; give a number of chunks, or -1 for all");
  Request request = qkv_request(runtime, q, k, v, {seq_lens, q_heads, kv_heads, text, chunks}, tag, transfer);
  request.own_chunks = int(std::min<int64_t>(own_chunks, kMaxChunks));
  request.shape.own_last = own_last, request.ticket = ticket;
  request.generation = checked_generation(generation), request.in_turn = in_turn;
  OpenExchange& x = start_exchange(runtime, std::move(request));
  if (send_now) send_chunks(runtime, x, 0, x.plan->num_chunks());
  const View like = view_of(runtime, k, "k");
  return {window_tensor(runtime, x, kQuery, like), window_tensor(runtime, x, kKey, like),
          window_tensor(runtime, x, kValue, like)};
}

Tensor return_start(Tensor o, Ints seq_lens, Ints q_heads, Ints kv_heads, Ints chunks, Ints text, bool send_text,
                    Text tag, Text transfer, bool send_now, int64_t generation, bool in_turn) {
  Session session;
  Runtime& runtime = session.runtime;
  Request request = return_request(runtime, o, {seq_lens, q_heads, kv_heads, text, chunks}, send_text, tag, transfer);
  request.generation = checked_generation(generation), request.in_turn = in_turn;
  OpenExchange& x = start_exchange(runtime, std::move(request));
  if (send_now) send_chunks(runtime, x, 0, x.plan->num_chunks());
  return window_tensor(runtime, x, kOutput, view_of(runtime, o, "o"));
}

void exchange_send(std::vector<Tensor> sources, std::vector<Tensor> windows, int64_t chunk, Text tag) {
  Session session;
  send_chunks(session.runtime, open_exchange(session.runtime, tag), int(chunk), int(chunk) + 1);
}

void exchange_wait(std::vector<Tensor> windows, int64_t chunk, Text tag) {
  Session session;
  wait_chunk(session.runtime, open_exchange(session.runtime, tag), int(chunk));
}

Tensor exchange_ticket(std::vector<Tensor> windows, Text tag) {
  Session session;
  return ticket_tensor(session.runtime, open_exchange(session.runtime, tag));
}

void exchange_done(std::vector<Tensor> windows, Text tag) {
  Session session;
  finish_exchange(session.runtime, tag);
}

}  // namespace

std::vector<Operator> exchange_operators() {
  return {
      {"fast_cp_exchange_start(Tensor? q, Tensor k, Tensor v, int[] seq_lens, int[] q_heads, int[] kv_heads, "
       "int[] chunks=[1], int[] text=[0, 0, 0, 0], str tag=\"exchange\", str transfer=\"ce\", bool send_now=True, "
       "int own_chunks=-1, int generation=-1, bool in_turn=False, bool own_last=False, bool ticket=False) -> "
       "(Tensor, Tensor, Tensor)",
       TORCH_BOX(&exchange_start)},
      {"fast_cp_return_start(Tensor o, int[] seq_lens, int[] q_heads, int[] kv_heads, int[] chunks=[1], "
       "int[] text=[0, 0, 0, 0], bool send_text=False, str tag=\"return\", str transfer=\"ce\", bool send_now=True, "
       "int generation=-1, bool in_turn=False) -> Tensor",
       TORCH_BOX(&return_start)},
      {"fast_cp_exchange_send(Tensor[] sources, Tensor(a!)[] windows, int chunk, str tag) -> ()",
       TORCH_BOX(&exchange_send)},
      {"fast_cp_exchange_wait(Tensor(a!)[] windows, int chunk, str tag) -> ()", TORCH_BOX(&exchange_wait)},
      {"fast_cp_exchange_ticket(Tensor[] windows, str tag) -> Tensor", TORCH_BOX(&exchange_ticket)},
      {"fast_cp_exchange_done(Tensor(a!)[] windows, str tag) -> ()", TORCH_BOX(&exchange_done)},
  };
}

}  // namespace fast_cp::ops
