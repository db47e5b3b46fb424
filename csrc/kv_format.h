// How keys and values of one layer lie in a block (bf16, f16, f32), and how they are read and written.
//
// A layer's share of a block is K, then V, kv heads outermost. In tiles of 16 keys:
//   f16, f32  K [head][tile][dim][16 keys]            V [head][key][dim]
//   bf16      K [head][tile][dim / 2][16 keys][2]     V [head][key / 2][dim][2 keys]
// bf16 is stored in pairs (along dim for K, along keys for V) so that one 64-byte load feeds two products, or one 16-bit dot instruction.
//
// Each format says how it multiplies: which `index` goes with what it feeds (an element or a key, or a pair of them), how a query and
// the weights of a span are kept, and what a product and a sum are.
#pragma once

#include <cstdint>
#include <cstring>

#include "simd.h"

namespace KVIST_NAMESPACE {

constexpr int kKeyTile = 16;

enum class KvFormat { bf16, f16, f32 };

inline uint16_t to_bf16(float v) {
  uint32_t bits;
  std::memcpy(&bits, &v, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

#if defined(KVIST_BF16_DOT) && !defined(KVIST_AVX512)
// The definition of 16-bit dot products in plain operations. No module is built of it: it is what the instructions are compared with.

// Stores 16 floats as bf16 and gives what was stored.
inline F store_bf16(void* p, F v) {
  alignas(64) float lanes[16];
  uint16_t halves[16];
  store(lanes, v);
  for (int i = 0; i < 16; ++i) {
    halves[i] = to_bf16(lanes[i]);
    const uint32_t bits = static_cast<uint32_t>(halves[i]) << 16;
    std::memcpy(lanes + i, &bits, 4);
  }
  std::memcpy(p, halves, sizeof halves);
  return load(lanes);
}
// The bits of each lane that are set in `bits`.
inline F keep_bits(F v, uint32_t bits) {
  alignas(64) float lanes[16];
  store(lanes, v);
  for (float& lane : lanes) {
    uint32_t word;
    std::memcpy(&word, &lane, 4);
    word &= bits;
    std::memcpy(&lane, &word, 4);
  }
  return load(lanes);
}
// Lanes of a and b are pairs of bf16: the product of the second ones is added first, then that of the first ones, each rounded to f32.
// (Intel SDM, VDPBF16PS. A product of two bf16 is exact in f32.)
inline F dot_bf16(F a, F b, F sum) {
  alignas(64) uint16_t pairs[2][32];
  std::memcpy(pairs[0], &a, 64);
  std::memcpy(pairs[1], &b, 64);
  F even[2], odd[2];
  for (int i = 0; i < 2; ++i) split_bf16_pairs(pairs[i], even[i], odd[i]);
  return fma(even[0], even[1], fma(odd[0], odd[1], sum));
}
#endif

inline uint16_t one_to_f16(float v) {
  alignas(64) uint16_t lanes[16];
  store_f16(lanes, set1(v));
  return lanes[0];
}

// The elements of sixteen keys or values, which are read in one of two ways.
template <class T>
struct Tile {
  using Element = T;
  const T* data;

  void ask_ahead(size_t) const {}
};

// With every line that is read, a line of what will be read later is asked for: blocks lie anywhere, so the processor cannot guess where
// a sequence goes on, and asking for all of it at once would only queue up.
template <class T>
struct LeadingTile {
  using Element = T;
  const T* data;
  const T* next;

  // Inlined by order: GCC takes a function that only asks for one without effect, and drops the call.
  [[gnu::always_inline]] void ask_ahead(size_t element) const { __builtin_prefetch(next + element); }
};

// Where a line lies that is asked for when a tile's values are read at d: what is asked for one after the other are neighbours in
// memory, which what is read one after the other are not.
inline size_t nth_read(int d, int offset) { return static_cast<size_t>(d) * kKeyTile + static_cast<size_t>(offset); }

// Products of floats.
struct FloatProducts {
  static constexpr int kPerIndex = 1;
  static void keep_query(float* q, int d, F v) { store(q + d, v); }
  static F keep_weights(float* weights, int key, F v) {
    store(weights + key, v);
    return v;
  }
  static F multiply_add(F x, F element, F sum) { return fma(x, element, sum); }
};

// One element a value, in order: float or binary16.
template <class T>
struct PlainKv : FloatProducts {
  using Element = T;
  static T encode(float v) {
    if constexpr (sizeof(T) == 4) return v;
    else return one_to_f16(v);
  }
  static F load16(const T* p) {
    if constexpr (sizeof(T) == 4) return load(p);
    else return load_f16(p);
  }

  // offsets within one head's K (or V) of a block
  static size_t key_at(int offset, int d, int dim) { return (static_cast<size_t>(offset / kKeyTile) * dim + d) * kKeyTile + offset % kKeyTile; }
  static size_t value_at(int offset, int d, int dim) { return static_cast<size_t>(offset) * dim + d; }

  // feed(n, d, keys): 16 keys' element d of N tiles, for every d ascending
  template <int N, class Tile, class Feed>
  [[gnu::always_inline]] static inline void keys(const Tile* tiles, int dim, Feed feed) {
    for (int d = 0; d < dim; ++d) {
      const size_t at = static_cast<size_t>(d) * kKeyTile;
      for (int n = 0; n < N; ++n) {
        tiles[n].ask_ahead(at);
        feed(n, d, load16(tiles[n].data + at));
      }
    }
  }
  // feed(n, key, values): elements [d + 16 n, d + 16 n + 16) of the keys [from, to) of a tile, ascending, for every n < N
  template <int N, class Tile, class Feed>
  [[gnu::always_inline]] static inline void values(const Tile& tile, int dim, int d, int from, int to, Feed feed) {
    for (int key = from; key < to; ++key)
      for (int n = 0; n < N; ++n) {
        tile.ask_ahead(nth_read(d, (key * N + n) * 16));
        feed(n, key, load16(tile.data + static_cast<size_t>(key) * dim + d + 16 * n));
      }
  }
};

struct Bf16Kv : FloatProducts {
  using Element = uint16_t;
  static uint16_t encode(float v) { return to_bf16(v); }
  static size_t key_at(int offset, int d, int dim) {
    return (static_cast<size_t>(offset / kKeyTile) * (dim / 2) + d / 2) * 2 * kKeyTile + 2 * (offset % kKeyTile) + d % 2;
  }
  static size_t value_at(int offset, int d, int dim) { return (static_cast<size_t>(offset / 2) * dim + d) * 2 + offset % 2; }

  template <int N, class Tile, class Feed>
  [[gnu::always_inline]] static inline void keys(const Tile* tiles, int dim, Feed feed) {
    for (int d = 0; d < dim; d += 2) {
      const size_t at = static_cast<size_t>(d) * kKeyTile;
      for (int n = 0; n < N; ++n) {
        F even, odd;
        tiles[n].ask_ahead(at);
        split_bf16_pairs(tiles[n].data + at, even, odd);
        feed(n, d, even);
        feed(n, d + 1, odd);
      }
    }
  }
  template <int N, class Tile, class Feed>
  [[gnu::always_inline]] static inline void values(const Tile& tile, int dim, int d, int from, int to, Feed feed) {
    for (int key = from & ~1; key < to; key += 2)
      for (int n = 0; n < N; ++n) {
        F even, odd;
        tile.ask_ahead(nth_read(d, (key * N + 2 * n) * 16));
        split_bf16_pairs(tile.data + (static_cast<size_t>(key / 2) * dim + d + 16 * n) * 2, even, odd);
        if (key >= from) feed(n, key, even);
        if (key + 1 < to) feed(n, key + 1, odd);
      }
  }
};

#if defined(KVIST_BF16_DOT)
// bf16 with 16-bit dot products: queries and weights are rounded to bf16 as well, two to a float's place.
struct DotBf16Kv : Bf16Kv {
  static constexpr int kPerIndex = 2;
  static void keep_query(float* q, int d, F v) { store_bf16(q + d / 2, v); }
  static F keep_weights(float* weights, int key, F v) { return store_bf16(weights + key / 2, v); }
  static F multiply_add(F x, F element, F sum) { return dot_bf16(element, x, sum); }

  template <class Tile>
  static F pairs(const Tile& tile, size_t at) {
    tile.ask_ahead(at);
    return load(reinterpret_cast<const float*>(tile.data + at));
  }
  template <int N, class Tile, class Feed>
  [[gnu::always_inline]] static inline void keys(const Tile* tiles, int dim, Feed feed) {
    for (int i = 0; i < dim / 2; ++i) {
      const size_t at = static_cast<size_t>(i) * 2 * kKeyTile;
      for (int n = 0; n < N; ++n) {
        tiles[n].ask_ahead(at);
        feed(n, i, load(reinterpret_cast<const float*>(tiles[n].data + at)));
      }
    }
  }
  // The half of a pair that is not seen may hold anything, so it is cleared; its weight is 0 already.
  template <int N, class Tile, class Feed>
  [[gnu::always_inline]] static inline void values(const Tile& tile, int dim, int d, int from, int to, Feed feed) {
    for (int key = from & ~1; key < to; key += 2)
      for (int n = 0; n < N; ++n) {
        tile.ask_ahead(nth_read(d, (key * N + 2 * n) * 16));
        const F pair = load(reinterpret_cast<const float*>(tile.data + (static_cast<size_t>(key / 2) * dim + d + 16 * n) * 2));
        if (key >= from && key + 1 < to) feed(n, key / 2, pair);
        else feed(n, key / 2, keep_bits(pair, key < from ? 0xffff0000u : 0x0000ffffu));
      }
  }
};
using AttendedBf16 = DotBf16Kv;
#else
using AttendedBf16 = Bf16Kv;
#endif

}  // namespace KVIST_NAMESPACE
