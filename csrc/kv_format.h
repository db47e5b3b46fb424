// How keys and values of one layer lie in a block (bf16, f16, f32), and how they are read and written.
//
// A layer's share of a block is K, then V, kv heads outermost. In tiles of 16 keys:
//   f16, f32  K [head][tile][dim][16 keys]            V [head][key][dim]
//   bf16      K [head][tile][dim / 2][16 keys][2]     V [head][key / 2][dim][2 keys]
// bf16 is stored in pairs (along dim for K, along keys for V) so that one 64-byte load feeds two products, or one 16-bit dot instruction.
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

// One element a value, in order: float or binary16.
template <class T>
struct PlainKv {
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

struct Bf16Kv {
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

}  // namespace KVIST_NAMESPACE
