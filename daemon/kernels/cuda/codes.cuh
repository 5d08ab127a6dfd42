// Single codes and scales of a tile: in either order what the general kernel reads, in fragments what encoding writes.
// daemon/kernels/packing.py and order.py define the orders.
#pragma once

namespace tqd {

constexpr int CANONICAL = 0, FRAGMENTS = 1;
constexpr int FULL = 16;  // bits of a side in full precision

// Code (t, d) of a side whose codes are in canonical order: planes of 8, 4, 2 and 1 bits.
template <int BITS, int D>
__device__ __forceinline__ u32 canonical_code(const u32* side, int t, int d) {
  const int n = t * D + d, i = n % 32;
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

// Value (t, d) of a packed side, in units of its token's scale; `levels` are the codebook's centroids.
template <int BITS, int D, int ORDER, bool KEYS>
__device__ __forceinline__ float packed_value(const u32* side, const float* levels, int t, int d) {
  u32 code;
  if constexpr (ORDER == FRAGMENTS)
    code = fragment_code<BITS, D, KEYS>(side, t, d);
  else
    code = canonical_code<BITS, D>(side, t, d);
  return BITS == 8 ? (float)(signed char)code : levels[code];
}

template <int ORDER>
__device__ __forceinline__ float scale_of(const u32* scales, int t) {
  const int slot = ORDER == FRAGMENTS ? t % 8 * 4 + t / 8 : t;
  return __half2float(reinterpret_cast<const __half*>(scales)[slot]);
}

}  // namespace tqd
