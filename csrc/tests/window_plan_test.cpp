// g++ -std=c++17 -Icsrc/include csrc/tests/window_plan_test.cpp && ./a.out
//
// Windows never overlap, never leave the pool, stay where they must, and are the same for the same calls.
#include "fast_cp/window_plan.hpp"

#include "check.hpp"

using namespace fast_cp;

namespace {

constexpr int64_t kPage = kWindowAlignment;
constexpr Wanted kCaptured{-1, true, true}, kManaged{-1, true, false};

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
  const Grant a = plan.acquire("kv", 5 * kPage), b = plan.acquire("kv", 4 * kPage);
  const Grant c = plan.acquire("kv", kPage);
  check(a.moved && !b.moved && !c.moved, "only the first call cuts the pool");
  check(a.offset != b.offset && a.offset == c.offset && a.slot == c.slot && a.slot != b.slot,
        "two generations in turn");
}

void test_small_pool_has_one_generation() {
  WindowPlan plan(0, 8 * kPage, 16);
  const Grant a = plan.acquire("kv", 5 * kPage), b = plan.acquire("kv", 5 * kPage);
  check(a.offset == b.offset && a.slot == b.slot, "one generation where two do not fit");
}

void test_second_generation_makes_room() {
  WindowPlan plan(0, 10 * kPage, 16);
  plan.acquire("kv", 5 * kPage);
  check(plan.acquire("q", 4 * kPage).offset >= 0, "a new window takes the place of a second generation");
  check(disjoint(plan, 0, 10 * kPage), "disjoint after it");
}

void test_error_names_bytes_and_changes_nothing() {
  WindowPlan plan(0, 10 * kPage, 16);
  const Grant before = plan.acquire("kv", 5 * kPage);
  const std::string error = error_of([&] { plan.acquire("kv", 20 * kPage); });
  check(error.find("pool_bytes=" + std::to_string(20 * kPage)) != std::string::npos,
        "the error names the bytes: " + error);
  plan.acquire("kv", 5 * kPage);
  check(plan.acquire("kv", 5 * kPage).offset == before.offset, "the plan is as before");
  WindowPlan enough(0, 20 * kPage, 16);
  check(error_of([&] { enough.acquire("kv", 20 * kPage); }).empty(), "the named size is enough");
}

void test_captured_window_never_moves() {
  WindowPlan plan(0, 100 * kPage, 16);
  check(!error_of([&] { plan.acquire("kv", kPage, kCaptured); }).empty(), "a new window cannot be captured");
  plan.acquire("kv", 4 * kPage);
  const Grant captured = plan.acquire("kv", 4 * kPage, kCaptured);
  for (int pages = 8; pages < 40; pages += 8) {
    const Grant grown = plan.acquire("kv", pages * kPage);
    const bool apart = grown.offset >= captured.offset + 4 * kPage || grown.offset + pages * kPage <= captured.offset;
    check(apart && grown.slot != captured.slot, "growth leaves the captured generation alone");
  }
}

// A managed capture leaves no trace: the ranks that capture and those that call eagerly decide alike.
void test_managed_capture_pins_nothing() {
  WindowPlan capturing(0, 100 * kPage, 16), eager(0, 100 * kPage, 16);
  check(!error_of([&] { capturing.acquire("kv", kPage, kManaged); }).empty(), "a new window cannot be captured");
  for (WindowPlan* plan : {&capturing, &eager}) plan->acquire("kv", 4 * kPage);
  const int64_t version = capturing.version();
  for (int i = 0; i < 3; ++i) {
    const Grant a = capturing.acquire("kv", 4 * kPage, kManaged), b = eager.acquire("kv", 4 * kPage);
    check(a.slot == b.slot && a.offset == b.offset, "the same turn, captured or not");
  }
  check(capturing.version() == version, "a capture moves nothing");
  const Grant a = capturing.acquire("kv", 8 * kPage), b = eager.acquire("kv", 8 * kPage);
  check(a.slot == b.slot && a.offset == b.offset && a.movable == b.movable, "growth after a managed capture");
  check(a.movable.size() == 2, "both generations are waited for");
}

void test_version_grows_when_windows_change_places() {
  WindowPlan plan(0, 100 * kPage, 16);
  plan.acquire("a", 4 * kPage);
  const int64_t first = plan.version();
  plan.acquire("a", 2 * kPage), plan.acquire("a", 4 * kPage);
  check(plan.version() == first, "calls that fit move nothing");
  plan.acquire("a", 8 * kPage);
  const int64_t grown = plan.version();
  check(grown > first, "growth moves the second generation");
  plan.acquire("b", 4 * kPage);
  check(plan.version() > grown, "a new window takes the place of a second generation");
  WindowPlan apart(0, 8 * kPage, 16);
  apart.acquire("a", 5 * kPage), apart.acquire("b", 2 * kPage);
  check(apart.version() == 0, "a new window beside one that stays");
}

void test_explicit_generation_is_taken_and_sets_the_turn() {
  WindowPlan plan(0, 100 * kPage, 16);
  const Grant a = plan.acquire("kv", kPage, {0, false, false}), b = plan.acquire("kv", kPage, {1, false, false});
  check(a.slot != b.slot && a.sibling == b.slot && b.sibling == a.slot, "two generations, siblings");
  check(plan.acquire("kv", kPage, {1, false, false}).slot == b.slot, "the same one again");
  check(plan.acquire("kv", kPage).slot == a.slot, "then the other one's turn");
  check(plan.acquire("kv", kPage, {0, false, false}).slot == a.slot && plan.acquire("kv", kPage).slot == b.slot,
        "the turn follows");
  WindowPlan small(0, 8 * kPage, 16);
  const Grant only = small.acquire("kv", 5 * kPage, {1, false, false});
  check(only.slot == small.acquire("kv", 5 * kPage, {0, false, false}).slot && only.offset == 0, "the only one");
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
      const Wanted wanted{int(random.between(-1, 1)), capturing, capturing};
      Grant grant, again;
      const std::string error = error_of([&] { grant = one.acquire(tag, bytes, wanted); });
      check(error == error_of([&] { again = other.acquire(tag, bytes, wanted); }), "the same error");
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
  plan.set_open(plan.acquire("kv", kPage).slot, true);
  check(error_of([&] { plan.acquire("kv", 9 * kPage); }).find("in use") != std::string::npos, "open means no growth");
}

void test_what_creeps_up_moves_seldom() {
  WindowPlan plan(0, 1000 * kPage, 16);
  int moves = 0;
  for (int pages = 100; pages <= 200; ++pages) moves += plan.acquire("kv", pages * kPage).moved;
  check(moves <= 8, std::to_string(moves) + " moves from 100 to 200 pages");
  check(plan.windows()[0].bytes <= 230 * kPage, "an eighth to spare, not more");
}

void test_room_to_spare_costs_nobody_a_generation() {
  WindowPlan plan(0, 20 * kPage, 16);
  plan.acquire("kv", 8 * kPage);
  check(plan.acquire("kv", 10 * kPage).both && plan.windows()[0].bytes == 10 * kPage, "both generations rather");
  WindowPlan beside(0, 31 * kPage, 16);
  beside.acquire("q", 5 * kPage), beside.acquire("kv", 8 * kPage);
  beside.acquire("kv", 10 * kPage);
  check(beside.acquire("q", kPage).both, "also those of another window");
  WindowPlan full(0, 20 * kPage, 16);
  full.acquire("kv", 8 * kPage);
  check(full.acquire("kv", 20 * kPage).offset == 0, "all of the pool, and nothing to spare");
}

void test_slots_run_out_with_a_sentence() {
  WindowPlan plan(0, 1000 * kPage, 4);
  plan.acquire("a", 1), plan.acquire("b", 1);
  check(error_of([&] { plan.acquire("c", 1); }).find("all 4 slots") != std::string::npos, "slots run out");
}

}  // namespace

int main() {
  test_generations_take_turns();
  test_small_pool_has_one_generation();
  test_second_generation_makes_room();
  test_error_names_bytes_and_changes_nothing();
  test_captured_window_never_moves();
  test_managed_capture_pins_nothing();
  test_version_grows_when_windows_change_places();
  test_explicit_generation_is_taken_and_sets_the_turn();
  test_random_calls_agree_and_stay_apart();
  test_open_window_does_not_grow();
  test_what_creeps_up_moves_seldom();
  test_room_to_spare_costs_nobody_a_generation();
  test_slots_run_out_with_a_sentence();
  if (failures == 0) std::puts("window plan: apart, inside, in place, and alike on every rank");
  return failures ? 1 : 0;
}
