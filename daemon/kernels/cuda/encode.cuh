// Keys and values of whole tiles to packed words in fragments: one block a tile of one KV head. The formulas are those of
// daemon/kernels/codec.py.
#pragma once

namespace tqd {

constexpr int ENCODE_WARPS = 8;
constexpr float FP16_MAX = 65504.f, TINY = 1e-30f;

// The codes of one vector go into `words`; it comes with the signs of its rotation, number lane + 32·i in x[i]. Returns
// its scale, which fp16 can hold.
template <int D, int BITS, int LEVELS, int STRETCHES, bool KEYS>
__device__ __forceinline__ float encode_vector(float (&x)[D / WARP], const float* numbers, u32* words, int t, int lane) {
  constexpr int R = D / WARP;
  float square = 0.f, most = 0.f, scale;
  int code[R];
  hadamard<R>(x, lane);
#pragma unroll
  for (int i = 0; i < R; ++i) {
    x[i] *= rsqrtf((float)D);
    square += x[i] * x[i], most = fmaxf(most, fabsf(x[i]));
  }
  if constexpr (BITS == 8) {
    // divide by the stored, rounded scale, so that no rounding error is left in the codes
    scale = __half2float(__float2half(fminf(warp_max(most) / 127.f, FP16_MAX)));
#pragma unroll
    for (int i = 0; i < R; ++i)
      code[i] = max(-127, min(127, __float2int_rn(x[i] / (scale == 0.f ? 1.f : scale)))) & 255;
  } else {
    const float norm = sqrtf(warp_sum(square)), stretch = sqrtf((float)D) / fmaxf(norm, TINY);
#pragma unroll
    for (int i = 0; i < R; ++i) x[i] *= stretch;
    const float along = round_values<D, LEVELS, STRETCHES>(x, numbers, lane, code);
    scale = norm > TINY ? fminf(sqrtf((float)D) * norm / fmaxf(along, TINY), FP16_MAX) : 0.f;
  }
#pragma unroll
  for (int i = 0; i < R; ++i) put_fragment_code<BITS, D, KEYS>(words, t, lane + WARP * i, (u32)code[i]);
  return scale;
}

template <int D, int KB, int VB, int K_LEVELS, int V_LEVELS, int STRETCHES>
struct Encoding {
  static constexpr int R = D / WARP, K_WORDS = KB * D, V_WORDS = VB * D, WORDS = K_WORDS + V_WORDS + TILE;

  const float* k_numbers;  // as round_values wants them; not read at 8 bits
  const float* v_numbers;

  // One tile: `take(i, keys, values)` gives vector i with its signs, for the slots from `first` on.
  template <class Take>
  __device__ void tile(int tile, int first, int count, const Take& take, u32* words, u32* to) const {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) words[i] = 0;
    __syncthreads();
    __half* scales = reinterpret_cast<__half*>(words + K_WORDS + V_WORDS);
    for (int t = warp; t < TILE; t += ENCODE_WARPS) {
      const int i = tile * TILE + t - first, slot = t % 8 * 4 + t / 8;
      if (i < 0 || i >= count) {  // code 0, which is not a word of zeros at 4 and 5 bits
        for (int d = lane; d < D; d += WARP) {
          put_fragment_code<KB, D, true>(words, t, d, 0);
          put_fragment_code<VB, D, false>(words + K_WORDS, t, d, 0);
        }
        continue;
      }
      float k[R], v[R];
      take(i, lane, k, v);
      const float k_scale = encode_vector<D, KB, K_LEVELS, STRETCHES, true>(k, k_numbers, words, t, lane);
      const float v_scale = encode_vector<D, VB, V_LEVELS, STRETCHES, false>(v, v_numbers, words + K_WORDS, t, lane);
      if (lane == 0) scales[slot] = __float2half(k_scale), scales[TILE + slot] = __float2half(v_scale);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) to[i] = words[i];
  }
};

// Vectors of one KV head, keys without their mean and scale.
template <int D, class K, class V>
struct Centered {
  Vectors<K> keys;  // (KV heads, count, D)
  Vectors<V> values;
  const float* k_signs;  // (D,)
  const float* v_signs;
  int kv;

  __device__ __forceinline__ void operator()(int i, int lane, float (&k)[D / WARP], float (&v)[D / WARP]) const {
    const K* key = keys.at(0, kv, i);
    const V* value = values.at(0, kv, i);
#pragma unroll
    for (int r = 0; r < D / WARP; ++r) {
      const int d = lane + WARP * r;
      k[r] = to_float(key[d * keys.dim]) * __ldg(k_signs + d);
      v[r] = to_float(value[d * values.dim]) * __ldg(v_signs + d);
    }
  }
};

}  // namespace tqd
