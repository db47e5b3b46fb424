// What this machine reaches with the kernels' own building blocks: reading memory, f32 products and integer dot products. The figures
// are what a roofline compares with; nothing here computes for a model.
#pragma once

#include <cstddef>

#include "thread_pool.h"

namespace KVIST_NAMESPACE {

// An operation is a multiplication or an addition.
struct Peaks {
  double read_bytes;  // a second, from memory
  double f32;         // operations a second of fused products and sums in registers
  double w8a8, w4a8;  // operations a second of the integer dot products, data in the first cache, scales left out
};

// All threads of the pool at once, the best of some rounds; takes well under two seconds and `memory_bytes` of memory.
Peaks measure_peaks(ThreadPool& pool, size_t memory_bytes);

}  // namespace KVIST_NAMESPACE
