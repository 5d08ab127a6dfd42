// Codes in fragments to signed bytes: a group of 32 codes becomes 8 registers, by byte permutations and no arithmetic.
// Bytes of 2 to 5 bits are floor(centroid / λ): the missing ½ is paid once, on the sums.
#pragma once

namespace tqd {

// Lookup tables, read back from shared memory: the compiler would spend an instruction on every use of a constant.
struct Lookup {
  u32 a, b, c, d, two_to_16;
};

template <int BITS>
__device__ __forceinline__ uint4 lookup_words() {
  constexpr u32 low4 = 5u | 18u << 8 | 30u << 16 | 43u << 24, high4 = 58u | 75u << 8 | 96u << 16 | 127u << 24;
  constexpr u32 up3 = 14u | 44u << 8 | 79u << 16 | 127u << 24, down3 = ~(127u | 79u << 8 | 44u << 16 | 14u << 24);
  constexpr u32 all2 = (~(127u | 38u << 8) & 0xffffu) | 38u << 16 | 127u << 24;
  if (BITS == 5)  // even magnitudes, odd magnitudes
    return make_uint4(2u | 12u << 8 | 23u << 16 | 34u << 24, 47u | 61u << 8 | 79u << 16 | 105u << 24,
                      7u | 18u << 8 | 29u << 16 | 41u << 24, 54u | 69u << 8 | 90u << 16 | 127u << 24);
  if (BITS == 4) return make_uint4(low4, high4, 0, 0);
  if (BITS == 3) return make_uint4(down3, up3, 0, 0);
  return make_uint4(all2, all2, 0, 0);
}

// All words of a side that belong to this lane.
template <int COUNT>
__device__ __forceinline__ void lane_words(const u32* side, int lane, u32 (&w)[COUNT]) {
  if constexpr (COUNT % 4 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      const uint4 v = reinterpret_cast<const uint4*>(side)[i * WARP + lane];
      w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
    }
  } else if constexpr (COUNT % 2 == 0) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; ++i) {
      const uint2 v = reinterpret_cast<const uint2*>(side)[i * WARP + lane];
      w[2 * i] = v.x, w[2 * i + 1] = v.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) w[i] = side[i * WARP + lane];
  }
}

constexpr u32 SIGNS = 0xba98u;  // replicate the sign of each of four bytes

// Decodes one group of BITS words.
template <int BITS>
__device__ __forceinline__ void decode_group(const u32* w, u32* r, const Lookup& t) {
  if constexpr (BITS == 8) {
#pragma unroll
    for (int i = 0; i < 8; ++i) r[i] = w[i];
  } else if constexpr (BITS == 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 x = w[i], m = x & 0x77777777u, y = x << 4;
      r[2 * i] = permute_bytes(t.a, t.b, m) ^ permute_bytes(x, x, SIGNS);
      r[2 * i + 1] = permute_bytes(t.a, t.b, m >> 16) ^ permute_bytes(y, y, SIGNS);
    }
  } else if constexpr (BITS == 5) {
    const u32 plane = w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const u32 x = w[i], m = x & 0x77777777u, high = m >> 16, y = x << 4;
      u32 odd = plane << (2 * i), odd_high = plane << (2 * i + 1);
      odd = permute_bytes(odd, odd, SIGNS);
      odd_high = permute_bytes(odd_high, odd_high, SIGNS);
      r[2 * i] = ((permute_bytes(t.a, t.b, m) & ~odd) | (permute_bytes(t.c, t.d, m) & odd)) ^ permute_bytes(x, x, SIGNS);
      r[2 * i + 1] = ((permute_bytes(t.a, t.b, high) & ~odd_high) | (permute_bytes(t.c, t.d, high) & odd_high)) ^
                     permute_bytes(y, y, SIGNS);
    }
  } else if constexpr (BITS == 3) {
    const u32 a = w[0], b = w[1], c = w[2];
    const u32 m[4] = {a & 0x77777777u, b & 0x77777777u, c & 0x77777777u,
                      ((a >> 3) & 0x11111111u) | ((b >> 2) & 0x22222222u) | ((c >> 1) & 0x44444444u)};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[2 * i] = permute_bytes(t.a, t.b, m[i]);
      r[2 * i + 1] = permute_bytes(t.a, t.b, m[i] >> 16);
    }
  } else {
    const u32 a = w[0], b = w[1];
    const u32 m[4] = {a & 0x33333333u, (a >> 2) & 0x33333333u, b & 0x33333333u, (b >> 2) & 0x33333333u};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      r[2 * i] = permute_bytes(t.a, t.b, m[i]);
      r[2 * i + 1] = permute_bytes(t.a, t.b, m[i] >> 16);
    }
  }
}

// Walsh-Hadamard transform of 32·R numbers, number lane + 32·i in x[i]; not normalised, its own inverse up to 32·R.
template <int R>
__device__ __forceinline__ void hadamard(float (&x)[R], int lane) {
#pragma unroll
  for (int o = 1; o < R; o <<= 1)
#pragma unroll
    for (int i = 0; i < R; ++i)
      if (!(i & o)) {
        const float a = x[i], b = x[i | o];
        x[i] = a + b, x[i | o] = a - b;
      }
#pragma unroll
  for (int o = 1; o < WARP; o <<= 1)
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const float b = __shfl_xor_sync(ALL, x[i], o);
      x[i] = lane & o ? b - x[i] : x[i] + b;
    }
}

}  // namespace tqd
