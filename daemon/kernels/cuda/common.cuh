// What every kernel here shares: names of types, the description of a row, vectors in full precision.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace tqd {

using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int TILE = 32;        // tokens
constexpr int WARP = 32;
constexpr u32 ALL = 0xffffffffu;
constexpr float LOG2E = 1.44269504f;
constexpr float LOWEST = -1e30f;  // a running maximum before the first score; finite, so that differences are
constexpr float MASKED = -1e38f;  // below LOWEST: its weight is zero whatever the maximum

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ void put(float* at, float x) { *at = x; }
__device__ __forceinline__ void put(__half* at, float x) { *at = __float2half(x); }
__device__ __forceinline__ void put(__nv_bfloat16* at, float x) { *at = __float2bfloat16(x); }

__device__ __forceinline__ float exp2_fast(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(r) : "f"(x));
  return r;
}

// The same for all lanes of a warp, and the compiler knows it: branches on it are no divergence.
__device__ __forceinline__ int warp_index() { return __shfl_sync(ALL, threadIdx.x / WARP, 0); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x += __shfl_xor_sync(ALL, x, o);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int o = 16; o; o >>= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, o));
  return x;
}

// Numbers that lie together, read and written at once.
template <int COUNT, class T = float>
struct alignas(COUNT * sizeof(T)) Numbers {
  T at[COUNT];
};

// Not to be unpacked any earlier: of bfloat16 the compiler would keep all floats of all tokens at once.
template <int COUNT, class T>
__device__ __forceinline__ void keep_packed(Numbers<COUNT, T>&) {}
template <int COUNT>
__device__ __forceinline__ void keep_packed(Numbers<COUNT, __nv_bfloat16>& numbers) {
  u32* words = reinterpret_cast<u32*>(&numbers);
#pragma unroll
  for (int i = 0; i < COUNT / 2; ++i) asm volatile("" : "+r"(words[i]));
}

// One row of a batch: tokens 0 to length, of which those from packed_from to packed_to are in tiles;
// token p was computed at position p + dropped. Of the plain tokens (plain.cuh), `left` after the sinks have gone into
// tiles since they were written, and `fresh` says that the newest token is not among them yet. The words of one row of
// the `spans` array, int32 (B, 16).
struct Span {
  int length, packed_from, packed_to, dropped, left, fresh;
};

__device__ __forceinline__ Span span_of(const int* spans, int row) {
  const int4 s = *reinterpret_cast<const int4*>(spans + 16 * row);
  const int2 t = *reinterpret_cast<const int2*>(spans + 16 * row + 4);
  return {s.x, s.y, s.z, s.w, t.x, t.y};
}

// Vectors in full precision, ([B,] H, n, D) with any strides.
template <class T>
struct Vectors {
  const T* data;
  long long row, head, token, dim;

  __device__ __forceinline__ const T* at(int b, int h, int t) const {
    return data + b * row + h * head + t * token;
  }
};

template <class T, class Strides>
__device__ __forceinline__ Vectors<T> vectors(const T* data, const Strides& strides, int ndim) {
  return {data, ndim == 4 ? (long long)strides[0] : 0ll, (long long)strides[ndim - 3],
          (long long)strides[ndim - 2], (long long)strides[ndim - 1]};
}

// Tiles of one row, uint32 (H, room, words).
struct Tiles {
  const u32* data;
  long long head, tile;
  int room;

  __device__ __forceinline__ const u32* at(int h, int t) const { return data + h * head + t * tile; }
};

template <class Shape, class Strides>
__device__ __forceinline__ Tiles tiles_of(const u32* data, const Shape& shape, const Strides& strides) {
  return {data, (long long)strides[0], (long long)strides[1], (int)shape[1]};
}

}  // namespace tqd
