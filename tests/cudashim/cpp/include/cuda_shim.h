// CUDA's language, types and functions: only what our kernels use. Threads, rendezvous and memory are the runtime's.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "abi.h"

#define __device__
#define __host__
#define __forceinline__ inline
#define __global__
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__

// Storage of a block, one linker section: blocks run one at a time. translate.py finds the declarations.
#define CUDA_SHARED static __attribute__((section("msl_group")))
#ifdef CUDA_ZONES  // behind each array: an overrun by pointer would otherwise land in the next one
#define CUDA_ARRAY(name, size, ...)             \
  struct name##_and_zone {                      \
    alignas(128) __VA_ARGS__ array size;        \
    char zone[128];                             \
  };                                            \
  CUDA_SHARED name##_and_zone name##_place;     \
  auto& name = name##_place.array;              \
  msl_zone(name##_place.zone, sizeof name##_place.zone)
#else
#define CUDA_ARRAY(name, size, ...) CUDA_SHARED __attribute__((aligned(128))) __VA_ARGS__ name size
#endif

extern "C" {
extern char __start_msl_group[] __attribute__((weak, visibility("hidden")));
extern char __stop_msl_group[] __attribute__((weak, visibility("hidden")));
}

// Copies are written out so that -fsanitize=alignment looks at where they come from.
template <class T, int N>
struct CudaVector;
template <class T>
struct alignas(2 * sizeof(T)) CudaVector<T, 2> {
  T x, y;
  CudaVector() = default;
  CudaVector(T x, T y) : x(x), y(y) {}
  CudaVector(const CudaVector& from) : x(from.x), y(from.y) {}
  CudaVector& operator=(const CudaVector& from) {
    x = from.x, y = from.y;
    return *this;
  }
};
template <class T>
struct alignas(16) CudaVector<T, 4> {
  T x, y, z, w;
  CudaVector() = default;
  CudaVector(T x, T y, T z, T w) : x(x), y(y), z(z), w(w) {}
  CudaVector(const CudaVector& from) : x(from.x), y(from.y), z(from.z), w(from.w) {}
  CudaVector& operator=(const CudaVector& from) {
    x = from.x, y = from.y, z = from.z, w = from.w;
    return *this;
  }
};
using int2 = CudaVector<int, 2>;
using int4 = CudaVector<int, 4>;
using uint2 = CudaVector<unsigned, 2>;
using uint4 = CudaVector<unsigned, 4>;
using float2 = CudaVector<float, 2>;
using float4 = CudaVector<float, 4>;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct CudaIndex {
  unsigned x, y, z;
};
inline CudaIndex cuda_index(const uint32_t* numbers) { return {numbers[0], numbers[1], numbers[2]}; }
#define threadIdx cuda_index(msl_thread()->in_group)
#define blockIdx cuda_index(msl_thread()->group)
#define gridDim cuda_index(msl_thread()->groups)
#define blockDim cuda_index(msl_thread()->group_size)

// ---------------------------------------------------------------- numbers

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline float __int_as_float(int x) { return __builtin_bit_cast(float, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((uint64_t)a * b >> 32); }

// Saturates; NaN becomes 0.
inline int __float2int_rn(float x) {
  if (x != x) return 0;
  const float rounded = rintf(x);
  return rounded >= 2147483648.f ? 2147483647 : rounded <= -2147483648.f ? (int)0x80000000 : (int)rounded;
}

// What hardware approximates: in `rough` runs other last bits than the C library's, by as much as CUDA's tables allow.
namespace shim {
#ifdef CUDA_ROUGH
inline float rough(float x, int units) {
  const uint32_t bits = __float_as_uint(x), exponent = bits >> 23 & 255;
  if (exponent == 0 || exponent == 255) return x;
  return __uint_as_float(bits + (uint32_t)((int)((bits * 2654435761u) >> 16) % (2 * units + 1) - units));
}
#else
inline float rough(float x, int) { return x; }
#endif
inline float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }
}  // namespace shim

inline float rsqrtf(float x) { return shim::rough((float)(1.0 / sqrt((double)x)), 2); }
inline float __fdividef(float a, float b) { return fabsf(b) > 8.507059e37f ? a / b * 0.f : shim::rough(a / b, 2); }
inline void sincospif(float x, float* sine, float* cosine) {
  const double whole = (double)x - 2.0 * floor((double)x / 2.0);
  *sine = shim::rough((float)sin(M_PI * whole), 1);
  *cosine = shim::rough((float)cos(M_PI * whole), 1);
}

template <class T>
inline T __ldg(const T* p) {
  return *p;
}

// ---------------------------------------------------------------- a warp

namespace shim {

inline MslView* meet(int kind, unsigned mask, const void* value, uint32_t bytes, int line) {
  MslView* view = msl_simd(kind, line, value, bytes);
  if (view->mask != mask)
    msl_fail(nullptr, "DIVERGENCE: line %d names the lanes %08x, but %08x have come", line, mask, view->mask);
  return view;
}

template <class T>
inline T slot(const MslView* view, unsigned lane) {
  T value;
  memcpy(&value, view->slot[lane], sizeof value);
  return value;
}

template <class T, class F>
inline T reduced(unsigned mask, T value, F join, int line) {
  const MslView* view = meet(MSL_REDUCE, mask, &value, sizeof value, line);
  T all = slot<T>(view, 0);
  for (unsigned lane = 1; lane < 32; ++lane) all = join(all, slot<T>(view, lane));
  return all;
}

}  // namespace shim

template <class T>
inline T __shfl_sync(unsigned mask, T value, int lane, int line = __builtin_LINE()) {
  return shim::slot<T>(shim::meet(MSL_SHUFFLE, mask, &value, sizeof value, line), lane & 31);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int line = __builtin_LINE()) {
  return shim::slot<T>(shim::meet(MSL_SHUFFLE, mask, &value, sizeof value, line), (msl_thread()->lane ^ bits) & 31);
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
  return shim::reduced(mask, (int)(predicate != 0), [](int a, int b) { return a | b; }, line);
}
inline int __reduce_add_sync(unsigned mask, int value, int line = __builtin_LINE()) {
  return (int)shim::reduced(mask, (unsigned)value, [](unsigned a, unsigned b) { return a + b; }, line);
}
inline int __reduce_max_sync(unsigned mask, int value, int line = __builtin_LINE()) {
  return shim::reduced(mask, value, [](int a, int b) { return a > b ? a : b; }, line);
}
inline void __syncwarp(unsigned = 0xffffffffu, int line = __builtin_LINE()) { msl_simd_barrier(3, line); }
inline void __syncthreads(int line = __builtin_LINE()) { msl_group_barrier(3, line); }

// Fibers never run at once, so that an atomic is an access like any other, but no race with another atomic.
inline unsigned atomicOr(unsigned* at, unsigned bits) __attribute__((no_sanitize("thread")));
inline unsigned atomicOr(unsigned* at, unsigned bits) {
  const unsigned was = *at;
  *at = was | bits;
  return was;
}

// ---------------------------------------------------------------- shared memory by number

namespace shim {
constexpr uint32_t WINDOW = 0x400;  // so that no array is at 0

inline char* shared_at(uint32_t address, uint32_t bytes, uint32_t alignment, int line) {
  const size_t at = (size_t)address - WINDOW, room = __stop_msl_group - __start_msl_group;
  if (address < WINDOW || at + bytes > room)
    msl_fail(nullptr, "OUT OF BOUNDS shared address %u, %u bytes, of %zu, line %d", address, bytes, room, line);
  if (at % alignment) msl_fail(nullptr, "UB: shared address %u is not aligned to %u bytes, line %d", address, alignment, line);
  return __start_msl_group + at;
}
}  // namespace shim

inline size_t __cvta_generic_to_shared(const void* p) { return (const char*)p - __start_msl_group + shim::WINDOW; }

#include "ptx.h"
