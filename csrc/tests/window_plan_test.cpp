// g++ -std=c++17 -Icsrc/include csrc/tests/window_plan_test.cpp && ./a.out
//
// Windows never overlap, never leave the pool, stay where they must, and are the same for the same calls.
#include "fast_cp/window_plan.hpp"

#include "check.hpp"

using namespace fast_cp;

namespace {

constexpr int64_t kPage = kWindowAlignment;

template <typename Call>
std::string error_of(Call call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

bool disjoint(const WindowPlan& plan, int64_t begin, int64_t end) {
  std::vector<Region> regions;
  for (const Window& window : plan.windows()) {
    for (const Generation& g : window.generations) {
      if (g.offset >= 0) regions.push_back({g.offset, window.bytes});
    }
  }
  std::sort(regions.begin(), regions.end(), [](auto& a, auto& b) { return a.offset < b.offset; });
  int64_t cursor = begin;
  for (const Region& region : regions) {
    if (region.offset < cursor) return false;
    cursor = region.offset + region.bytes;
  }
  return cursor <= end;
}

void test_generations_take_turns() {
  WindowPlan plan(kPage, 100 * kPage, 16);
  const Grant a = plan.acquire("kv", 5 * kPage, false), b = plan.acquire("kv", 4 * kPage, false);
  const Grant c = plan.acquire("kv", kPage, false);
  check(a.moved && !b.moved && !c.moved, "only the first call cuts the pool");
  check(a.offset != b.offset && a.offset == c.offset && a.slot == c.slot && a.slot != b.slot,
        "two generations in turn");
}

void test_small_pool_has_one_generation() {
  WindowPlan plan(0, 8 * kPage, 16);
  const Grant a = plan.acquire("kv", 5 * kPage, false), b = plan.acquire("kv", 5 * kPage, false);
  check(a.offset == b.offset && a.slot == b.slot, "one generation where two do not fit");
}

void test_second_generation_makes_room() {
  WindowPlan plan(0, 10 * kPage, 16);
  plan.acquire("kv", 5 * kPage, false);
  check(plan.acquire("q", 4 * kPage, false).offset >= 0, "a new window takes the place of a second generation");
  check(disjoint(plan, 0, 10 * kPage), "disjoint after it");
}

void test_error_names_bytes_and_changes_nothing() {
  WindowPlan plan(0, 10 * kPage, 16);
  const Grant before = plan.acquire("kv", 5 * kPage, false);
  const std::string error = error_of([&] { plan.acquire("kv", 20 * kPage, false); });
  check(error.find("pool_bytes=" + std::to_string(20 * kPage)) != std::string::npos,
        "the error names the bytes: " + error);
  plan.acquire("kv", 5 * kPage, false);
  check(plan.acquire("kv", 5 * kPage, false).offset == before.offset, "the plan is as before");
  WindowPlan enough(0, 20 * kPage, 16);
  check(error_of([&] { enough.acquire("kv", 20 * kPage, false); }).empty(), "the named size is enough");
}

void test_captured_window_never_moves() {
  WindowPlan plan(0, 100 * kPage, 16);
  check(!error_of([&] { plan.acquire("kv", kPage, true); }).empty(), "a new window cannot be captured");
  plan.acquire("kv", 4 * kPage, false);
  const Grant captured = plan.acquire("kv", 4 * kPage, true);
  check(plan.pinned(captured.slot), "captured means pinned");
  for (int pages = 8; pages < 40; pages += 8) {
    const Grant grown = plan.acquire("kv", pages * kPage, false);
    const bool apart = grown.offset >= captured.offset + 4 * kPage || grown.offset + pages * kPage <= captured.offset;
    check(apart && grown.slot != captured.slot, "growth leaves the captured generation alone");
  }
}

void test_random_calls_agree_and_stay_apart() {
  for (int seed = 0; seed < 300; ++seed) {
    Random random(seed);
    const int64_t end = random.between(20, 200) * kPage;
    WindowPlan one(kPage, end, 64), other(kPage, end, 64);
    std::vector<Region> held(64, {-1, 0});
    for (int step = 0; step < 60; ++step) {
      const std::string tag(1, char('a' + random.below(5)));
      const int64_t bytes = random.between(1, 24 * kPage);
      const bool capturing = random.below(10) == 0;
      Grant grant, again;
      const std::string error = error_of([&] { grant = one.acquire(tag, bytes, capturing); });
      check(error == error_of([&] { again = other.acquire(tag, bytes, capturing); }), "the same error");
      check(grant.slot == again.slot && grant.offset == again.offset, "two ranks cut alike");
      check(disjoint(one, kPage, end), "no overlap");
      if (!error.empty()) continue;
      check(grant.offset >= kPage && grant.offset % kWindowAlignment == 0 && grant.offset + bytes <= end,
            "inside the pool");
      const bool open = random.below(2);
      one.set_open(grant.slot, open), other.set_open(grant.slot, open);
      held[grant.slot] = open ? Region{grant.offset, bytes} : Region{-1, 0};
      for (const Window& window : one.windows())
        for (const Generation& g : window.generations)
          check(!g.open || held[g.slot].offset == g.offset, "an open window stays");
      if (random.below(3) == 0) one.set_open(grant.slot, false), other.set_open(grant.slot, false);
    }
  }
}

void test_open_window_does_not_grow() {
  WindowPlan plan(0, 100 * kPage, 16);
  plan.set_open(plan.acquire("kv", kPage, false).slot, true);
  check(error_of([&] { plan.acquire("kv", 9 * kPage, false); }).find("in use") != std::string::npos,
        "open means no growth");
}

void test_slots_run_out_with_a_sentence() {
  WindowPlan plan(0, 1000 * kPage, 4);
  plan.acquire("a", 1, false), plan.acquire("b", 1, false);
  check(error_of([&] { plan.acquire("c", 1, false); }).find("all 4 slots") != std::string::npos, "slots run out");
}

}  // namespace

int main() {
  test_generations_take_turns();
  test_small_pool_has_one_generation();
  test_second_generation_makes_room();
  test_error_names_bytes_and_changes_nothing();
  test_captured_window_never_moves();
  test_random_calls_agree_and_stay_apart();
  test_open_window_does_not_grow();
  test_slots_run_out_with_a_sentence();
  if (failures == 0) std::puts("window plan: apart, inside, in place, and alike on every rank");
  return failures ? 1 : 0;
}
