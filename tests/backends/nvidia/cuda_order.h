// Who is known to come after whom: the order that barriers give to accesses of shared memory, and accesses that have none.
//
// Every thread has a clock, and knows of others how far it has seen them: `written`, what they wrote is seen; `shown`, as far as
// that is seen by asynchronous units too (MMA, bulk copies), which a fence brings about; `passed`, they have come that far,
// and what they read before has been read. Barriers hand on what is known. What goes on beside its thread has a clock of its
// own, known when it was waited for: products of a warp, copies by group, copies that a barrier counts. An access after
// another one to the same place that its thread does not know of is a finding, in whatever order the threads ran here.

#pragma once
#include <cstddef>
#include <memory>
#include <vector>

namespace order {

// A function whose own accesses are none of the kernel's, and what calls it.
#define UNSEEN __attribute__((no_sanitize("thread"), noinline))
#define CALLED_FROM __builtin_return_address(0)

// A step of knowledge: which clock, whose line of events, how far.
struct Step {
  int which;
  unsigned line, time;
};
struct Clocks;
// What a thread knows, or a barrier: clocks that many share, and a few later steps.
struct Point {
  std::shared_ptr<const Clocks> base;
  std::vector<Step> more;
};

// `memory` is that of the first block, the others' lies behind it; `current` is where the running thread's number is.
void begin(int cluster, int threads_of_block, unsigned char* memory, std::size_t bytes_of_block, const int* current);
void end();
void leave();
// Gives back a container's memory.
template <typename T>
void release(T& of) {
  T().swap(of);
}
void stuck(int threads);  // so many wait, and nobody can go on

// Barriers: a thread gives what it knows, and takes what others gave. Relaxed, others learn only that it has come so far.
void give(Point& to);
void give_passed(Point& to);
void take(const Point& from);
void take_all(const Point& from);  // by a thread that gave all it knows there
void settle(Point& point);         // all have given
void forget(Point& point);
void show();  // what the thread sees written is seen by asynchronous units from now on

// Accesses of the running thread; `change` is atomic. `place` is where in the code, of wrappers that are called as they stand.
void read(const void* p, std::size_t bytes);
void write(const void* p, std::size_t bytes);
void change(const void* p, std::size_t bytes, const void* place);

// Barriers in shared memory: the thread makes one, or lets others see those that it made.
void make_barrier(const void* barrier);
void barriers_are_made();

// A copy to shared memory of which `barrier` counts the bytes, and what such a copy reads there; who waits for the barrier takes
// `point`. No thread waits in another way: `cp.async.bulk.commit_group` has no part in copies that a barrier counts.
void counted_source(const void* from, std::size_t bytes, const void* barrier, const void* place);
void counted_copy(const void* to, std::size_t bytes, const void* barrier, Point& point, const void* place);
// A bulk copy to global memory reads until its thread has waited for that.
void copied_from(const void* from, std::size_t bytes, const void* place);
void wait_copied_from();
// A thread's own small copies, ordinary writes that are there when the thread has waited for their group, or who takes `to`.
void own_copy(const void* to, std::size_t bytes, const void* place);
void commit_own_copies();
void wait_own_copies(unsigned newest);
void give_own_copies(Point& to);
// Products of the running thread's warp; the first is said once a warp, the others by all of its threads.
void products_read(const void* p, std::size_t bytes);
void commit_products();
void wait_products(unsigned newest);

// What was found since this was asked, a line each: what, offsets in this library of two places in the code, and more; with tabs
// between.
const char* findings();

}  // namespace order
