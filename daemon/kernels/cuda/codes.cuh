// Single codes and scales of a tile: in either order what the general kernel reads, in fragments what encoding writes.
// daemon/kernels/packing.py and order.py define the orders.
#pragma once

namespace tqd {

constexpr int CANONICAL = 0, FRAGMENTS = 1;

// How a side is stored: HALVES is twice the width of a code, 32 are vectors in full precision.
template <int HALVES, bool IS_TRELLIS>
struct Form {
  static constexpr bool FULL = HALVES == 32, TRELLIS = IS_TRELLIS, PAIRS = HALVES == 7;
  static constexpr int BITS = HALVES / 2;  // of a code by itself
  template <int D>
  static constexpr int WORDS = FULL ? 0 : HALVES * D / 2;  // of a tile
};

// Number n of a side whose numbers are in canonical order: planes of 8, 4, 2 and 1 bits.
template <int BITS>
__device__ __forceinline__ u32 canonical_code(const u32* side, int n) {
  const int i = n % 32;
  const u32* group = side + n / 32 * BITS;
  u32 code = 0;
  int shift = 0, at = 0;
#pragma unroll
  for (int width = 8; width; width >>= 1) {
    if (!(BITS & width)) continue;
    code |= (group[at + i * width / 32] >> (i * width % 32) & ((1u << width) - 1)) << shift;
    shift += width;
    at += width;
  }
  return code;
}

// Where code (t, d) is in fragments: with which lane, in which group, register and byte.
template <int BITS, int D, bool KEYS>
struct Fragment {
  static constexpr int HELD = D / 32 * BITS, WIDTH = HELD % 4 == 0 ? 4 : HELD % 2 == 0 ? 2 : 1;
  int lane, group, reg, byte;

  __device__ __forceinline__ Fragment(int t, int d) {
    if (KEYS) {
      const int n = t / 8 * (D / 4) + d % (D / 4);
      lane = t % 8 * 4 + d / (D / 4), group = n / 32, reg = n % 32 / 4, byte = n % 4;
    } else {
      lane = d % 8 * 4 + t % 8 / 2, group = d / 32, reg = d / 16 % 2 * 4 + d / 8 % 2 * 2 + t % 2, byte = t / 8;
    }
  }
  // Word `index` of the group, as a position among the words of the side.
  __device__ __forceinline__ int word(int index) const {
    const int at = group * BITS + index;
    return (at / WIDTH * WARP + lane) * WIDTH + at % WIDTH;
  }
  __device__ __forceinline__ int pair() const { return reg / 2; }
  __device__ __forceinline__ int nibble() const { return 16 * (reg % 2) + 4 * byte; }
  __device__ __forceinline__ int sign() const { return 8 * byte + (reg % 2 ? 3 : 7); }
  __device__ __forceinline__ int plane() const { return 8 * byte + 7 - reg; }
};

// Code (t, d) of a side in fragments.
template <int BITS, int D, bool KEYS>
__device__ __forceinline__ u32 fragment_code(const u32* side, int t, int d) {
  const Fragment<BITS, D, KEYS> f(t, d);
  if constexpr (BITS == 8) {
    return side[f.word(f.reg)] >> (8 * f.byte) & 255u;
  } else if constexpr (BITS == 4) {
    const u32 w = side[f.word(f.pair())], m = w >> f.nibble() & 7u;
    return w >> f.sign() & 1u ? 7u - m : 8u + m;
  } else if constexpr (BITS == 5) {
    const u32 w = side[f.word(f.pair())], m = (w >> f.nibble() & 7u) * 2 + (side[f.word(4)] >> f.plane() & 1u);
    return w >> f.sign() & 1u ? 15u - m : 16u + m;
  } else if constexpr (BITS == 3) {
    if (f.pair() < 3) return side[f.word(f.pair())] >> f.nibble() & 7u;
    u32 code = 0;
    for (int k = 0; k < 3; ++k) code |= (side[f.word(k)] >> (f.nibble() + 3) & 1u) << k;
    return code;
  } else {
    return side[f.word(f.pair() / 2)] >> (f.nibble() + 2 * (f.pair() % 2)) & 3u;
  }
}

// Puts code (t, d) into a side in fragments whose bits are zero there; other threads may put others.
template <int BITS, int D, bool KEYS>
__device__ __forceinline__ void put_fragment_code(u32* side, int t, int d, u32 code) {
  const Fragment<BITS, D, KEYS> f(t, d);
  if constexpr (BITS == 8) {
    atomicOr(side + f.word(f.reg), code << (8 * f.byte));
  } else if constexpr (BITS == 4) {
    const bool negative = code < 8;
    atomicOr(side + f.word(f.pair()), (negative ? 7 - code : code - 8) << f.nibble() | (u32)negative << f.sign());
  } else if constexpr (BITS == 5) {
    const bool negative = code < 16;
    const u32 m = negative ? 15 - code : code - 16;
    atomicOr(side + f.word(f.pair()), m / 2 << f.nibble() | (u32)negative << f.sign());
    atomicOr(side + f.word(4), (m & 1u) << f.plane());
  } else if constexpr (BITS == 3) {
    if (f.pair() < 3) {
      atomicOr(side + f.word(f.pair()), code << f.nibble());
    } else {
      for (int k = 0; k < 3; ++k) atomicOr(side + f.word(k), (code >> k & 1u) << (f.nibble() + 3));
    }
  } else {
    atomicOr(side + f.word(f.pair() / 2), code << (f.nibble() + 2 * (f.pair() % 2)));
  }
}

// The level of a trellis's code after the one before, `once`, and the one before that (daemon/kernels/trellis.py), in
// steps.
__device__ __forceinline__ float trellis_level(u32 code, u32 once, u32 twice) {
  const int q = 8 * code + ((13 * once + 8 * twice + 16) & 31), distance = q < 44 ? 43 - q : q - 44;
  const float size = (float)(2 * distance + max(distance, 13) + max(distance, 32) - 45) + .5f;
  return q < 44 ? -size : size;
}

// Value (t, d) of a packed side, in units of its token's scale; `levels` are the codebook's centroids, or a trellis's step.
template <class F, int D, int ORDER, bool KEYS>
__device__ __forceinline__ float packed_value(const u32* side, const float* levels, int t, int d) {
  const int vector = t * D;
  if constexpr (F::TRELLIS) {  // before a vector's first code comes its last one
    const u32 once = canonical_code<3>(side, vector + (d + D - 1) % D);
    const u32 twice = canonical_code<3>(side, vector + (d + D - 2) % D);
    return trellis_level(canonical_code<3>(side, vector + d), once, twice) * levels[0];
  } else if constexpr (F::PAIRS) {  // two codes below 11 are one number of 7 bits
    const u32 pair = canonical_code<7>(side, (vector + d) / 2);
    return levels[d % 2 ? pair / 11 : pair % 11];
  } else {
    u32 code;
    if constexpr (ORDER == FRAGMENTS)
      code = fragment_code<F::BITS, D, KEYS>(side, t, d);
    else
      code = canonical_code<F::BITS>(side, vector + d);
    return F::BITS == 8 ? (float)(signed char)code : levels[code];
  }
}

template <int ORDER>
__device__ __forceinline__ float scale_of(const u32* scales, int t) {
  const int slot = ORDER == FRAGMENTS ? t % 8 * 4 + t / 8 : t;
  return __half2float(reinterpret_cast<const __half*>(scales)[slot]);
}

}  // namespace tqd
