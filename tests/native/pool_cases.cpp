// The thread pool: every item once, whatever the number of threads, after idling and between creation and destruction.
#include <atomic>
#include <chrono>
#include <memory>
#include <set>
#include <thread>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "check.h"
#include "linear.h"
#include "thread_pool.h"

using namespace KVIST_NAMESPACE;

namespace native_test {

namespace {

// Runs one loop; plain, unsynchronised writes show a race detector whether the pool orders them before its return.
void run_once(ThreadPool& pool, long items) {
  std::vector<int> times(static_cast<size_t>(items)), threads(static_cast<size_t>(items), -1);
  pool.run(items, [&](long item, int thread) {
    times[static_cast<size_t>(item)] += 1;
    threads[static_cast<size_t>(item)] = thread;
  });
  for (size_t i = 0; i < times.size(); ++i)
    check(times[i] == 1 && threads[i] >= 0 && threads[i] < pool.num_threads(), "item %zu of %ld ran %d times, last by %d", i, items, times[i],
          threads[i]);
}

void every_item_runs_once() {
  for (const int count : {1, 2, 3}) {
    ThreadPool pool(count);
    check(pool.num_threads() == count, "a pool of %d has %d threads", count, pool.num_threads());
    for (int round = 0; round < 500; ++round)
      for (const long items : {0L, 1L, 2L, 3L, 17L}) run_once(pool, items);
    run_once(pool, 5000);
  }
}

void pools_come_and_go() {
  for (int round = 0; round < 60; ++round) {
    ThreadPool unused(round % 3 + 1);
    const auto pool = std::make_unique<ThreadPool>(round % 4);
    for (int loop = 0; loop < round % 3; ++loop) run_once(*pool, 9);
  }
}

void idle_workers_wake() {
  ThreadPool pool(3);
  for (int round = 0; round < 15; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(round % 3));  // long past the spin, so that workers are parked
    run_once(pool, 50);
  }
}

// An item that waits for the others holds its thread, so three waiting items need three threads.
void all_threads_take_part() {
  ThreadPool pool(3);
  std::atomic<int> arrived{0};
  std::vector<int> threads(3);
  pool.run(3, [&](long item, int thread) {
    threads[static_cast<size_t>(item)] = thread;
    arrived.fetch_add(1);
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (arrived.load() < 3 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
  });
  check(std::set<int>(threads.begin(), threads.end()).size() == 3, "items ran on threads %d, %d and %d", threads[0], threads[1], threads[2]);
}

// A thread that is held by one item of its share leaves the rest of it to the others.
void shares_are_taken_over() {
  ThreadPool pool(2);
  std::atomic<int> done{0};
  pool.run(100, [&](long item, int) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (item == 0 && done.load() < 99 && std::chrono::steady_clock::now() < until) std::this_thread::yield();
    if (item == 0) check(done.load() == 99, "%d of 99 items were done while one held a thread", done.load());
    done.fetch_add(1);
  });
}

// Subnormals are flushed inside items on every thread, and the caller's own mode comes back.
void items_flush_subnormals() {
#if defined(__x86_64__)
  const unsigned before = _mm_getcsr();
  for (const int count : {1, 3}) {
    ThreadPool pool(count);
    std::vector<unsigned> modes(100);
    pool.run(100, [&](long item, int) { modes[static_cast<size_t>(item)] = _mm_getcsr(); });
    for (const unsigned mode : modes) check((mode & 0xffc0u) == 0x9fc0u, "an item runs in float mode %04x", mode);
    check(_mm_getcsr() == before, "the caller's float mode is lost");
  }
#endif
}

// Workers stay on the processor that they are bound to; what is no processor is told of.
void workers_are_bound() {
#if defined(__linux__)
  const int cpu = sched_getcpu();
  ThreadPool pool(3, {cpu});
  check(pool.bound(), "workers are not bound to processor %d", cpu);
  std::vector<int> seen(300, cpu);
  pool.run(300, [&](long item, int thread) {
    if (thread > 0) seen[static_cast<size_t>(item)] = sched_getcpu();
  });
  for (const int found : seen) check(found == cpu, "a worker bound to processor %d runs on %d", cpu, found);
  ThreadPool nowhere(2, {-1}), beyond(2, {CPU_SETSIZE});
  check(!nowhere.bound() && !beyond.bound(), "workers are bound to no processor");
  run_once(nowhere, 9);
#endif
}

}  // namespace

void pool_cases(Digest&) {
  every_item_runs_once();
  pools_come_and_go();
  idle_workers_wake();
  all_threads_take_part();
  shares_are_taken_over();
  items_flush_subnormals();
  workers_are_bound();
}

}  // namespace native_test
