// Grow-only scratch memory, 64-byte aligned, uninitialised.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdlib>
#include <new>

namespace KVIST_NAMESPACE {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  ~Buffer() { std::free(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // At least `count` elements; earlier contents are lost when it grows.
  T* reserve(size_t count) {
    if (count > count_) {
      std::free(data_);
      data_ = nullptr;
      count = std::max(count, count_ + count_ / 2);  // a batch that grows row by row must not allocate each time
      count_ = 0;
      const size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
      data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
      if (!data_) throw std::bad_alloc();
      count_ = count;
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

}  // namespace KVIST_NAMESPACE
