// What an exchange must do, element by element, and arrays to carry a plan out on: the second opinion of
// copy_plan_test.cpp.
#pragma once

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "fast_cp/copy_plan.hpp"

namespace oracle {

using namespace fast_cp;

constexpr int64_t kElement = 8;  // one int64 per element: its origin
constexpr int64_t kUntouched = -1;

struct Padding {
  int64_t row, batch;  // elements beyond the dense stride, as in a slice of a packed QKV
};

// rank, role, batch, row and head of an element in one number; head_dim elements of one head share the last factor.
inline int64_t origin(int rank, int role, int64_t batch, int64_t row, int64_t head, int64_t dim) {
  return ((((int64_t(rank) * 4 + role) * 8 + batch) * 512 + row) * 256 + head) * 16 + dim;
}

struct Source {
  std::vector<int64_t> data;
  SourceStrides strides;
};

inline Source make_source(int rank, int role, int64_t batch, int64_t rows, int64_t heads, int64_t dim, Padding pad) {
  Source source;
  const int64_t row = heads * dim + pad.row, per_batch = rows * row + pad.batch;
  source.strides = {row * kElement, per_batch * kElement};
  source.data.assign(batch * per_batch + 1, kUntouched - 1);
  for (int64_t b = 0; b < batch; ++b)
    for (int64_t s = 0; s < rows; ++s)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < dim; ++d)
          source.data[b * per_batch + s * row + h * dim + d] = origin(rank, role, b, s, h, d);
  return source;
}

struct Target {
  std::vector<int64_t> data;
  std::vector<int> writes;
  void reset(int64_t bytes) {
    data.assign(bytes / kElement, kUntouched);
    writes.assign(bytes / kElement, 0);
  }
};

// Bounds are checked here: a copy that leaves its source or window is reported and not carried out.
inline bool carry_out(const Copy& c, const Source& source, Target& target) {
  bool inside = true;
  for (int64_t b = 0; b < c.batches; ++b) {
    for (int64_t r = 0; r < c.rows; ++r) {
      const int64_t from = c.src_offset + b * c.src_batch + r * c.src_pitch;
      const int64_t to = c.dst_offset + b * c.dst_batch + r * c.dst_pitch;
      const int64_t words = c.row_bytes / kElement;
      if (from < 0 || from + c.row_bytes > int64_t(source.data.size()) * kElement || to < 0 ||
          to + c.row_bytes > int64_t(target.data.size()) * kElement) {
        inside = false;
        continue;
      }
      for (int64_t w = 0; w < words; ++w) {
        target.data[to / kElement + w] = source.data[from / kElement + w];
        ++target.writes[to / kElement + w];
      }
    }
  }
  return inside;
}

// Chunks in order, and in each chunk the peers from the next rank on, the rank itself last.
inline bool in_order(const std::vector<Copy>& plan, const Exchange& x, int rank) {
  int last_chunk = 0, last_step = 0;
  for (const Copy& c : plan) {
    const int step = (c.peer - rank - 1 + 2 * x.world) % x.world;
    if (c.chunk < last_chunk || c.chunk >= x.num_chunks()) return false;
    if (c.chunk == last_chunk && step < last_step) return false;
    last_chunk = c.chunk, last_step = step;
  }
  return true;
}

// The chunk that a head belongs to: the last one that begins at it or before it and is not empty.
inline int chunk_of_head(const Exchange& x, int64_t heads, int64_t head) {
  int64_t all = 0, before = 0;
  for (int64_t weight : x.chunks) all += weight;
  int chunk = 0;
  for (int c = 0; c < int(x.chunks.size()); before += x.chunks[c++]) {
    if (heads * before / all <= head) chunk = c;
  }
  return chunk;
}

inline int chunk_of(const Exchange& x, int role, int index, int64_t head) {
  const int64_t q = x.q_heads[index], kv = x.kv_heads[index];
  if (role == kKey || role == kValue) return chunk_of_head(x, kv, head);
  if (kv > 0 && q % kv == 0) return chunk_of_head(x, kv, head / (q / kv));
  return chunk_of_head(x, q, head);
}

// Every head that a copy carries belongs to the copy's chunk. Heads count from the first one of `index`.
inline bool in_chunk(const Exchange& x, const Copy& c, int index, int64_t first_head) {
  for (int64_t head = first_head; head < first_head + c.row_bytes / x.head_bytes; ++head) {
    if (chunk_of(x, c.role, index, head) != c.chunk) return false;
  }
  return true;
}

inline int64_t dim_of(const Exchange& x) { return x.head_bytes / kElement; }
inline std::string describe(const Exchange& x) {
  std::string text = "P" + std::to_string(x.world) + " u" + std::to_string(x.ulysses) + " chunks " +
                     std::to_string(x.num_chunks()) + " S";
  for (int64_t s : x.seq) text += " " + std::to_string(s);
  return x.own_last ? text + " own last" : text;
}

struct Outcome {
  int64_t wrong = 0;  // elements that are not what they should be
  bool ordered = true, inside = true, in_chunks = true;
  bool good() const { return wrong == 0 && ordered && inside && in_chunks; }
};

// The ranks whose tokens lie in a window of `rank`, in their order there.
inline std::vector<int> ranks_in(const Exchange& x, int rank, int role) {
  const int first = role == kQuery ? rank / x.ulysses * x.ulysses : 0, count = role == kQuery ? x.ulysses : x.world;
  std::vector<int> ranks(count);
  for (int i = 0; i < count; ++i) ranks[i] = first + i;
  if (role != kQuery && x.own_last) std::rotate(ranks.begin(), ranks.begin() + rank + 1, ranks.end());
  return ranks;
}

// The token's rank and its row there, for a row of a window of Q, K or V; rank -1 for text.
inline std::pair<int, int64_t> owner(const Exchange& x, int receiver, int role, int64_t row) {
  row -= role == kQuery ? x.q_text_front : x.kv_text_front;
  if (row < 0) return {-1, 0};
  for (int rank : ranks_in(x, receiver, role)) {
    if (row < x.seq[rank]) return {rank, row};
    row -= x.seq[rank];
  }
  return {-1, 0};
}

// Whether `own_chunks` keeps an element out of the rank's own window.
inline bool stays_home(const Exchange& x, int rank, int role, int64_t row, int64_t head, int own_chunks) {
  if (role == kQuery || own_chunks < 0) return false;
  const bool own = owner(x, rank, role, row).first == rank;
  return own && chunk_of(x, role, rank % x.ulysses, head) >= own_chunks;
}

inline int64_t expected_sent(const Exchange& x, int rank, int role, int64_t b, int64_t row, int64_t head, int64_t dim) {
  const bool query = role == kQuery;
  const auto [from, local] = owner(x, rank, role, row);
  if (from < 0) return kUntouched;
  int64_t before = 0;
  for (int i = 0; i < rank % x.ulysses; ++i) before += query ? x.q_heads[i] : x.kv_heads[i];
  return origin(from, role, b, local, before + head, dim);
}

// Where an output row of `rank` comes from: the peer that attends with this head, and the row in the peer's output.
inline int64_t expected_returned(const Exchange& x, int rank, bool text, int64_t b, int64_t row, int64_t head,
                                 int64_t dim) {
  const int first = rank / x.ulysses * x.ulysses;
  int index = 0;
  while (head >= x.q_heads[index]) head -= x.q_heads[index++];
  int64_t before = 0, tokens = 0;
  for (int r = first; r < rank; ++r) before += x.seq[r];
  for (int r = first; r < first + x.ulysses; ++r) tokens += x.seq[r];
  const int64_t front = text ? x.q_text_front : 0;
  int64_t source = row - front + x.q_text_front + before;
  if (row < front) source = row;
  if (row >= front + x.seq[rank]) source = x.q_text_front + tokens + (row - front - x.seq[rank]);
  return origin(first + index, kOutput, b, source, head, dim);
}

template <typename Expected>
void compare(const Target& target, const WindowShape& shape, int64_t dim, Outcome& outcome, Expected expected) {
  for (int64_t b = 0; b < shape.batch; ++b)
    for (int64_t row = 0; row < shape.rows; ++row)
      for (int64_t head = 0; head < shape.heads; ++head)
        for (int64_t d = 0; d < dim; ++d) {
          const int64_t at = ((b * shape.rows + row) * shape.heads + head) * dim + d;
          const int64_t want = expected(b, row, head, d);
          const int writes = want == kUntouched ? 0 : 1;
          outcome.wrong += target.data[at] != want || target.writes[at] != writes;
        }
}

}  // namespace oracle
