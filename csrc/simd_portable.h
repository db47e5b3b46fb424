// 16-lane vectors as four 4-lane ones in the compiler's own vector extension, for any CPU. Names and meanings: simd.h.
// fma is a product and a sum, rounded each: a fused one would be a library call on CPUs that lack it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace KVIST_NAMESPACE {

typedef float V __attribute__((vector_size(16)));
typedef int32_t VI __attribute__((vector_size(16)));
typedef uint32_t VU __attribute__((vector_size(16)));
typedef int16_t H __attribute__((vector_size(16)));
typedef uint8_t B __attribute__((vector_size(16)));
typedef uint16_t U16x4 __attribute__((vector_size(8)));

constexpr int kLanes = 4;
constexpr int kRowTile = 2;
constexpr int kQueryTile = 4;
constexpr int kAccumulators = 0;  // too few registers for a second tile of keys

struct F {
  V part[4];
};
struct I {
  VI part[4];
};

template <class T, class P>
inline T load_as(const P* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

// One operation on each of the four parts.
template <class R, class Each, class... Args>
inline R each(Each op, Args... args) {
  return {{op(args.part[0]...), op(args.part[1]...), op(args.part[2]...), op(args.part[3]...)}};
}

inline V load_v(const float* p) { return load_as<V>(p); }
inline void store_v(float* p, V v) { std::memcpy(p, &v, sizeof v); }
inline V set1_v(float v) { return V{v, v, v, v}; }
inline V zero_v() { return V{}; }
inline V add_v(V a, V b) { return a + b; }
inline V mul_v(V a, V b) { return a * b; }
inline V fma_v(V a, V b, V c) { return a * b + c; }
inline V to_float_v(VI v) { return __builtin_convertvector(v, V); }
inline V select(VI mask, V a, V b) { return reinterpret_cast<V>((mask & reinterpret_cast<VI>(a)) | (~mask & reinterpret_cast<VI>(b))); }

inline V load_v_bf16(const uint16_t* p) { return reinterpret_cast<V>(__builtin_convertvector(load_as<U16x4>(p), VU) << 16); }
// Binary16 to binary32. Subnormals go through an integer: their bit patterns read as floats would be flushed to zero.
inline V load_v_f16(const uint16_t* p) {
  const VU half = __builtin_convertvector(load_as<U16x4>(p), VU);
  const VU sign = (half & 0x8000u) << 16;
  const VI subnormal = (half & 0x7c00u) == 0u;
  const VU special = reinterpret_cast<VU>((half & 0x7c00u) == 0x7c00u);
  const V small = to_float_v(reinterpret_cast<VI>(half & 0x3ffu)) * 0x1p-24f;
  const VU large = (((half & 0x7fffu) << 13) + 0x38000000u) | (special & 0x7f800000u);
  return reinterpret_cast<V>(reinterpret_cast<VU>(select(subnormal, small, reinterpret_cast<V>(large))) | sign);
}

inline F load(const float* p) { return {{load_v(p), load_v(p + 4), load_v(p + 8), load_v(p + 12)}}; }
inline void store(float* p, F v) { std::memcpy(p, &v, sizeof v); }
inline F set1(float v) { return {{set1_v(v), set1_v(v), set1_v(v), set1_v(v)}}; }
inline F zero() { return F{}; }
inline F add(F a, F b) { return each<F>([](V x, V y) { return x + y; }, a, b); }
inline F sub(F a, F b) { return each<F>([](V x, V y) { return x - y; }, a, b); }
inline F mul(F a, F b) { return each<F>([](V x, V y) { return x * y; }, a, b); }
inline F div(F a, F b) { return each<F>([](V x, V y) { return x / y; }, a, b); }
inline F fma(F a, F b, F c) { return each<F>(fma_v, a, b, c); }
inline F max(F a, F b) { return each<F>([](V x, V y) { return select(x > y, x, y); }, a, b); }
inline F min(F a, F b) { return each<F>([](V x, V y) { return select(x < y, x, y); }, a, b); }
inline F abs(F a) { return each<F>([](V x) { return reinterpret_cast<V>(reinterpret_cast<VI>(x) & 0x7fffffff); }, a); }
inline F to_float(I v) { return each<F>(to_float_v, v); }
// Adding 1.5 * 2^23 rounds to the nearest even whole number for |v| < 2^22.
inline I round_to_int(F v) {
  return each<I>([](V x) { return reinterpret_cast<VI>(x + 12582912.0f) - 0x4b400000; }, v);
}
inline F exp2i(I n) { return each<F>([](VI x) { return reinterpret_cast<V>((x + 127) << 23); }, n); }
inline F zero_below(F v, F x, F low) {
  return each<F>([](V value, V at, V limit) { return reinterpret_cast<V>(reinterpret_cast<VI>(value) & (at >= limit)); }, v, x, low);
}

inline unsigned mask_of(VI lanes) {
#if defined(__SSE2__)
  return static_cast<unsigned>(_mm_movemask_ps(reinterpret_cast<__m128>(lanes)));
#else
  return static_cast<unsigned>((lanes[0] & 1) | (lanes[1] & 2) | (lanes[2] & 4) | (lanes[3] & 8));
#endif
}
template <class Compare>
inline unsigned mask_each(F a, F b, Compare compare) {
  unsigned mask = 0;
  for (int i = 0; i < 4; ++i) mask |= mask_of(compare(a.part[i], b.part[i])) << (4 * i);
  return mask;
}
inline unsigned mask_ge(F a, F b) { return mask_each(a, b, [](V x, V y) -> VI { return x >= y; }); }
inline unsigned mask_gt(F a, F b) { return mask_each(a, b, [](V x, V y) -> VI { return x > y; }); }
inline F choose(unsigned bits, F a, F b) {
  const VI lane = {1, 2, 4, 8};
  F v;
  for (int i = 0; i < 4; ++i) v.part[i] = select((static_cast<int32_t>(bits >> (4 * i)) & lane) == lane, a.part[i], b.part[i]);
  return v;
}

typedef double D __attribute__((vector_size(16)));
typedef uint64_t UnitSum __attribute__((vector_size(16)));
inline UnitSum add_units(UnitSum sum, F v) {
  for (const V part : v.part) {
#if defined(__SSE2__)
    const __m128 p = reinterpret_cast<__m128>(part);
    const D low = reinterpret_cast<D>(_mm_cvtps_pd(p)), high = reinterpret_cast<D>(_mm_cvtps_pd(_mm_movehl_ps(p, p)));
#else
    const D low = {part[0], part[1]}, high = {part[2], part[3]};
#endif
    sum += reinterpret_cast<UnitSum>(low + kUnitsBase);
    sum += reinterpret_cast<UnitSum>(high + kUnitsBase);
  }
  return sum;
}

inline F load_f16(const uint16_t* p) { return {{load_v_f16(p), load_v_f16(p + 4), load_v_f16(p + 8), load_v_f16(p + 12)}}; }
inline void split_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  for (int i = 0; i < 4; ++i) {
    const VU pairs = load_as<VU>(p + 8 * i);
    even.part[i] = reinterpret_cast<V>(pairs << 16);
    odd.part[i] = reinterpret_cast<V>(pairs & 0xffff0000u);
  }
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
  float lanes[16];
  store(lanes, v);
  for (int i = 0; i < 16; ++i) p[i] = to_f16(lanes[i]);
}
inline void store_int8(int8_t* p, I v) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(v.part[i / 4][i % 4]);
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

// a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
inline VI add_pairs(H a, H b) {
#if defined(__SSE2__)
  return reinterpret_cast<VI>(_mm_madd_epi16(reinterpret_cast<__m128i>(a), reinterpret_cast<__m128i>(b)));
#else
  VI sum;
  for (int i = 0; i < 4; ++i) sum[i] = a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
  return sum;
#endif
}
// The four activations of a quad, widened, twice.
inline H quad(const int8_t* a) {
#if defined(__SSE2__)
  int32_t bits;
  std::memcpy(&bits, a, 4);
  const __m128i bytes = _mm_set1_epi32(bits);
  return reinterpret_cast<H>(_mm_srai_epi16(_mm_unpacklo_epi8(bytes, bytes), 8));
#else
  return H{a[0], a[1], a[2], a[3], a[0], a[1], a[2], a[3]};
#endif
}
// Lanes of two vectors by number; Clang and GCC before 12 have no name for it in common.
#if defined(__clang__)
#define KVIST_SHUFFLE(T, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVIST_SHUFFLE(T, a, b, ...) __builtin_shuffle(a, b, T{__VA_ARGS__})
#endif
// Bytes of columns 0 and 1, then of columns 2 and 3, as int16.
inline void widen(B v, H& first, H& second) {
  const B zero = {};
  first = reinterpret_cast<H>(KVIST_SHUFFLE(B, v, zero, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23));
  second = reinterpret_cast<H>(KVIST_SHUFFLE(B, v, zero, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31));
}
// Two sums a column in each -> one a column.
inline VI fold_columns(VI first, VI second) {
  return KVIST_SHUFFLE(VI, first, second, 0, 2, 4, 6) + KVIST_SHUFFLE(VI, first, second, 1, 3, 5, 7);
}

template <int R>
inline void dot_w4(const uint8_t* w, const int8_t* a, long stride, VI (&dot)[R]) {
  VI sum[R][2] = {};
  for (int i = 0; i < 4; ++i) {
    const B both = load_as<B>(w + 64 * i);
    H lo[2], hi[2];
    widen(both & 15, lo[0], lo[1]);
    widen(both >> 4, hi[0], hi[1]);
    for (int r = 0; r < R; ++r) {
      const H first = quad(a + r * stride + 4 * i), second = quad(a + r * stride + 16 + 4 * i);
      for (int c = 0; c < 2; ++c) sum[r][c] += add_pairs(lo[c], first) + add_pairs(hi[c], second);
    }
  }
  for (int r = 0; r < R; ++r) dot[r] = fold_columns(sum[r][0], sum[r][1]);
}

// Weights are stored as value + 128; `sum[r * sum_stride]` is the sum of row r's group of activations.
template <int R>
inline void dot_w8(const uint8_t* w, const int8_t* a, long stride, const int32_t* sum, long sum_stride, VI (&dot)[R]) {
  VI total[R][2] = {};
  for (int i = 0; i < 8; ++i) {
    H wide[2];
    widen(load_as<B>(w + 64 * i), wide[0], wide[1]);
    for (int r = 0; r < R; ++r) {
      const H row = quad(a + r * stride + 4 * i);
      for (int c = 0; c < 2; ++c) total[r][c] += add_pairs(wide[c], row);
    }
  }
  for (int r = 0; r < R; ++r) dot[r] = fold_columns(total[r][0], total[r][1]) - 128 * sum[r * sum_stride];
}

}  // namespace KVIST_NAMESPACE
