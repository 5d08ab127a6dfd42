// The syntax-only companion of metal_shim.h: address spaces are real, functions have no bodies.
// clang++ -fsyntax-only -include lint.h rejects what the empty macros of metal_shim.h hide: a device pointer taken for
// a threadgroup or thread one, a helper whose parameter is in another address space than what it is given.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include <type_traits>

#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define MSL_SHARED static __attribute__((address_space(3)))
#define MSL_ARRAY(name, size, ...) MSL_SHARED __VA_ARGS__ name size
#define thread
#define METAL_FUNC inline
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define M_LOG2E_F 1.44269504f
#define double MSL_has_no_double

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;
typedef __bf16 bfloat;
typedef __bf16 bfloat16_t;
template <class T, int N>
using vec = T __attribute__((ext_vector_type(N)));
#define VECTORS(t)                                    \
  typedef t t##2 __attribute__((ext_vector_type(2))); \
  typedef t t##3 __attribute__((ext_vector_type(3))); \
  typedef t t##4 __attribute__((ext_vector_type(4)));
VECTORS(float)
VECTORS(half) VECTORS(int) VECTORS(uint) VECTORS(ushort) VECTORS(uchar) VECTORS(char)

    namespace metal {
  template <class T>
  struct numeric_limits {
    static T max();
    static T infinity();
  };
        template <class T, class U>
  T as_type(U);
#define UNARY(name)  \
  float name(float); \
  half name(half);
#define FUNCTIONS                                                                                                    \
  UNARY(exp)                                                                                                         \
  UNARY(exp2) UNARY(log) UNARY(sqrt) UNARY(cos) UNARY(sin) UNARY(floor) UNARY(rint) UNARY(fabs) float divide(float,  \
                                                                                                             float); \
  float fma(float, float, float);
  FUNCTIONS
#define ORDERED(t) \
  t min(t, t);     \
  t max(t, t);     \
  t clamp(t, t, t);
  ORDERED(float)
  ORDERED(half) ORDERED(int) ORDERED(uint) ORDERED(short) ORDERED(ushort) ORDERED(long) ORDERED(ulong) float abs(float);
  bool isnan(float);
  bool isinf(float);
  namespace fast {
  FUNCTIONS
  }
  namespace precise {
  FUNCTIONS
  }
  template <class T>
  T select(T, T, bool);
  template <class T>
  T extract_bits(T, uint, uint);
  enum class mem_flags { mem_none = 0, mem_threadgroup = 1, mem_device = 2 };
  mem_flags operator|(mem_flags, mem_flags);
  void threadgroup_barrier(mem_flags);
  void simdgroup_barrier(mem_flags);
#define LANES(name)  \
  template <class T> \
  T name(T);
#define LANES_BY(name) \
  template <class T>   \
  T name(T, ushort);
  LANES(simd_sum)
  LANES(simd_max) LANES(simd_min) LANES(simd_or) LANES(simd_and) LANES(simd_prefix_inclusive_sum)
      LANES(simd_prefix_exclusive_sum) LANES_BY(simd_shuffle) LANES_BY(simd_shuffle_xor) LANES_BY(simd_shuffle_down)
          LANES_BY(simd_shuffle_up) LANES_BY(simd_broadcast) bool
          simd_any(bool);
  bool simd_all(bool);
}  // namespace metal
using namespace metal;

template <class T, int N>
struct vector_maker {
  typedef T type __attribute__((ext_vector_type(N)));
};
template <class T, int N, class... A>
typename vector_maker<T, N>::type make_vector(A...);
// function-like, so that the type's own name survives
#define float2(...) make_vector<float, 2>(__VA_ARGS__)
#define float4(...) make_vector<float, 4>(__VA_ARGS__)
#define uint2(...) make_vector<uint, 2>(__VA_ARGS__)
#define uint3(...) make_vector<uint, 3>(__VA_ARGS__)
#define uint4(...) make_vector<uint, 4>(__VA_ARGS__)
