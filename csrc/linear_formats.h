// How a register of columns is loaded from each stored format of weights and of scales.
#pragma once

#include <cstddef>
#include <cstdint>

#include "simd.h"

namespace KVIST_NAMESPACE {

struct HalfScale {
  static constexpr size_t kBytes = 2;
  static V load_lanes(const void* p, size_t at) { return load_v_f16(static_cast<const uint16_t*>(p) + at); }
};
struct FloatScale {
  static constexpr size_t kBytes = 4;
  static V load_lanes(const void* p, size_t at) { return load_v(static_cast<const float*>(p) + at); }
};

struct DenseF32 {
  using T = float;
  static V load_lanes(const float* p) { return load_v(p); }
};
struct DenseF16 {
  using T = uint16_t;
  static V load_lanes(const uint16_t* p) { return load_v_f16(p); }
};
struct DenseBf16 {
  using T = uint16_t;
  static V load_lanes(const uint16_t* p) { return load_v_bf16(p); }
};

}  // namespace KVIST_NAMESPACE
