// bfloat16: the upper half of a float, rounded to even.
#pragma once

struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  explicit __nv_bfloat16(float x) {
    const uint32_t word = __float_as_uint(x);
    bits = x != x ? 0x7fff : (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
  }
};
inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float((uint32_t)x.bits << 16); }
inline __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
