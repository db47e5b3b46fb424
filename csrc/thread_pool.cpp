// The pool's loop; see thread_pool.h for what it promises.
#include "thread_pool.h"

#include <algorithm>
#include <chrono>
#include <cstdint>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace KVIST_NAMESPACE {

namespace {

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

// Spins for about 50 us while `unchanged()`; true when it changed.
template <class Unchanged>
bool spin(Unchanged unchanged) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 64; ++i) {
      if (!unchanged()) return true;
      pause();
    }
  } while (std::chrono::steady_clock::now() < until);
  return !unchanged();
}

bool bind([[maybe_unused]] std::thread& thread, [[maybe_unused]] int cpu) {
#if defined(__linux__)
  cpu_set_t only;
  CPU_ZERO(&only);
  if (cpu < 0 || cpu >= CPU_SETSIZE) return false;
  CPU_SET(cpu, &only);
  return pthread_setaffinity_np(thread.native_handle(), sizeof only, &only) == 0;
#else
  return false;
#endif
}

}  // namespace

FloatMode::FloatMode() {
#if defined(__x86_64__)
  saved_ = _mm_getcsr();
  _mm_setcsr(0x9fc0);  // all exceptions masked, flush-to-zero, subnormals are zero, round to nearest
#else
  saved_ = 0;
#endif
}

FloatMode::~FloatMode() {
#if defined(__x86_64__)
  _mm_setcsr(saved_);
#endif
}

ThreadPool::ThreadPool(int num_threads, const std::vector<int>& cpus) : shares_(static_cast<size_t>(std::max(1, num_threads))) {
  for (int thread = 1; thread < num_threads; ++thread) {
    workers_.emplace_back([this, thread] { work(thread); });
    if (!cpus.empty()) bound_ = bind(workers_.back(), cpus[static_cast<size_t>(thread) % cpus.size()]) && bound_;
  }
}

ThreadPool::~ThreadPool() {
  stop_.store(true);
  generation_.fetch_add(1);
  generation_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::take_items(int thread) {
  const int threads = num_threads();
  for (int i = 0; i < threads; ++i) {
    Share& share = shares_[static_cast<size_t>((thread + i) % threads)];
    for (long item; (item = share.next.fetch_add(1, std::memory_order_relaxed)) < share.end;) function_(context_, item, thread);
  }
}

void ThreadPool::run_items(long items, Function function, void* context) {
  const FloatMode mode;
  if (workers_.empty() || items <= 1) {
    for (long item = 0; item < items; ++item) function(context, item, 0);
    return;
  }
  function_ = function;
  context_ = context;
  long from = 0;
  for (int thread = 0; thread < num_threads(); ++thread) {
    Share& share = shares_[static_cast<size_t>(thread)];
    share.next.store(from, std::memory_order_relaxed);
    share.end = from = items * (thread + 1) / num_threads();
  }
  left_.store(0, std::memory_order_relaxed);
  entered_.store(0, std::memory_order_release);
  generation_.fetch_add(1, std::memory_order_release);
  generation_.notify_all();
  take_items(0);
  // A worker that has not come by now finds the loop closed; only those inside are waited for.
  const int inside = entered_.fetch_add(kClosed, std::memory_order_acq_rel);
  const auto working = [&] { return left_.load(std::memory_order_acquire) != inside; };
  if (!spin(working))
    while (working()) std::this_thread::yield();  // the worker has lost its core: give it this one
}

void ThreadPool::work(int thread) {
  const FloatMode mode;
  uint32_t seen = 0;
  for (;;) {
    const auto unchanged = [&] { return generation_.load(std::memory_order_acquire) == seen; };
    if (!spin(unchanged))
      while (unchanged()) generation_.wait(seen, std::memory_order_acquire);
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load()) return;
    if (entered_.fetch_add(1, std::memory_order_acq_rel) >= kClosed) continue;
    take_items(thread);
    left_.fetch_add(1, std::memory_order_release);
  }
}

}  // namespace KVIST_NAMESPACE
