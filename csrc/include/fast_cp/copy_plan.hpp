// Who copies what, where, and in what order. Plain C++17 and plain integers: no CUDA, no torch, tested with g++ alone.
#pragma once

#include <cstdint>
#include <vector>

#include "fast_cp/exchange_shape.hpp"

namespace fast_cp {

// Bytes between neighbours in a source tensor (batch, rows, heads, head_dim) whose last two dimensions are contiguous.
struct SourceStrides {
  int64_t row = 0;
  int64_t batch = 0;
  bool operator==(const SourceStrides& other) const { return row == other.row && batch == other.batch; }
};

// `batches` × `rows` pieces of `row_bytes`. Offsets count bytes from the source's first element and the window's.
struct Copy {
  int role = 0;
  int peer = 0;
  int chunk = 0;
  int64_t src_offset = 0, dst_offset = 0;
  int64_t src_pitch = 0, dst_pitch = 0;
  int64_t row_bytes = 0, rows = 0;
  int64_t batches = 0, src_batch = 0, dst_batch = 0;
  int64_t bytes() const { return row_bytes * rows * batches; }
};

// One block: `rows` from `src_row` and the heads [begin, end) of the source to (`dst_row`, `dst_head`) of the window.
inline Copy block(const Exchange& x, int role, int peer, int chunk, const SourceStrides& src, int64_t src_row,
                  Range heads, const WindowShape& window, int64_t dst_row, int64_t dst_head, int64_t rows) {
  const int64_t pitch = window.heads * x.head_bytes;
  Copy copy;
  copy.role = role, copy.peer = peer, copy.chunk = chunk;
  copy.src_offset = src_row * src.row + heads.begin * x.head_bytes;
  copy.dst_offset = dst_row * pitch + dst_head * x.head_bytes;
  copy.src_pitch = src.row, copy.dst_pitch = pitch;
  copy.row_bytes = heads.size() * x.head_bytes, copy.rows = rows;
  copy.batches = x.batch, copy.src_batch = src.batch, copy.dst_batch = window.rows * pitch;
  return copy;
}

inline void keep(std::vector<Copy>& plan, const Copy& copy) {
  if (copy.bytes() > 0) plan.push_back(copy);
}

// Peers of `rank` in the order of sending: the next rank first, the rank itself last.
inline std::vector<int> peers_in_order(int first, int count, int rank) {
  std::vector<int> peers;
  for (int step = 1; step <= count; ++step) peers.push_back(first + (rank - first + step) % count);
  return peers;
}

// What `rank` sends. `strides` is indexed by role; a role whose bit is missing in `roles` stays at home. With
// `own_in_place` the sources lie in the rank's own windows already (at their rows), so it sends nothing to itself.
// `own_chunks`: of how many chunks it copies its own K and V rows into its own windows; -1 for all. Its own Q rows are
// always copied, since its heads' queries of the whole group must lie in one window.
inline std::vector<Copy> plan_send(const Exchange& x, int rank, const SourceStrides* strides, unsigned roles,
                                   bool own_in_place = false, int own_chunks = -1) {
  std::vector<Copy> plan;
  for (int chunk = 0; chunk < x.num_chunks(); ++chunk) {
    for (int peer : peers_in_order(0, x.world, rank)) {
      if (own_in_place && peer == rank) continue;
      for (int role : {kKey, kValue, kQuery}) {
        if (!(roles >> role & 1u) || (role == kQuery && group_of(x, peer) != group_of(x, rank))) continue;
        if (peer == rank && is_kv(role) && own_chunks >= 0 && chunk >= own_chunks) continue;
        const int index = index_of(x, peer);
        const Range part = chunk_heads(x, role, index, chunk);
        const int64_t first = head_offset(x, role, index);
        const int64_t row = role == kQuery ? x.q_text_front + rows_before_in_group(x, rank) : kv_row(x, peer, rank);
        const int64_t held = role == kQuery ? row : kv_row(x, rank, rank);  // where it lies already, if in place
        keep(plan, block(x, role, peer, chunk, strides[role], own_in_place ? held : 0,
                         {first + part.begin, first + part.end}, window_of(x, peer, role), row, part.begin,
                         x.seq[rank]));
      }
    }
  }
  return plan;
}

// What `rank` gives back: its heads of the output, to each rank of its group that rank's rows, and with `text` the
// rows of replicated text too.
inline std::vector<Copy> plan_return(const Exchange& x, int rank, const SourceStrides& src, bool text) {
  std::vector<Copy> plan;
  const int index = index_of(x, rank);
  const int64_t first = head_offset(x, kOutput, index);
  for (int chunk = 0; chunk < x.num_chunks(); ++chunk) {
    const Range heads = chunk_heads(x, kOutput, index, chunk);
    for (int peer : peers_in_order(first_of_group(x, rank), x.ulysses, rank)) {
      const WindowShape window = window_of(x, peer, kOutput, text);
      auto give = [&](int64_t src_row, int64_t dst_row, int64_t rows) {
        keep(plan, block(x, kOutput, peer, chunk, src, src_row, heads, window, dst_row, first + heads.begin, rows));
      };
      const int64_t front = text ? x.q_text_front : 0;
      give(x.q_text_front + rows_before_in_group(x, peer), front, x.seq[peer]);
      if (!text) continue;
      give(0, 0, x.q_text_front);
      give(x.q_text_front + group_rows(x, rank), front + x.seq[peer], x.q_text_back);
    }
  }
  return plan;
}

}  // namespace fast_cp
