// 16-lane vectors in the compiler's own vector extension, for any CPU. Names and meanings: simd.h.
// fma is a product and a sum, rounded each: a fused one would be a library call on CPUs that lack it.
#pragma once

#include <cstdint>
#include <cstring>

namespace KVIST_NAMESPACE {

typedef float F __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));
typedef uint32_t U __attribute__((vector_size(64)));
typedef int16_t H __attribute__((vector_size(32)));

constexpr int kRowTile = 2;
constexpr int kQueryTile = 4;
constexpr int kAccumulators = 4;

template <class V, class T>
inline V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

inline F load(const float* p) { return load_as<F>(p); }
inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
inline F zero() { return F{}; }
inline F set1(float v) { return v - F{}; }
inline F add(F a, F b) { return a + b; }
inline F sub(F a, F b) { return a - b; }
inline F mul(F a, F b) { return a * b; }
inline F div(F a, F b) { return a / b; }
inline F fma(F a, F b, F c) { return a * b + c; }
inline F select(I mask, F a, F b) { return reinterpret_cast<F>((mask & reinterpret_cast<I>(a)) | (~mask & reinterpret_cast<I>(b))); }
inline F max(F a, F b) { return select(a > b, a, b); }
inline F min(F a, F b) { return select(a < b, a, b); }
inline F abs(F a) { return reinterpret_cast<F>(reinterpret_cast<I>(a) & 0x7fffffff); }
inline F to_float(I v) { return __builtin_convertvector(v, F); }
// Adding 1.5 * 2^23 rounds to the nearest even whole number for |v| < 2^22.
inline I round_to_int(F v) {
  const F magic = set1(12582912.0f);
  return reinterpret_cast<I>(v + magic) - reinterpret_cast<I>(magic);
}
inline F exp2i(I n) { return reinterpret_cast<F>((n + 127) << 23); }
inline F zero_below(F v, F x, F low) { return reinterpret_cast<F>(reinterpret_cast<I>(v) & (x >= low)); }

typedef uint16_t U16 __attribute__((vector_size(32)));

inline F load_bf16(const uint16_t* p) { return reinterpret_cast<F>(__builtin_convertvector(load_as<U16>(p), U) << 16); }
inline void split_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const U pairs = load_as<U>(p);
  even = reinterpret_cast<F>(pairs << 16);
  odd = reinterpret_cast<F>(pairs & 0xffff0000u);
}
// Binary16 to binary32. Subnormals go through an integer: their bit patterns read as floats would be flushed to zero.
inline F load_f16(const uint16_t* p) {
  const U half = __builtin_convertvector(load_as<U16>(p), U);
  const U sign = (half & 0x8000u) << 16;
  const U magnitude = (half & 0x7fffu) << 13;
  const U subnormal = reinterpret_cast<U>((half & 0x7c00u) == 0u);
  const U special = reinterpret_cast<U>((half & 0x7c00u) == 0x7c00u);
  const F small = to_float(reinterpret_cast<I>(half & 0x3ffu)) * 0x1p-24f;
  const U large = (magnitude + 0x38000000u) | (special & 0x7f800000u);
  return reinterpret_cast<F>(((reinterpret_cast<U>(small) & subnormal) | (large & ~subnormal)) | sign);
}
inline uint16_t to_f16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (magnitude < 0x38800000u) {  // subnormal: the float adder rounds at the wanted bit
    float shifted;
    std::memcpy(&shifted, &magnitude, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13));
}
inline void store_f16(uint16_t* p, F v) {
  for (int i = 0; i < 16; ++i) p[i] = to_f16(v[i]);
}
inline void store_int8(int8_t* p, I v) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v[i]);
}

template <class Fold>
inline float fold(F v, Fold both) {
  float lanes[16];
  store(lanes, v);
  for (int half = 8; half >= 1; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] = both(lanes[i], lanes[i + half]);
  return lanes[0];
}
inline float fold_add(F v) {
  return fold(v, [](float a, float b) { return a + b; });
}
inline float fold_max(F v) {
  return fold(v, [](float a, float b) { return a > b ? a : b; });
}

typedef uint8_t B __attribute__((vector_size(16)));

// Four columns of one quad of weights, widened; and the quad of activations, repeated for four columns.
inline H widen(B v) { return __builtin_convertvector(v, H); }
inline H quad(const int8_t* a) {
  H v;
  for (int i = 0; i < 16; ++i) v[i] = a[i & 3];
  return v;
}

// Eight products of at most 15 * 127 stay within int16 (15,240), so a whole group is added before it is widened.
template <int R>
inline void dot_w4(const uint8_t* w, const int8_t* a, long stride, I (&dot)[R]) {
  for (int r = 0; r < R; ++r) {
    H sum[4] = {};
    for (int i = 0; i < 4; ++i) {
      const H first = quad(a + r * stride + 4 * i), second = quad(a + r * stride + 16 + 4 * i);
      for (int c = 0; c < 4; ++c) {
        const B both = load_as<B>(w + 64 * i + 16 * c);
        sum[c] += widen(both & 15) * first + widen(both >> 4) * second;
      }
    }
    for (int c = 0; c < 16; ++c) {
      const H& quads = sum[c / 4];
      const int at = 4 * (c % 4);
      dot[r][c] = quads[at] + quads[at + 1] + quads[at + 2] + quads[at + 3];
    }
  }
}

template <int R>
inline void dot_w8(const uint8_t* w, const int8_t* a, long stride, const int32_t* sum, long sum_stride, I (&dot)[R]) {
  for (int r = 0; r < R; ++r) {
    I products[4] = {};
    for (int i = 0; i < 8; ++i) {
      const H activations = quad(a + r * stride + 4 * i);
      for (int c = 0; c < 4; ++c)
        products[c] += __builtin_convertvector(widen(load_as<B>(w + 64 * i + 16 * c)), I) * __builtin_convertvector(activations, I);
    }
    for (int c = 0; c < 16; ++c) {
      const I& quads = products[c / 4];
      const int at = 4 * (c % 4);
      dot[r][c] = quads[at] + quads[at + 1] + quads[at + 2] + quads[at + 3] - 128 * sum[r * sum_stride];
    }
  }
}

}  // namespace KVIST_NAMESPACE
