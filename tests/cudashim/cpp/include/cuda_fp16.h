// Half precision, by the compiler's own type.
#pragma once

struct __half {
  _Float16 value;
  __half() = default;
  explicit __half(float x) : value((_Float16)x) {}
};
struct alignas(4) __half2 {
  __half x, y;
};
inline float __half2float(__half x) { return (float)x.value; }
inline __half __float2half(float x) { return __half(x); }
inline float2 __half22float2(__half2 x) { return {(float)x.x.value, (float)x.y.value}; }
