// 16-lane vectors as two halves on AVX2 + FMA + F16C. Names and meanings: simd.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace KVIST_NAMESPACE {

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};

constexpr int kRowTile = 4;
constexpr int kQueryTile = 4;
constexpr int kAccumulators = 4;  // 16 registers have room for tiles or columns beside each other of one or two query vectors

inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F v) {
  _mm256_storeu_ps(p, v.lo);
  _mm256_storeu_ps(p + 8, v.hi);
}
inline F set1(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F add(F a, F b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline F sub(F a, F b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline F mul(F a, F b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline F div(F a, F b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline F fma(F a, F b, F c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline F max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline F min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline F abs(F a) {
  const __m256 bits = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(a.lo, bits), _mm256_and_ps(a.hi, bits)};
}
inline F to_float(I v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
inline I round_to_int(F v) { return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)}; }
inline __m256 exp2i(__m256i n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
inline F exp2i(I n) { return {exp2i(n.lo), exp2i(n.hi)}; }
inline F zero_below(F v, F x, F low) {
  return {_mm256_and_ps(v.lo, _mm256_cmp_ps(x.lo, low.lo, _CMP_GE_OQ)), _mm256_and_ps(v.hi, _mm256_cmp_ps(x.hi, low.hi, _CMP_GE_OQ))};
}

inline __m128i load_128(const void* p) { return _mm_loadu_si128(static_cast<const __m128i*>(p)); }
inline F load_f16(const uint16_t* p) { return {_mm256_cvtph_ps(load_128(p)), _mm256_cvtph_ps(load_128(p + 8))}; }
inline void store_f16(uint16_t* p, F v) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v.lo, kNearest));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(v.hi, kNearest));
}
inline void split_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  odd = {_mm256_castsi256_ps(_mm256_and_si256(a, high)), _mm256_castsi256_ps(_mm256_and_si256(b, high))};
}
inline void store_int8(int8_t* p, I v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.lo, v.hi), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

inline float fold_add(F v) {
  const __m256 h = _mm256_add_ps(v.lo, v.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float fold_max(F v) {
  const __m256 h = _mm256_max_ps(v.lo, v.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

inline unsigned mask_of(__m256 lo, __m256 hi) {
  return static_cast<unsigned>(_mm256_movemask_ps(lo)) | static_cast<unsigned>(_mm256_movemask_ps(hi)) << 8;
}
inline unsigned mask_ge(F a, F b) { return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GE_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GE_OQ)); }
inline unsigned mask_gt(F a, F b) { return mask_of(_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)); }
inline __m256 choose(unsigned bits, __m256 a, __m256 b) {
  const __m256i lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i set = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), lane), lane);
  return _mm256_blendv_ps(b, a, _mm256_castsi256_ps(set));
}
inline F choose(unsigned bits, F a, F b) { return {choose(bits, a.lo, b.lo), choose(bits >> 8, a.hi, b.hi)}; }

using UnitSum = __m256i;
inline __m256i units_with_base(__m128 v) { return _mm256_castpd_si256(_mm256_add_pd(_mm256_cvtps_pd(v), _mm256_set1_pd(kUnitsBase))); }
inline UnitSum add_units(UnitSum sum, __m256 v) {
  sum = _mm256_add_epi64(sum, units_with_base(_mm256_castps256_ps128(v)));
  return _mm256_add_epi64(sum, units_with_base(_mm256_extractf128_ps(v, 1)));
}
inline UnitSum add_units(UnitSum sum, F v) { return add_units(add_units(sum, v.lo), v.hi); }

using V = __m256;
using VI = __m256i;
constexpr int kLanes = 8;

inline V load_v(const float* p) { return _mm256_loadu_ps(p); }
inline V load_v_f16(const uint16_t* p) { return _mm256_cvtph_ps(load_128(p)); }
inline V load_v_bf16(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_128(p)), 16)); }
inline void store_v(float* p, V v) { _mm256_storeu_ps(p, v); }
inline V set1_v(float v) { return _mm256_set1_ps(v); }
inline V zero_v() { return _mm256_setzero_ps(); }
inline V add_v(V a, V b) { return _mm256_add_ps(a, b); }
inline V mul_v(V a, V b) { return _mm256_mul_ps(a, b); }
inline V fma_v(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V to_float_v(VI v) { return _mm256_cvtepi32_ps(v); }

inline __m256i quad(const int8_t* a) {
  int32_t v;
  std::memcpy(&v, a, 4);
  return _mm256_set1_epi32(v);
}

// The value is wanted in a register here. Without this the compiler makes all products of a group first, and spills them.
inline void settle(__m256i& v) { asm("" : "+x"(v)); }

// Eight products of 15 * 127, twice each, stay within int16 (30,480), so a whole group is added before it is widened.
template <int R>
inline void dot_w4(const uint8_t* w, const int8_t* a, long stride, VI (&dot)[R]) {
  const __m256i low = _mm256_set1_epi8(0x0f);
  for (int r = 0; r < R; ++r) dot[r] = _mm256_setzero_si256();
  for (int i = 0; i < 4; ++i) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * i));
    const __m256i lo = _mm256_and_si256(both, low);
    const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    for (int r = 0; r < R; ++r) dot[r] = _mm256_add_epi16(dot[r], _mm256_maddubs_epi16(lo, quad(a + r * stride + 4 * i)));
    for (int r = 0; r < R; ++r) dot[r] = _mm256_add_epi16(dot[r], _mm256_maddubs_epi16(hi, quad(a + r * stride + 16 + 4 * i)));
    for (int r = 0; r < R; ++r) settle(dot[r]);
  }
  for (int r = 0; r < R; ++r) dot[r] = _mm256_madd_epi16(dot[r], _mm256_set1_epi16(1));
}

// Weights are stored as value + 128. |w| is at most 128 and |a| at most 127, so a pair's sum of 32,512 stays within int16.
template <int R>
inline void dot_w8(const uint8_t* w, const int8_t* a, long stride, const int32_t*, long, VI (&dot)[R]) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; ++r) dot[r] = _mm256_setzero_si256();
  for (int i = 0; i < 8; ++i) {
    const __m256i stored = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 64 * i));
    const __m256i value = _mm256_xor_si256(stored, _mm256_set1_epi8(static_cast<char>(0x80)));
    const __m256i magnitude = _mm256_abs_epi8(value);
    for (int r = 0; r < R; ++r) {
      const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(quad(a + r * stride + 4 * i), value));
      dot[r] = _mm256_add_epi32(dot[r], _mm256_madd_epi16(pairs, ones));
      settle(dot[r]);
    }
  }
}

}  // namespace KVIST_NAMESPACE
