// Keys and values of whole tiles from full precision to packed words, in fragments: one block a tile of one KV head.
// The formulas are those of daemon/kernels/keys.py (what is taken off keys) and codec.py (the codes and scales).
#pragma once

namespace tqd {

constexpr int ENCODE_WARPS = 8;
constexpr float FP16_MAX = 65504.f, TINY = 1e-30f;

template <int D, int KB, int VB, int K_LEVELS, int V_LEVELS, int STRETCHES, class T>
struct Encode {
  static constexpr int R = D / WARP, K_WORDS = KB * D, V_WORDS = VB * D, WORDS = K_WORDS + V_WORDS + TILE;

  Vectors<T> keys, values;  // (KV heads, count, D)
  const float* k_signs;     // (KV heads, D): the rotation's sign times the key scale
  const float* v_signs;     // (D,)
  const float* mean;        // (KV heads, D), or null
  const u32* angles;        // (64, 2): of the pairs, in 2^-64 turns per half token
  int n_pairs, pair_step, pair_gap;
  const float* k_numbers;  // as round_values wants them; unused at 8 bits
  const float* v_numbers;
  int count, unused, position;  // slots before the first token are unused; it was computed at `position`
  u32* out;                     // (KV heads, tiles, WORDS)

  __device__ void run(int tile, int n_tiles, int kv, u32* words) const {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) words[i] = 0;
    __syncthreads();
    __half* k_scales = reinterpret_cast<__half*>(words + K_WORDS + V_WORDS);
    for (int t = warp; t < TILE; t += ENCODE_WARPS) {
      const int token = tile * TILE + t - unused;
      if (token < 0 || token >= count) {  // code 0, which is not a word of zeros at 4 and 5 bits
        for (int d = lane; d < D; d += WARP) {
          put_fragment_code<KB, D, true>(words, t, d, 0);
          put_fragment_code<VB, D, false>(words + K_WORDS, t, d, 0);
        }
        continue;
      }
      const int slot = t % 8 * 4 + t / 8;
      float x[R];
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int d = lane + WARP * i;
        x[i] = to_float(keys.at(0, kv, token)[d * keys.dim]);
        if (mean) x[i] -= mean_at(kv, position + token, d);
        x[i] /= k_signs[kv * D + d];
      }
      const float k_scale = side<KB, K_LEVELS, true>(x, k_numbers, words, t, lane);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        const int d = lane + WARP * i;
        x[i] = to_float(values.at(0, kv, token)[d * values.dim]) * v_signs[d];
      }
      const float v_scale = side<VB, V_LEVELS, false>(x, v_numbers, words + K_WORDS, t, lane);
      if (lane == 0) k_scales[slot] = __float2half(k_scale), k_scales[TILE + slot] = __float2half(v_scale);
    }
    __syncthreads();
    u32* to = out + ((long long)kv * n_tiles + tile) * WORDS;
    for (int i = threadIdx.x; i < WORDS; i += blockDim.x) to[i] = words[i];
  }

 private:
  // Value d of the mean, rotated to a position.
  __device__ __forceinline__ float mean_at(int kv, int p, int d) const {
    const float* mu = mean + kv * D;
    if (d >= 2 * n_pairs) return mu[d];
    const int j = pair_step == 1 ? d % pair_gap : d / 2;
    const bool second = pair_step == 1 ? d >= pair_gap : d & 1;
    const int n = 2 * p;
    const u32 turn = __umulhi((u32)n, angles[2 * j]) + (u32)n * angles[2 * j + 1] - ((u32)(n >> 31) & angles[2 * j]);
    float sine, cosine;
    sincospif((float)(int)turn * (1.f / 2147483648.f), &sine, &cosine);
    const float a = mu[j * pair_step], b = mu[j * pair_step + pair_gap];
    return second ? b * cosine + a * sine : a * cosine - b * sine;
  }

  // Rotates, rounds and places the codes of one vector; returns its scale, which fp16 can hold.
  template <int BITS, int LEVELS, bool KEYS>
  __device__ __forceinline__ float side(float (&x)[R], const float* numbers, u32* words, int t, int lane) const {
    hadamard<R>(x, lane);
    float square = 0.f, most = 0.f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      x[i] *= rsqrtf((float)D);
      square += x[i] * x[i], most = fmaxf(most, fabsf(x[i]));
    }
    int code[R];
    float scale;
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
};

}  // namespace tqd
