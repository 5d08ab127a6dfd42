// Plain tokens (plain.cuh) that leave for tiles: their keys lose mean and scale on the way. One node for all rows of a layer.
#pragma once

namespace tqd {

// Where the tokens of one row that leaves them are; the words of one row of the `folds` array, int32 (folds, 16).
struct Leaving {
  int row, slot, first, count, position;  // slot: of the first one among the plain tokens; first: in its tile
};

__device__ __forceinline__ Leaving leaving(const int* folds, int index) {
  const int* f = folds + 16 * index;
  return {f[0], f[1], f[2], f[3], f[4]};
}

// What a layer takes off its keys (`Layer` in daemon/kernels/cuda/launch.py).
template <int D, bool HAS_MEAN, int N_PAIRS, int PAIR_STEP, int PAIR_GAP>
struct LeavingMean {
  const float* mean;  // (KV heads, D)
  MeanConstants constants;

  // RoPE_p(mean) of one channel.
  __device__ __forceinline__ float at(int kv, int d, int position) const {
    if (!HAS_MEAN) return 0.f;
    const float own = __ldg(mean + kv * D + d);
    if (d >= 2 * N_PAIRS) return own;
    const bool second = PAIR_STEP == 1 ? d >= PAIR_GAP : d & 1;
    const int j = PAIR_STEP == 1 ? d - second * PAIR_GAP : d >> 1;
    const float other = __ldg(mean + kv * D + (second ? d - PAIR_GAP : d + PAIR_GAP));
    const float2 turn = turned(position, constants.angle(j));
    return second ? fmaf(other, turn.y, own * turn.x) : fmaf(-other, turn.y, own * turn.x);
  }
};

template <int D, class Mean, class T>
struct LeavingTokens {
  const T* plain;  // (B, 2, H, slots, D)
  const float* k_signs;  // (KV heads, D): the rotation's sign times the key scale
  const float* v_signs;  // (D,)
  Mean mean;
  Leaving at;
  int kv, n_kv, slots;

  __device__ __forceinline__ void operator()(int i, int lane, float (&k)[D / WARP], float (&v)[D / WARP]) const {
    const T* key = plain + (((long long)at.row * 2 * n_kv + kv) * slots + at.slot + i) * D;
    const T* value = key + (long long)n_kv * slots * D;
#pragma unroll
    for (int r = 0; r < D / WARP; ++r) {
      const int d = lane + WARP * r;
      k[r] = (to_float(key[d]) - mean.at(kv, d, at.position + i)) / __ldg(k_signs + kv * D + d);
      v[r] = to_float(value[d]) * __ldg(v_signs + d);
    }
  }
};

}  // namespace tqd
