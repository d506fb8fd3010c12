// What an exchange is: who holds which tokens and heads, and how large each window is. Plain C++17 and plain integers.
//
// AGKV, Ulysses and their hybrid are one exchange with an "ulysses degree" u that divides the world P (u = 1: AGKV,
// u = P: Ulysses). Rank r has index r % u in group r / u. Heads are split over the u indices, tokens over the P ranks.
//   send:   K and V of every rank go to every rank (the heads of the receiver's index); Q goes to the own group only.
//   return: the output of every rank goes back within the group, each rank's rows with the sender's heads.
// A window is what a rank receives into: (batch, text_front + rows + text_back, heads, head_dim), contiguous. Rows of
// replicated text are the receiver's own business, except on the way back, where every rank gives its heads of them to
// its group if asked to.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

namespace fast_cp {

enum Role : int { kQuery = 0, kKey = 1, kValue = 2, kOutput = 3 };
constexpr int kRoles = 4;

// What is asked for; equal on every rank.
struct Exchange {
  int world = 1;
  int ulysses = 1;
  int64_t batch = 1;
  int64_t head_bytes = 0;          // head_dim × element size
  std::vector<int64_t> chunks{1};  // weights of the head groups that are sent, announced and awaited one by one
  std::vector<int64_t> seq;        // tokens of each rank; zero is allowed
  std::vector<int64_t> q_heads;    // query heads of each index in the group
  std::vector<int64_t> kv_heads;   // key and value heads of each index
  int64_t kv_text_front = 0, kv_text_back = 0;
  int64_t q_text_front = 0, q_text_back = 0;  // of queries and output; zero where the text asks nothing
  bool own_last = false;  // tokens of K and V lie in the order r + 1, …, world - 1, 0, …, r in the windows of rank r

  int num_chunks() const { return int(chunks.size()); }
  auto tied() const {
    return std::tie(world, ulysses, batch, head_bytes, chunks, seq, q_heads, kv_heads, kv_text_front, kv_text_back,
                    q_text_front, q_text_back, own_last);
  }
  bool operator==(const Exchange& other) const { return tied() == other.tied(); }
};

constexpr int64_t kLargestChunkWeight = 1000000;  // heads × sum of weights must not overflow

struct WindowShape {
  int64_t batch, rows, heads;
};

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};

inline int64_t sum_of(const std::vector<int64_t>& values, size_t begin, size_t end) {
  return std::accumulate(values.begin() + begin, values.begin() + end, int64_t{0});
}
inline int64_t sum_of(const std::vector<int64_t>& values) { return sum_of(values, 0, values.size()); }

inline int group_of(const Exchange& x, int rank) { return rank / x.ulysses; }
inline int index_of(const Exchange& x, int rank) { return rank % x.ulysses; }
inline int first_of_group(const Exchange& x, int rank) { return group_of(x, rank) * x.ulysses; }

// Tokens of the ranks before `rank`, in the whole sequence and in the group's part of it.
inline int64_t rows_before(const Exchange& x, int rank) { return sum_of(x.seq, 0, rank); }
inline int64_t rows_before_in_group(const Exchange& x, int rank) {
  return sum_of(x.seq, first_of_group(x, rank), rank);
}
inline int64_t group_rows(const Exchange& x, int rank) {
  const int first = first_of_group(x, rank);
  return sum_of(x.seq, first, first + x.ulysses);
}

// Where the tokens of `sender` begin in the K and V windows of `receiver`.
inline int64_t kv_row(const Exchange& x, int receiver, int sender) {
  const int64_t row = x.kv_text_front + rows_before(x, sender);
  if (!x.own_last) return row;
  return row - rows_before(x, receiver + 1) + (sender > receiver ? 0 : sum_of(x.seq));
}
// The first row of the K and V windows of `rank` from which on no peer writes.
inline int64_t first_row_without_peers(const Exchange& x, int rank) {
  return kv_row(x, rank, rank) + (x.own_last || rank == x.world - 1 ? 0 : sum_of(x.seq, rank, x.world));
}

// `heads` heads split by the chunks' weights. A chunk may be empty.
inline Range weighted_part(const Exchange& x, int64_t heads, int chunk) {
  const int64_t all = sum_of(x.chunks), before = sum_of(x.chunks, 0, chunk);
  return {heads * before / all, heads * (before + x.chunks[chunk]) / all};
}

// Heads of chunk `chunk` among the key and value heads of `index`, counted from that index's first head.
inline Range kv_chunk(const Exchange& x, int index, int chunk) { return weighted_part(x, x.kv_heads[index], chunk); }

// The same for query heads: those that belong to the chunk's key heads where the two counts form a GQA ratio.
inline Range q_chunk(const Exchange& x, int index, int chunk) {
  const int64_t q = x.q_heads[index], kv = x.kv_heads[index];
  if (kv > 0 && q % kv == 0) {
    const Range range = kv_chunk(x, index, chunk);
    return {range.begin * (q / kv), range.end * (q / kv)};
  }
  return weighted_part(x, q, chunk);
}

inline bool is_kv(int role) { return role == kKey || role == kValue; }
inline Range chunk_heads(const Exchange& x, int role, int index, int chunk) {
  return is_kv(role) ? kv_chunk(x, index, chunk) : q_chunk(x, index, chunk);
}
inline int64_t head_offset(const Exchange& x, int role, int index) {
  return sum_of(is_kv(role) ? x.kv_heads : x.q_heads, 0, index);
}

// The window of `rank`. With `text` the output's window also holds the rows of replicated text.
inline WindowShape window_of(const Exchange& x, int rank, int role, bool text = false) {
  if (role == kOutput) {
    const int64_t extra = text ? x.q_text_front + x.q_text_back : 0;
    return {x.batch, x.seq[rank] + extra, sum_of(x.q_heads)};
  }
  if (role == kQuery) {
    return {x.batch, x.q_text_front + group_rows(x, rank) + x.q_text_back, x.q_heads[index_of(x, rank)]};
  }
  return {x.batch, x.kv_text_front + sum_of(x.seq) + x.kv_text_back, x.kv_heads[index_of(x, rank)]};
}

inline int64_t window_bytes(const Exchange& x, int rank, int role, bool text = false) {
  const WindowShape shape = window_of(x, rank, role, text);
  return shape.batch * shape.rows * shape.heads * x.head_bytes;
}

// The largest window of any rank: what each rank reserves, so that offsets agree everywhere.
inline int64_t largest_window_bytes(const Exchange& x, int role, bool text = false) {
  int64_t largest = 0;
  for (int rank = 0; rank < x.world; ++rank) largest = std::max(largest, window_bytes(x, rank, role, text));
  return largest;
}

// Empty when the exchange makes sense, else a sentence.
inline std::string problem_with(const Exchange& x) {
  auto negative = [](const std::vector<int64_t>& v) { return !v.empty() && *std::min_element(v.begin(), v.end()) < 0; };
  auto str = [](int64_t v) { return std::to_string(v); };
  if (x.world < 1) return "the world must hold at least one rank, not " + str(x.world);
  if (x.ulysses < 1 || x.world % x.ulysses != 0) {
    return "the ulysses degree " + str(x.ulysses) + " does not divide " + str(x.world) + " ranks";
  }
  if (x.seq.size() != size_t(x.world)) {
    return str(x.seq.size()) + " sequence lengths were given for " + str(x.world) + " ranks";
  }
  if (x.q_heads.size() != size_t(x.ulysses) || x.kv_heads.size() != size_t(x.ulysses)) {
    return "head counts must be given for each of the " + str(x.ulysses) + " ranks that split the heads, not " +
           str(x.q_heads.size()) + " for queries and " + str(x.kv_heads.size()) + " for keys";
  }
  if (negative(x.seq) || negative(x.q_heads) || negative(x.kv_heads))
    return "lengths and head counts must not be negative";
  if (x.kv_text_front < 0 || x.kv_text_back < 0 || x.q_text_front < 0 || x.q_text_back < 0) {
    return "counts of text rows must not be negative";
  }
  if (x.chunks.empty()) return "chunks is empty; give a weight for each head group ([1] for one)";
  for (int64_t weight : x.chunks) {
    if (weight < 1 || weight > kLargestChunkWeight)
      return "weights of chunks must be 1 to " + str(kLargestChunkWeight) + ", not " + str(weight);
  }
  if (x.batch < 1 || x.head_bytes < 1) return "batch and head dimension must be at least 1";
  return {};
}

}  // namespace fast_cp
