// g++ -std=c++17 -Icsrc/include csrc/tests/copy_plan_test.cpp && ./a.out
//
// Carries out the plans of all ranks on arrays that hold one number per (element): which rank, tensor, batch, row and
// head it came from, and compares every window with what the definition of the exchange says, written here a second
// time element by element. A window's element that nobody writes, or that is written twice, is a failure.
#include "copy_plan_oracle.hpp"

using namespace oracle;

namespace {

using Spoil = void (*)(std::vector<Copy>&);

Outcome run_send(const Exchange& x, unsigned roles, Padding pad, Spoil spoil, int own_chunks = -1) {
  Outcome outcome;
  const int64_t dim = dim_of(x);
  std::vector<std::array<Target, kRoles>> windows(x.world);
  for (int rank = 0; rank < x.world; ++rank)
    for (int role : {kQuery, kKey, kValue}) windows[rank][role].reset(window_bytes(x, rank, role));
  for (int rank = 0; rank < x.world; ++rank) {
    std::array<Source, kRoles> sources;
    SourceStrides strides[kRoles];
    for (int role : {kQuery, kKey, kValue}) {
      const int64_t heads = sum_of(is_kv(role) ? x.kv_heads : x.q_heads);
      sources[role] = make_source(rank, role, x.batch, x.seq[rank], heads, dim, pad);
      strides[role] = sources[role].strides;
    }
    std::vector<Copy> plan = plan_send(x, rank, strides, roles, false, own_chunks);
    if (spoil && rank == x.world - 1) spoil(plan);
    outcome.ordered = outcome.ordered && in_order(plan, x, rank);
    for (const Copy& c : plan) {
      outcome.inside = carry_out(c, sources[c.role], windows[c.peer][c.role]) && outcome.inside;
      const int64_t first_head = c.dst_offset % c.dst_pitch / x.head_bytes;
      outcome.in_chunks = in_chunk(x, c, c.peer % x.ulysses, first_head) && outcome.in_chunks;
    }
  }
  for (int rank = 0; rank < x.world; ++rank) {
    for (int role : {kQuery, kKey, kValue}) {
      const bool sent = roles >> role & 1u;
      compare(windows[rank][role], window_of(x, rank, role), dim, outcome,
              [&](int64_t b, int64_t row, int64_t head, int64_t d) {
                const bool home = stays_home(x, rank, role, row, head, own_chunks);
                return sent && !home ? expected_sent(x, rank, role, b, row, head, d) : kUntouched;
              });
    }
  }
  return outcome;
}

Outcome run_return(const Exchange& x, bool text, Padding pad, Spoil spoil) {
  Outcome outcome;
  const int64_t dim = dim_of(x);
  std::vector<Target> windows(x.world);
  for (int rank = 0; rank < x.world; ++rank) windows[rank].reset(window_bytes(x, rank, kOutput, text));
  for (int rank = 0; rank < x.world; ++rank) {
    const WindowShape held = window_of(x, rank, kQuery);
    const Source source = make_source(rank, kOutput, x.batch, held.rows, held.heads, dim, pad);
    std::vector<Copy> plan = plan_return(x, rank, source.strides, text);
    if (spoil && rank == x.world - 1) spoil(plan);
    outcome.ordered = outcome.ordered && in_order(plan, x, rank);
    int64_t before = 0;
    for (int i = 0; i < rank % x.ulysses; ++i) before += x.q_heads[i];
    for (const Copy& c : plan) {
      outcome.inside = carry_out(c, source, windows[c.peer]) && outcome.inside;
      const int64_t first_head = c.dst_offset % c.dst_pitch / x.head_bytes - before;
      outcome.in_chunks = in_chunk(x, c, rank % x.ulysses, first_head) && outcome.in_chunks;
    }
  }
  for (int rank = 0; rank < x.world; ++rank) {
    compare(windows[rank], window_of(x, rank, kOutput, text), dim, outcome,
            [&](int64_t b, int64_t row, int64_t head, int64_t d) {
              return expected_returned(x, rank, text, b, row, head, d);
            });
  }
  return outcome;
}

// In place: the rank's rows lie in its own window already, and only the peers' rows arrive.
Outcome run_in_place(const Exchange& x) {
  Outcome outcome;
  const int64_t dim = dim_of(x);
  const WindowShape shape = window_of(x, 0, kKey);
  const int64_t row_words = shape.heads * dim;
  std::vector<Target> windows(x.world);
  std::vector<Source> sources(x.world);
  for (int rank = 0; rank < x.world; ++rank) {
    windows[rank].reset(window_bytes(x, rank, kKey));
    sources[rank].data = windows[rank].data;
    sources[rank].strides = {row_words * kElement, shape.rows * row_words * kElement};
    int64_t first = 0;
    while (first < shape.rows && owner(x, rank, kKey, first).first != rank) ++first;
    for (int64_t b = 0; b < x.batch; ++b)
      for (int64_t s = 0; s < x.seq[rank]; ++s)
        for (int64_t w = 0; w < row_words; ++w) {
          const int64_t at = (b * shape.rows + first + s) * row_words + w;
          sources[rank].data[at] = windows[rank].data[at] = origin(rank, kKey, b, s, w / dim, w % dim);
          ++windows[rank].writes[at];
        }
  }
  for (int rank = 0; rank < x.world; ++rank) {
    SourceStrides strides[kRoles] = {};
    strides[kKey] = sources[rank].strides;
    const std::vector<Copy> plan = plan_send(x, rank, strides, 1u << kKey, true);
    outcome.ordered = outcome.ordered && in_order(plan, x, rank);
    for (const Copy& c : plan)
      outcome.inside = c.peer != rank && carry_out(c, sources[rank], windows[c.peer]) && outcome.inside;
  }
  for (int rank = 0; rank < x.world; ++rank) {
    compare(windows[rank], shape, dim, outcome, [&](int64_t b, int64_t row, int64_t head, int64_t d) {
      return expected_sent(x, rank, kKey, b, row, head, d);
    });
  }
  return outcome;
}

Exchange random_exchange(Random& random, int world) {
  Exchange x;
  x.world = world;
  do x.ulysses = int(random.between(1, world));
  while (world % x.ulysses != 0);
  x.chunks.resize(random.between(1, 4));
  for (int64_t& weight : x.chunks) weight = random.below(2) ? 1 : random.between(1, 9);
  x.batch = random.between(1, 2);
  x.head_bytes = random.between(1, 3) * kElement;
  const int64_t ratio = random.between(1, 3);
  for (int rank = 0; rank < world; ++rank) x.seq.push_back(random.below(4) == 0 ? 0 : random.between(1, 7));
  for (int index = 0; index < x.ulysses; ++index) {
    x.kv_heads.push_back(random.between(random.below(8) == 0 ? 0 : 1, 5));
    x.q_heads.push_back(random.below(6) == 0 ? random.between(1, 7) : x.kv_heads.back() * ratio);
  }
  if (random.below(2)) x.kv_text_front = random.between(0, 3), x.kv_text_back = random.between(0, 2);
  if (random.below(2)) x.q_text_front = x.kv_text_front, x.q_text_back = x.kv_text_back;
  x.own_last = random.below(2);
  return x;
}

// From that row on a window holds nothing of a peer, and with own rows last all of them.
bool waits_where_peers_end(const Exchange& x, int rank) {
  const int64_t wait_row = first_row_without_peers(x, rank), rows = window_of(x, rank, kKey).rows;
  bool good = wait_row <= rows - x.kv_text_back;
  for (int64_t row = 0; row < rows; ++row) {
    const int from = owner(x, rank, kKey, row).first;
    if (row >= wait_row) good = good && (from < 0 || from == rank);
    if (row < wait_row && x.own_last) good = good && from != rank;
  }
  return good;
}

void test_own_rows_come_last() {
  Exchange x;
  x.world = 4, x.seq = {3, 5, 2, 4}, x.q_heads = x.kv_heads = {1}, x.head_bytes = kElement;
  x.kv_text_front = 2, x.own_last = true;
  const int64_t wanted[] = {kv_row(x, 1, 2), kv_row(x, 1, 3), kv_row(x, 1, 0), kv_row(x, 1, 1)};
  const int64_t rows[] = {2, 4, 8, 11};
  check(std::equal(rows, rows + 4, wanted), "rank 1 holds the tokens of 2, 3, 0 and 1");
  check(first_row_without_peers(x, 1) == 11 && first_row_without_peers(x, 3) == 12, "own rows need no peer");
  x.own_last = false;
  check(kv_row(x, 1, 2) == 10 && first_row_without_peers(x, 1) == 16, "rows of peers reach to the end");
  check(first_row_without_peers(x, 3) == 12, "the last rank's rows are the last anyway");
}

void test_random(int world, int rounds) {
  Random random(world);
  for (int round = 0; round < rounds; ++round) {
    const Exchange x = random_exchange(random, world);
    check(problem_with(x).empty(), describe(x) + ": " + problem_with(x));
    const Padding pad = random.below(2) ? Padding{random.between(0, 9), random.between(0, 30)} : Padding{0, 0};
    const unsigned kv = 1u << kKey | 1u << kValue, roles = random.below(3) ? kv | 1u << kQuery : kv;
    check(run_send(x, roles, pad, nullptr).good(), "send " + describe(x));
    const int own_chunks = int(random.below(x.num_chunks() + 1));
    check(run_send(x, roles, pad, nullptr, own_chunks).good(),
          "send " + describe(x) + " own " + std::to_string(own_chunks));
    for (bool text : {false, true}) check(run_return(x, text, pad, nullptr).good(), "return " + describe(x));
    Exchange gather = x;
    gather.ulysses = 1;
    gather.q_heads.resize(1), gather.kv_heads.resize(1);
    check(run_in_place(gather).good(), "in place " + describe(gather));
    for (int rank = 0; rank < world; ++rank) check(waits_where_peers_end(x, rank), "wait row " + describe(x));
  }
}

// Each of these faults must be seen; a test that cannot fail shows nothing.
void test_negative_control() {
  Exchange x;
  x.world = 4, x.ulysses = 2, x.chunks = {1, 3}, x.head_bytes = 2 * kElement;
  x.seq = {3, 5, 0, 4}, x.q_heads = {4, 6}, x.kv_heads = {2, 3}, x.kv_text_front = x.q_text_front = 2;
  const unsigned all = 1u << kQuery | 1u << kKey | 1u << kValue;
  check(run_send(x, all, {0, 0}, nullptr).good() && run_return(x, true, {0, 0}, nullptr).good(), "the control itself");
  x.own_last = true;
  check(run_send(x, all, {0, 0}, nullptr).good(), "the control itself with own rows last");
  const Spoil faults[] = {
      [](std::vector<Copy>& p) { p[0].dst_offset += p[0].dst_pitch; },
      [](std::vector<Copy>& p) { p[0].src_offset += 2 * kElement; },
      [](std::vector<Copy>& p) { p.pop_back(); },
      [](std::vector<Copy>& p) { p.push_back(p.back()); },
      [](std::vector<Copy>& p) { p.back().rows += 64; },
      [](std::vector<Copy>& p) { std::swap(p.front(), p.back()); },
      [](std::vector<Copy>& p) { p[0].dst_offset = -kElement; },
  };
  for (Spoil fault : faults) {
    check(!run_send(x, all, {0, 0}, fault).good(), "a spoilt send plan passes");
    check(!run_return(x, true, {0, 0}, fault).good(), "a spoilt return plan passes");
  }
}

void test_boundaries_follow_the_weights() {
  Exchange x;
  x.q_heads = {20}, x.kv_heads = {10}, x.chunks = {1, 2, 5};
  const Range wanted[] = {{0, 1}, {1, 3}, {3, 10}};
  for (int chunk = 0; chunk < 3; ++chunk) {
    const Range kv = kv_chunk(x, 0, chunk), q = q_chunk(x, 0, chunk);
    check(kv.begin == wanted[chunk].begin && kv.end == wanted[chunk].end, "key heads of a weighted chunk");
    check(q.begin == 2 * kv.begin && q.end == 2 * kv.end, "query heads of a weighted chunk");
  }
}

void test_problems() {
  Exchange good;
  good.world = 4, good.ulysses = 2, good.head_bytes = 16;
  good.seq = {1, 1, 1, 1}, good.q_heads = good.kv_heads = {1, 1};
  check(problem_with(good).empty(), "a right exchange is refused");
  const auto refused = [&](auto change) {
    Exchange x = good;
    change(x);
    return !problem_with(x).empty();
  };
  check(refused([](Exchange& x) { x.ulysses = 3; }), "a degree that does not divide");
  check(refused([](Exchange& x) { x.seq.pop_back(); }), "too few lengths");
  check(refused([](Exchange& x) { x.seq[0] = -1; }), "a negative length");
  check(refused([](Exchange& x) { x.q_heads.push_back(1); }), "too many head counts");
  check(refused([](Exchange& x) { x.chunks.clear(); }), "no chunk");
  check(refused([](Exchange& x) { x.chunks = {2, 0}; }), "a chunk without weight");
  check(refused([](Exchange& x) { x.chunks = {int64_t{1} << 60, 1}; }), "a weight that overflows");
  check(refused([](Exchange& x) { x.kv_text_back = -1; }), "negative text");
  check(refused([](Exchange& x) { x.head_bytes = 0; }), "empty heads");
}

}  // namespace

int main() {
  for (int world = 1; world <= 8; ++world) test_random(world, 150);
  test_own_rows_come_last();
  test_negative_control();
  test_boundaries_follow_the_weights();
  test_problems();
  if (failures == 0) std::puts("copy plan: every byte once, in order, for worlds 1 to 8");
  return failures ? 1 : 0;
}
