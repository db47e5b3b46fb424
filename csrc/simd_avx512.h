// 16-lane vectors on AVX-512 (F, BW, DQ, VL, VNNI; and BF16 with KVIST_BF16_DOT). Names and meanings: simd.h.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace KVIST_NAMESPACE {

using F = __m512;
using I = __m512i;

constexpr int kRowTile = 8;       // rows of a matrix product that share one load of weights
constexpr int kQueryTile = 8;     // query vectors that share one load of keys and values
constexpr int kAccumulators = 16; // vector accumulators that an attention kernel keeps in registers

inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
inline F set1(float v) { return _mm512_set1_ps(v); }
inline F zero() { return _mm512_setzero_ps(); }
inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7fffffff))); }
inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
inline I round_to_int(F v) { return _mm512_cvtps_epi32(v); }
// 2^n for -126 <= n <= 127
inline F exp2i(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
// v where x >= low, else 0
inline F zero_below(F v, F x, F low) { return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, low, _CMP_GE_OQ), v); }

inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
inline void store_f16(uint16_t* p, F v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
// 32 bf16 at p, pairs (even, odd) side by side
inline void split_bf16_pairs(const uint16_t* p, F& even, F& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
#if defined(KVIST_BF16_DOT)
// See kv_format.h for what these compute.
inline F store_bf16(void* p, F v) {
  const __m256i halves = (__m256i)_mm512_cvtneps_pbh(v);
  _mm256_storeu_si256(static_cast<__m256i*>(p), halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline F dot_bf16(F a, F b, F sum) { return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b)); }
inline F keep_bits(F v, uint32_t bits) {
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(static_cast<int>(bits))));
}
#endif
// int8 of 16 lanes that are within [-127, 127]
inline void store_int8(int8_t* p, I v) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }

inline float fold_add(F v) {
  const __m256 h = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
inline float fold_max(F v) {
  const __m256 h = _mm256_max_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

inline unsigned mask_ge(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ); }
inline unsigned mask_gt(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }
inline F choose(unsigned bits, F a, F b) { return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), b, a); }

using UnitSum = __m512i;
inline __m512i units_with_base(__m256 v) { return _mm512_castpd_si512(_mm512_add_pd(_mm512_cvtps_pd(v), _mm512_set1_pd(kUnitsBase))); }
inline UnitSum add_units(UnitSum sum, F v) {
  sum = _mm512_add_epi64(sum, units_with_base(_mm512_castps512_ps256(v)));
  return _mm512_add_epi64(sum, units_with_base(_mm512_extractf32x8_ps(v, 1)));
}

using V = F;
using VI = I;
constexpr int kLanes = 16;

inline V load_v(const float* p) { return load(p); }
inline V load_v_f16(const uint16_t* p) { return load_f16(p); }
inline V load_v_bf16(const uint16_t* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
inline void store_v(float* p, V v) { store(p, v); }
inline V set1_v(float v) { return set1(v); }
inline V zero_v() { return zero(); }
inline V add_v(V a, V b) { return add(a, b); }
inline V mul_v(V a, V b) { return mul(a, b); }
inline V fma_v(V a, V b, V c) { return fma(a, b, c); }
inline V to_float_v(VI v) { return to_float(v); }

inline __m512i quad(const int8_t* a) {
  int32_t v;
  std::memcpy(&v, a, 4);
  return _mm512_set1_epi32(v);
}

template <int R>
inline void dot_w4(const uint8_t* w, const int8_t* a, long stride, VI (&dot)[R]) {
  const __m512i low = _mm512_set1_epi8(0x0f);
  for (int r = 0; r < R; ++r) dot[r] = _mm512_setzero_si512();
  for (int i = 0; i < 4; ++i) {
    const __m512i both = _mm512_loadu_si512(w + 64 * i);
    const __m512i lo = _mm512_and_si512(both, low);
    const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
    for (int r = 0; r < R; ++r) dot[r] = _mm512_dpbusd_epi32(dot[r], lo, quad(a + r * stride + 4 * i));
    for (int r = 0; r < R; ++r) dot[r] = _mm512_dpbusd_epi32(dot[r], hi, quad(a + r * stride + 16 + 4 * i));
  }
}

// Weights are stored as value + 128; `sum[r * sum_stride]` is the sum of row r's group of activations.
template <int R>
inline void dot_w8(const uint8_t* w, const int8_t* a, long stride, const int32_t* sum, long sum_stride, VI (&dot)[R]) {
  for (int r = 0; r < R; ++r) dot[r] = _mm512_set1_epi32(-128 * sum[r * sum_stride]);
  for (int i = 0; i < 8; ++i) {
    const __m512i quads = _mm512_loadu_si512(w + 64 * i);
    for (int r = 0; r < R; ++r) dot[r] = _mm512_dpbusd_epi32(dot[r], quads, quad(a + r * stride + 4 * i));
  }
}

}  // namespace KVIST_NAMESPACE
