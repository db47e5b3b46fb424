// A small persistent pool: the caller and num_threads - 1 workers share numbered items of one loop at a time.
//
// A thread begins with a share of neighbouring items, whose memory it reads in one go, and helps the others when it has finished.
// Which thread takes which item is left open, so an item's result must not depend on it. A worker waits by spinning for about 50 us,
// then parks; an idle pool costs nothing. Every thread that runs items flushes subnormals to zero and rounds to nearest.
// One caller at a time; items must not call run.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace KVIST_NAMESPACE {

class ThreadPool {
 public:
  // Thread i is bound to cpus[i], round and round, if there are any; the caller is nobody's to bind.
  explicit ThreadPool(int num_threads, const std::vector<int>& cpus = {});
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }
  // Whether the system bound every worker that was to be bound.
  bool bound() const { return bound_; }

  // body(item, thread) for item in [0, items); returns when all are done.
  template <class Body>
  void run(long items, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_items(items, [](void* context, long item, int thread) { (*static_cast<Plain*>(context))(item, thread); },
              const_cast<std::remove_const_t<Plain>*>(&body));
  }

 private:
  using Function = void (*)(void*, long, int);
  static constexpr int kClosed = 1 << 20;
  void run_items(long items, Function function, void* context);
  void take_items(int thread);
  void work(int thread);

  // A thread's own run of neighbouring items; whoever has finished its own takes from the others'.
  struct alignas(64) Share {
    std::atomic<long> next{0};
    long end = 0;
  };

  std::vector<Share> shares_;
  std::vector<std::thread> workers_;
  bool bound_ = true;
  Function function_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> entered_{kClosed};  // workers inside the loop; kClosed and more: the loop takes nobody any more
  alignas(64) std::atomic<int> left_{0};
  std::atomic<bool> stop_{false};
};

// Flush-to-zero and round-to-nearest for this thread while in scope.
class FloatMode {
 public:
  FloatMode();
  ~FloatMode();
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  unsigned saved_;
};

}  // namespace KVIST_NAMESPACE
