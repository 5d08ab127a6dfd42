// Single codes and scales out of a tile, in either order: what the general kernel reads.
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

// The same in fragments.
template <int BITS, int D, bool KEYS>
__device__ __forceinline__ u32 fragment_code(const u32* side, int t, int d) {
  int lane, group, reg, byte;
  if (KEYS) {
    const int n = t / 8 * (D / 4) + d % (D / 4);
    lane = t % 8 * 4 + d / (D / 4), group = n / 32, reg = n % 32 / 4, byte = n % 4;
  } else {
    lane = d % 8 * 4 + t % 8 / 2, group = d / 32, reg = d / 16 % 2 * 4 + d / 8 % 2 * 2 + t % 2, byte = t / 8;
  }
  constexpr int HELD = D / 32 * BITS, WIDTH = HELD % 4 == 0 ? 4 : HELD % 2 == 0 ? 2 : 1;
  auto word = [&](int index) {
    const int at = group * BITS + index;
    return side[(at / WIDTH * WARP + lane) * WIDTH + at % WIDTH];
  };
  const int pair = reg / 2, nibble = 16 * (reg % 2) + 4 * byte, sign = 8 * byte + (reg % 2 ? 3 : 7);
  if constexpr (BITS == 8) {
    return word(reg) >> (8 * byte) & 255u;
  } else if constexpr (BITS == 4) {
    const u32 w = word(pair), m = w >> nibble & 7u;
    return w >> sign & 1u ? 7u - m : 8u + m;
  } else if constexpr (BITS == 5) {
    const u32 w = word(pair), m = (w >> nibble & 7u) * 2 + (word(4) >> (8 * byte + 7 - reg) & 1u);
    return w >> sign & 1u ? 15u - m : 16u + m;
  } else if constexpr (BITS == 3) {
    if (pair < 3) return word(pair) >> nibble & 7u;
    return (word(0) >> (nibble + 3) & 1u) | (word(1) >> (nibble + 3) & 1u) << 1 | (word(2) >> (nibble + 3) & 1u) << 2;
  } else {
    return word(pair / 2) >> (nibble + 2 * (pair % 2)) & 3u;
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
