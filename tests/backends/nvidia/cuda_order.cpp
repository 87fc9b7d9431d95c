// The clocks of `cuda_order.h`, and what accesses are held against. Compiled apart: its own accesses are none of a kernel's.

#include "cuda_order.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <utility>

namespace order {

using u32 = unsigned int;
using u8 = unsigned char;

// --- what is known ------------------------------------------------------------------------------------------------------

enum Which { kWritten, kShown, kPassed };

// How far each line of events has been seen: threads first, then what goes on beside them.
struct Clocks {
  std::vector<u32> seen[3];

  void set(int which, u32 line, u32 time) {
    auto& of = seen[which];
    if (line >= of.size()) of.resize(line + 1);
    of[line] = std::max(of[line], time);
  }
  void join(const std::vector<u32>& from, int which) {
    auto& to = seen[which];
    if (to.size() < from.size()) to.resize(from.size());
    for (std::size_t i = 0; i < from.size(); i++) to[i] = std::max(to[i], from[i]);
  }
};
using Base = std::shared_ptr<const Clocks>;
constexpr std::size_t kMostSteps = 64, kMostKept = 256;

static u32 time_of(const Point& point, int which, u32 line) {
  u32 time = point.base && line < point.base->seen[which].size() ? point.base->seen[which][line] : 0;
  for (const Step& step : point.more) {
    if (step.line == line && step.which == which) time = std::max(time, step.time);
  }
  return time;
}
static void learn(Point& point, int which, u32 line, u32 time) {
  for (Step& step : point.more) {
    if (step.line != line || step.which != which) continue;
    step.time = std::max(step.time, time);
    return;
  }
  point.more.push_back({which, line, time});
  if (point.more.size() > kMostSteps) settle(point);
}
// Threads that knew the same learn the same, so what was made for one is kept for the next.
template <typename Make>
static Base made_once(const Base& a, const Base& b, Make make) {
  static std::map<std::pair<Base, Base>, Base> kept;  // of each `Make`
  if (kept.size() > kMostKept) kept.clear();
  Base& made = kept[{a, b}];
  if (!made) {
    Clocks all = *a;
    make(all);
    made = std::make_shared<const Clocks>(std::move(all));
  }
  return made;
}
static void join(Point& to, const Point& from) {
  if (!to.base) to.base = from.base;
  if (from.base && from.base != to.base) {
    to.base = made_once(to.base, from.base, [&](Clocks& all) {
      for (const int which : {kWritten, kShown, kPassed}) all.join(from.base->seen[which], which);
    });
  }
  to.more.insert(to.more.end(), from.more.begin(), from.more.end());
}

// --- accesses -----------------------------------------------------------------------------------------------------------

struct Event {
  u32 line, time;     // time 0: there was none
  const void* place;  // in the code
  bool beside;        // by an asynchronous unit
  bool atomic;
};
struct Cell {
  Event last = {};  // that wrote, and was not atomic
  std::vector<Event> reads, atomics;  // since then, the last of each line
};
struct Thread {
  Point knows;
  bool left = false;
  u32 own_copies = 0, products = 0;  // groups so far
};
// A barrier in shared memory: who made it when, and whether others were let see it.
struct Made {
  u32 line, time;
  bool done;
};
enum Beside { kProducts, kOwnCopies, kCopiesFrom, kCounted };
using Finding = std::tuple<std::string, const void*, const void*>;  // what, and two places in the code

static const int* running;
static int per_block, count;
static u8* memory;
static std::size_t block_bytes, all_bytes;
static std::vector<Thread> threads;
static std::map<const void*, Made> barriers;
static std::vector<Cell> cells;  // a byte each
static std::map<std::pair<Beside, std::uintptr_t>, u32> lines_beside;  // by what it is, and whose
static std::vector<u32> times_beside;
static std::vector<std::map<u32, Event>> far;  // the last accesses of other blocks to a block's memory, by their lines
static std::map<Finding, std::string> found;

static Thread& self() { return threads[*running]; }
static Point& own() { return self().knows; }
static u32 line_of(Beside what, std::uintptr_t whose) {
  const auto [at, is_new] = lines_beside.emplace(std::make_pair(what, whose), static_cast<u32>(count + lines_beside.size()));
  if (is_new) times_beside.push_back(0);
  return at->second;
}
static bool is_shared(const void* p) { return static_cast<std::size_t>(static_cast<const u8*>(p) - memory) < all_bytes; }

static void report(const char* what, const Event& first, const Event& second, std::size_t at) {
  char text[128];
  std::snprintf(text, sizeof text, "byte %zu, lines of events %u and %u of %d threads", at, first.line, second.line, count);
  found.emplace(Finding{what, first.place, second.place}, text);
}
static void check_other_block(const Event& event, std::size_t block, std::size_t at) {
  const int first = static_cast<int>(block) * per_block;
  if (time_of(own(), kPassed, first) == 0) report("before its block has begun", {}, event, at);
  const bool ended = std::all_of(&threads[first], &threads[first] + per_block, [](const Thread& t) { return t.left; });
  if (ended) report("after its block has ended", {}, event, at);
  far[block][event.line] = event;
}
// An access of the running thread, or of what it starts: then line and time are not its own.
static void access(const void* p, std::size_t bytes, const Event& event, bool writes) {
  const Point& knows = own();
  const std::size_t from = static_cast<const u8*>(p) - memory, block = from / block_bytes, at = from % block_bytes;
  if (static_cast<int>(block) != *running / per_block) check_other_block(event, block, at);
  // a thread knows what it did itself, and nobody knows of copies of one barrier or group what came first
  const auto concerns = [&](const Event& before) { return before.line != event.line || event.line >= static_cast<u32>(count); };
  const auto check_write = [&](const Event& last) {
    if (!concerns(last)) return;
    const int needed = writes && last.beside ? kPassed : kWritten;  // a copy that was waited for is over
    if (time_of(knows, needed, last.line) < last.time) report(writes ? "write after write" : "read after write", last, event, at);
    else if (event.beside && !last.beside && time_of(knows, kShown, last.line) < last.time) report("no fence before an asynchronous unit", last, event, at);
  };
  for (std::size_t i = from; i < from + bytes; i++) {
    Cell& cell = cells[i];
    if (cell.last.time != 0) check_write(cell.last);
    if (!event.atomic) std::for_each(cell.atomics.begin(), cell.atomics.end(), check_write);
    if (writes) {
      for (const Event& read : cell.reads) {
        if (concerns(read) && time_of(knows, kPassed, read.line) < read.time) report("write after read", read, event, at);
      }
    }
    if (writes && !event.atomic) {
      cell.reads.clear();
      cell.atomics.clear();
      cell.last = event;
      continue;
    }
    auto& others = event.atomic ? cell.atomics : cell.reads;
    const auto same = std::find_if(others.begin(), others.end(), [&](const Event& other) { return other.line == event.line; });
    if (same != others.end()) *same = event;
    else others.push_back(event);
  }
}
static void own_access(const void* p, std::size_t bytes, const void* place, bool writes, bool atomic = false) {
  if (!is_shared(p)) return;
  const u32 line = static_cast<u32>(*running);
  access(p, bytes, {line, time_of(own(), kWritten, line), place, false, atomic}, writes);
}

void read(const void* p, std::size_t bytes) { own_access(p, bytes, CALLED_FROM, false); }
void write(const void* p, std::size_t bytes) { own_access(p, bytes, CALLED_FROM, true); }
static void check_made(const void* barrier, const void* place) {
  const auto at = barriers.find(barrier);
  if (at == barriers.end() || !at->second.done || time_of(own(), kPassed, at->second.line) < at->second.time) {
    report("before its barrier is made", {}, {0, 0, place, true, false}, static_cast<const u8*>(barrier) - memory);
  }
}
void make_barrier(const void* barrier) {
  const u32 line = static_cast<u32>(*running);
  barriers[barrier] = {line, time_of(own(), kWritten, line), false};
}
void barriers_are_made() {
  for (auto& [place, made] : barriers) made.done |= made.line == static_cast<u32>(*running);
}
void change(const void* p, std::size_t bytes, const void* place) { own_access(p, bytes, place, true, true); }

const char* findings() {
  static std::string all;
  all.clear();
  Dl_info library;
  dladdr(reinterpret_cast<void*>(&findings), &library);
  // a call returns behind the line that it stands in
  const auto offset = [&](const void* p) { return p == nullptr ? 0 : static_cast<const u8*>(p) - static_cast<const u8*>(library.dli_fbase) - 1; };
  for (const auto& [finding, more] : found) {
    const auto& [what, first, second] = finding;
    char places[64];
    std::snprintf(places, sizeof places, "\t%lx\t%lx\t", offset(first), offset(second));
    all += what + places + more + "\n";
  }
  found.clear();
  return all.c_str();
}

// --- threads and barriers -----------------------------------------------------------------------------------------------

void begin(int cluster, int threads_of_block, u8* first_byte, std::size_t bytes_of_block, const int* current) {
  running = current;
  per_block = threads_of_block;
  count = cluster * threads_of_block;
  memory = first_byte;
  block_bytes = bytes_of_block;
  all_bytes = cluster * bytes_of_block;
  threads.assign(count, {});
  cells.assign(all_bytes, {});
  lines_beside.clear();
  times_beside.clear();
  barriers.clear();
  far.assign(cluster, {});
  for (int i = 0; i < count; i++) {
    learn(threads[i].knows, kWritten, i, 1);
    learn(threads[i].knows, kPassed, i, 1);
  }
}
void end() {
  all_bytes = 0;
  release(threads);
  release(cells);
  release(barriers);
  release(far);
}
void leave() {
  self().left = true;
  const int block = *running / per_block, first = block * per_block;
  for (int i = first; i < first + per_block; i++) {
    if (!threads[i].left) return;
  }
  // of what others do to the block's memory, and of what goes on beside its own threads, the latest of each line
  std::map<u32, Event> latest = far[block];
  const auto add = [&](const Event& event) {
    if (event.time != 0 && event.beside && event.time >= latest[event.line].time) latest[event.line] = event;
  };
  for (std::size_t i = block * block_bytes; i < (block + 1) * block_bytes; i++) {
    add(cells[i].last);
    for (const Event& event : cells[i].reads) add(event);
  }
  for (const auto& [line, event] : latest) {
    bool known = false;
    for (int i = first; i < first + per_block; i++) known |= time_of(threads[i].knows, kPassed, line) >= event.time;
    if (!known) report("its block may end before", {}, event, 0);
  }
}

void stuck(int waiting) { found.emplace(Finding{"nobody can go on", nullptr, nullptr}, std::to_string(waiting) + " threads wait"); }

static void move_on(u32 time) {
  learn(own(), kWritten, *running, time);
  learn(own(), kPassed, *running, time);
}
static void tick() { move_on(time_of(own(), kWritten, *running) + 1); }
void give(Point& to) {
  join(to, own());
  tick();
}
// What the thread has passed, and nothing that it wrote.
static void join_passed(Point& to) {
  Point passed;
  if (own().base) passed.base = made_once(own().base, nullptr, [](Clocks& all) { all.seen[kWritten] = all.seen[kShown] = {}; });
  const auto& more = own().more;
  std::copy_if(more.begin(), more.end(), std::back_inserter(passed.more), [](const Step& step) { return step.which == kPassed; });
  join(to, passed);
}
void give_passed(Point& to) {
  join_passed(to);
  tick();
}
void take(const Point& from) { join(own(), from); }
void take_all(const Point& from) {
  const u32 time = time_of(own(), kWritten, *running);
  own() = from;
  move_on(time);
}
void settle(Point& point) {
  if (point.more.empty()) return;
  Clocks all = point.base ? *point.base : Clocks();
  for (const Step& step : point.more) all.set(step.which, step.line, step.time);
  point.base = std::make_shared<const Clocks>(std::move(all));
  point.more.clear();
}
void forget(Point& point) { point = {}; }
void show() {
  Point& knows = own();
  if (knows.base) {
    knows.base = made_once(knows.base, nullptr, [&](Clocks& all) { all.join(knows.base->seen[kWritten], kShown); });
  }
  for (std::size_t i = 0, steps = knows.more.size(); i < steps; i++) {
    const Step step = knows.more[i];
    if (step.which == kWritten) knows.more.push_back({kShown, step.line, step.time});
  }
  tick();  // what the thread writes from now on is not shown
}

// --- what goes on beside threads ----------------------------------------------------------------------------------------

void counted_source(const void* from, std::size_t bytes, const void* barrier, const void* place) {
  const u32 line = line_of(kCounted, reinterpret_cast<std::uintptr_t>(barrier));
  access(from, bytes, {line, times_beside[line - count] + 1, place, true, false}, false);
}
void counted_copy(const void* to, std::size_t bytes, const void* barrier, Point& point, const void* place) {
  check_made(barrier, place);
  const u32 line = line_of(kCounted, reinterpret_cast<std::uintptr_t>(barrier)), time = ++times_beside[line - count];
  access(to, bytes, {line, time, place, true, false}, true);
  join_passed(point);  // what came before the copy's start came before its end
  tick();
  for (const int which : {kWritten, kShown, kPassed}) learn(point, which, line, time);
}
void copied_from(const void* from, std::size_t bytes, const void* place) {
  const u32 line = line_of(kCopiesFrom, *running);
  access(from, bytes, {line, ++times_beside[line - count], place, true, false}, false);
}
void wait_copied_from() {
  const u32 line = line_of(kCopiesFrom, *running);
  learn(own(), kPassed, line, times_beside[line - count]);
}
void own_copy(const void* to, std::size_t bytes, const void* place) {
  access(to, bytes, {line_of(kOwnCopies, *running), self().own_copies + 1, place, false, false}, true);
}
void commit_own_copies() { self().own_copies++; }
static void learn_own_copies(Point& who, u32 groups) {
  for (const int which : {kWritten, kPassed}) learn(who, which, line_of(kOwnCopies, *running), groups);
}
void wait_own_copies(unsigned newest) { learn_own_copies(own(), self().own_copies - std::min(self().own_copies, newest)); }
void give_own_copies(Point& to) { learn_own_copies(to, ++self().own_copies); }
void products_read(const void* p, std::size_t bytes) {
  access(p, bytes, {line_of(kProducts, *running / 32), self().products + 1, CALLED_FROM, true, false}, false);
}
void commit_products() { self().products++; }
void wait_products(unsigned newest) {
  learn(own(), kPassed, line_of(kProducts, *running / 32), self().products - std::min(self().products, newest));
}

}  // namespace order

// What the compiler calls before each access of the kernel's own code (-fsanitize=thread).
#define ACCESS(bytes)                                                                                        \
  void __tsan_read##bytes(void* p) { order::own_access(p, bytes, CALLED_FROM, false); }                             \
  void __tsan_write##bytes(void* p) { order::own_access(p, bytes, CALLED_FROM, true); }                             \
  void __tsan_unaligned_read##bytes(void* p) { order::own_access(p, bytes, CALLED_FROM, false); }                   \
  void __tsan_unaligned_write##bytes(void* p) { order::own_access(p, bytes, CALLED_FROM, true); }
extern "C" {
ACCESS(1)
ACCESS(2)
ACCESS(4)
ACCESS(8)
ACCESS(16)
void __tsan_read_range(void* p, unsigned long bytes) { order::own_access(p, bytes, CALLED_FROM, false); }
void __tsan_write_range(void* p, unsigned long bytes) { order::own_access(p, bytes, CALLED_FROM, true); }
int __tsan_atomic32_fetch_add(volatile int* p, int v, int) {  // of shared pointers
  const int before = *p;
  *p = before + v;
  return before;
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}
