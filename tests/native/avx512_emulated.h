// The 512-bit intrinsics that csrc/simd_avx512.h uses, for processors without them: included before everything else, this header
// puts plain definitions on AVX2 registers and arrays in the place of the real names. Definitions follow the vendor's pseudocode.
//
// Compiled with -mavx2 -mfma -mf16c alone, so an intrinsic that is missing here does not compile.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace emulated512 {

struct Floats {
  __m256 lo, hi;
};
struct Ints {
  __m256i lo, hi;
};
struct Doubles {
  __m256d lo, hi;
};

template <class Lane, class Vector>
struct Lanes {
  static constexpr int kCount = 64 / sizeof(Lane);
  Lane at[kCount];
  explicit Lanes(Vector v) { std::memcpy(at, &v, 64); }
  Vector vector() const {
    Vector v;
    std::memcpy(&v, at, 64);
    return v;
  }
};

inline Floats loadu_ps(const void* p) {
  const auto* at = static_cast<const float*>(p);
  return {_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)};
}
inline void storeu_ps(void* p, Floats v) {
  auto* at = static_cast<float*>(p);
  _mm256_storeu_ps(at, v.lo);
  _mm256_storeu_ps(at + 8, v.hi);
}
inline Floats set1_ps(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
inline Floats setzero_ps() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Floats add_ps(Floats a, Floats b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Floats sub_ps(Floats a, Floats b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Floats mul_ps(Floats a, Floats b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Floats div_ps(Floats a, Floats b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Floats fmadd_ps(Floats a, Floats b, Floats c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
inline Floats max_ps(Floats a, Floats b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Floats min_ps(Floats a, Floats b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Ints castps_si512(Floats v) { return {_mm256_castps_si256(v.lo), _mm256_castps_si256(v.hi)}; }
inline Floats castsi512_ps(Ints v) { return {_mm256_castsi256_ps(v.lo), _mm256_castsi256_ps(v.hi)}; }
inline __m256 castps512_ps256(Floats v) { return v.lo; }
inline __m256 extractf32x8_ps(Floats v, int half) { return half & 1 ? v.hi : v.lo; }
inline Floats cvtepi32_ps(Ints v) { return {_mm256_cvtepi32_ps(v.lo), _mm256_cvtepi32_ps(v.hi)}; }
inline Ints cvtps_epi32(Floats v) { return {_mm256_cvtps_epi32(v.lo), _mm256_cvtps_epi32(v.hi)}; }
inline Floats cvtph_ps(__m256i v) { return {_mm256_cvtph_ps(_mm256_castsi256_si128(v)), _mm256_cvtph_ps(_mm256_extracti128_si256(v, 1))}; }
inline __m256i cvtps_ph(Floats v, int rounding) {
  if (rounding != (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)) std::abort();
  return _mm256_set_m128i(_mm256_cvtps_ph(v.hi, 8), _mm256_cvtps_ph(v.lo, 8));
}

// Only "greater or equal" and "greater", ordered and quiet, are used.
inline __mmask16 cmp_ps_mask(Floats a, Floats b, int predicate) {
  if (predicate != _CMP_GE_OQ && predicate != _CMP_GT_OQ) std::abort();
  const Lanes<float, Floats> x(a), y(b);
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(predicate == _CMP_GE_OQ ? x.at[i] >= y.at[i] : x.at[i] > y.at[i]) << i;
  return static_cast<__mmask16>(mask);
}
inline Floats maskz_mov_ps(__mmask16 mask, Floats v) {
  Lanes<float, Floats> lanes(v);
  for (int i = 0; i < 16; ++i)
    if (!(mask >> i & 1)) lanes.at[i] = 0.0f;
  return lanes.vector();
}

// Lanes of b where the bit is set, else of a.
inline Floats mask_blend_ps(__mmask16 mask, Floats a, Floats b) {
  Lanes<float, Floats> lanes(a);
  const Lanes<float, Floats> other(b);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) lanes.at[i] = other.at[i];
  return lanes.vector();
}

inline Doubles set1_pd(double v) { return {_mm256_set1_pd(v), _mm256_set1_pd(v)}; }
inline Doubles add_pd(Doubles a, Doubles b) { return {_mm256_add_pd(a.lo, b.lo), _mm256_add_pd(a.hi, b.hi)}; }
inline Doubles cvtps_pd(__m256 v) { return {_mm256_cvtps_pd(_mm256_castps256_ps128(v)), _mm256_cvtps_pd(_mm256_extractf128_ps(v, 1))}; }
inline Ints castpd_si512(Doubles v) { return {_mm256_castpd_si256(v.lo), _mm256_castpd_si256(v.hi)}; }

inline Ints loadu_si512(const void* p) {
  const auto* at = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
inline Ints set1_epi8(int v) { return {_mm256_set1_epi8(static_cast<char>(v)), _mm256_set1_epi8(static_cast<char>(v))}; }
inline Ints set1_epi32(int v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
inline Ints setzero_si512() { return set1_epi32(0); }
inline Ints add_epi32(Ints a, Ints b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Ints add_epi64(Ints a, Ints b) { return {_mm256_add_epi64(a.lo, b.lo), _mm256_add_epi64(a.hi, b.hi)}; }
inline Ints and_si512(Ints a, Ints b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
inline Ints slli_epi32(Ints v, int bits) { return {_mm256_slli_epi32(v.lo, bits), _mm256_slli_epi32(v.hi, bits)}; }
inline Ints srli_epi16(Ints v, int bits) { return {_mm256_srli_epi16(v.lo, bits), _mm256_srli_epi16(v.hi, bits)}; }
inline Ints cvtepu16_epi32(__m256i v) {
  return {_mm256_cvtepu16_epi32(_mm256_castsi256_si128(v)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(v, 1))};
}

// The low byte of each lane.
inline __m128i cvtepi32_epi8(Ints v) {
  const Lanes<uint32_t, Ints> lanes(v);
  uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<uint8_t>(lanes.at[i]);
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes));
}

// sum + four products of unsigned bytes of a and signed bytes of b in each lane, without saturation
inline Ints dpbusd_epi32(Ints sum, Ints a, Ints b) {
  Lanes<uint32_t, Ints> total(sum);
  const Lanes<uint8_t, Ints> x(a);
  const Lanes<int8_t, Ints> y(b);
  for (int i = 0; i < 64; ++i) total.at[i / 4] += static_cast<uint32_t>(x.at[i] * y.at[i]);
  return total.vector();
}

// bf16 of each lane: subnormals become zero, others are rounded to nearest even, whatever the mode.
inline __m256i cvtneps_pbh(Floats v) {
  const Lanes<uint32_t, Floats> lanes(v);
  alignas(32) uint16_t halves[16];
  for (int i = 0; i < 16; ++i) {
    const uint32_t bits = lanes.at[i], magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) halves[i] = static_cast<uint16_t>(bits >> 16 | 0x40u);
    else if (magnitude < 0x00800000u) halves[i] = static_cast<uint16_t>(bits >> 16 & 0x8000u);
    else halves[i] = static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  return _mm256_load_si256(reinterpret_cast<const __m256i*>(halves));
}

// sum + the product of the second of each pair, rounded; then + that of the first. The instruction rounds to the nearest and takes
// subnormals for zero in every mode, this only in the mode that kernels run in.
inline Floats dpbf16_ps(Floats sum, Ints a, Ints b) {
  const __m256i high = _mm256_set1_epi32(static_cast<int>(0xffff0000u));
  const auto half = [&](__m256 s, __m256i x, __m256i y) {
    s = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(x, high)), _mm256_castsi256_ps(_mm256_and_si256(y, high)), s);
    return _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(x, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(y, 16)), s);
  };
  return {half(sum.lo, a.lo, b.lo), half(sum.hi, a.hi, b.hi)};
}

}  // namespace emulated512

// Macros in the compiler's own headers when it does not optimize.
#undef _mm512_extractf32x8_ps
#undef _mm512_cvtps_ph
#undef _mm512_cmp_ps_mask
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16

#define __m512 emulated512::Floats
#define __m512i emulated512::Ints
#define __m512d emulated512::Doubles
#define __m512bh emulated512::Ints
#define _mm512_loadu_ps emulated512::loadu_ps
#define _mm512_storeu_ps emulated512::storeu_ps
#define _mm512_set1_ps emulated512::set1_ps
#define _mm512_setzero_ps emulated512::setzero_ps
#define _mm512_add_ps emulated512::add_ps
#define _mm512_sub_ps emulated512::sub_ps
#define _mm512_mul_ps emulated512::mul_ps
#define _mm512_div_ps emulated512::div_ps
#define _mm512_fmadd_ps emulated512::fmadd_ps
#define _mm512_max_ps emulated512::max_ps
#define _mm512_min_ps emulated512::min_ps
#define _mm512_castps_si512 emulated512::castps_si512
#define _mm512_castsi512_ps emulated512::castsi512_ps
#define _mm512_castps512_ps256 emulated512::castps512_ps256
#define _mm512_extractf32x8_ps emulated512::extractf32x8_ps
#define _mm512_cvtepi32_ps emulated512::cvtepi32_ps
#define _mm512_cvtps_epi32 emulated512::cvtps_epi32
#define _mm512_cvtph_ps emulated512::cvtph_ps
#define _mm512_cvtps_ph emulated512::cvtps_ph
#define _mm512_cmp_ps_mask emulated512::cmp_ps_mask
#define _mm512_maskz_mov_ps emulated512::maskz_mov_ps
#define _mm512_mask_blend_ps emulated512::mask_blend_ps
#define _mm512_set1_pd emulated512::set1_pd
#define _mm512_add_pd emulated512::add_pd
#define _mm512_cvtps_pd emulated512::cvtps_pd
#define _mm512_castpd_si512 emulated512::castpd_si512
#define _mm512_loadu_si512 emulated512::loadu_si512
#define _mm512_set1_epi8 emulated512::set1_epi8
#define _mm512_set1_epi32 emulated512::set1_epi32
#define _mm512_setzero_si512 emulated512::setzero_si512
#define _mm512_add_epi32 emulated512::add_epi32
#define _mm512_add_epi64 emulated512::add_epi64
#define _mm512_and_si512 emulated512::and_si512
#define _mm512_slli_epi32 emulated512::slli_epi32
#define _mm512_srli_epi16 emulated512::srli_epi16
#define _mm512_cvtepu16_epi32 emulated512::cvtepu16_epi32
#define _mm512_cvtepi32_epi8 emulated512::cvtepi32_epi8
#define _mm512_dpbusd_epi32 emulated512::dpbusd_epi32
#define _mm512_cvtneps_pbh emulated512::cvtneps_pbh
#define _mm512_dpbf16_ps emulated512::dpbf16_ps
