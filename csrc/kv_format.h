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

// With every line that is read, the same line of what will be read later is asked for: blocks lie anywhere, so the processor cannot
// guess where a sequence goes on, and asking for all of it at once would only queue up.
template <class T>
struct LeadingTile {
  using Element = T;
  const T* data;
  const T* next = data;

  void ask_ahead(size_t element) const { __builtin_prefetch(next + element); }
};

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

  // feed(d, keys): 16 keys' element d, for every d ascending
  template <class Tile, class Feed>
  static void keys(const Tile& tile, int dim, Feed feed) {
    for (int d = 0; d < dim; ++d) {
      const size_t at = static_cast<size_t>(d) * kKeyTile;
      tile.ask_ahead(at);
      feed(d, load16(tile.data + at));
    }
  }
  template <class Tile, class Feed>
  static void keys_of_two(const Tile& a, const Tile& b, int dim, Feed feed) {
    for (int d = 0; d < dim; ++d) {
      const size_t at = static_cast<size_t>(d) * kKeyTile;
      a.ask_ahead(at);
      b.ask_ahead(at);
      feed(d, load16(a.data + at), load16(b.data + at));
    }
  }
  // feed(key, values): elements [d, d + 16) of the keys [from, to) of a tile, ascending
  template <class Tile, class Feed>
  static void values(const Tile& tile, int dim, int d, int from, int to, Feed feed) {
    for (int key = from; key < to; ++key) {
      const size_t at = static_cast<size_t>(key) * dim + d;
      tile.ask_ahead(at);
      feed(key, load16(tile.data + at));
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

  template <class Tile, class Feed>
  static void keys(const Tile& tile, int dim, Feed feed) {
    for (int d = 0; d < dim; d += 2) {
      const size_t at = static_cast<size_t>(d) * kKeyTile;
      F even, odd;
      tile.ask_ahead(at);
      split_bf16_pairs(tile.data + at, even, odd);
      feed(d, even);
      feed(d + 1, odd);
    }
  }
  template <class Tile, class Feed>
  static void keys_of_two(const Tile& a, const Tile& b, int dim, Feed feed) {
    for (int d = 0; d < dim; d += 2) {
      const size_t at = static_cast<size_t>(d) * kKeyTile;
      F even_a, odd_a, even_b, odd_b;
      a.ask_ahead(at);
      b.ask_ahead(at);
      split_bf16_pairs(a.data + at, even_a, odd_a);
      split_bf16_pairs(b.data + at, even_b, odd_b);
      feed(d, even_a, even_b);
      feed(d + 1, odd_a, odd_b);
    }
  }
  template <class Tile, class Feed>
  static void values(const Tile& tile, int dim, int d, int from, int to, Feed feed) {
    for (int key = from; key < to; ++key) {
      const size_t at = (static_cast<size_t>(key / 2) * dim + d) * 2;
      F even, odd;
      tile.ask_ahead(at);
      split_bf16_pairs(tile.data + at, even, odd);
      if (key % 2 == 0) {
        feed(key, even);
        if (++key == to) return;
      }
      feed(key, odd);
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
  template <class Tile, class Feed>
  static void keys(const Tile& tile, int dim, Feed feed) {
    for (int i = 0; i < dim / 2; ++i) feed(i, pairs(tile, static_cast<size_t>(i) * 2 * kKeyTile));
  }
  template <class Tile, class Feed>
  static void keys_of_two(const Tile& a, const Tile& b, int dim, Feed feed) {
    for (int i = 0; i < dim / 2; ++i) {
      const size_t at = static_cast<size_t>(i) * 2 * kKeyTile;
      feed(i, pairs(a, at), pairs(b, at));
    }
  }
  // The half of a pair that is not seen may hold anything, so it is cleared; its weight is 0 already.
  template <class Tile, class Feed>
  static void values(const Tile& tile, int dim, int d, int from, int to, Feed feed) {
    const auto at = [&](int pair) { return (static_cast<size_t>(pair) * dim + d) * 2; };
    int pair = from / 2;
    if (from % 2 != 0) {
      feed(pair, keep_bits(pairs(tile, at(pair)), 0xffff0000u));
      ++pair;
    }
    for (; 2 * pair + 1 < to; ++pair) feed(pair, pairs(tile, at(pair)));
    if (2 * pair < to) feed(pair, keep_bits(pairs(tile, at(pair)), 0x0000ffffu));
  }
};
using AttendedBf16 = DotBf16Kv;
#else
using AttendedBf16 = Bf16Kv;
#endif

}  // namespace KVIST_NAMESPACE
