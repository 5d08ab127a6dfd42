// Rounds vectors to the nearest codes: one warp a vector, every stretch in one pass (daemon/kernels/codec.py, ADR 0011).
#pragma once

namespace tqd {

// Codes of the D values that a warp holds, value lane + 32·i in x[i], and ⟨x, centroids of the codes⟩. `numbers` are the
// stretches, then LEVELS centroids, ascending, then the thresholds that are not negative.
template <int D, int LEVELS, int STRETCHES, int R>
__device__ __forceinline__ float round_values(const float (&x)[R], const float* numbers, int lane, int (&best)[R]) {
  const float* centroids = numbers + STRETCHES;
  const float* thresholds = centroids + LEVELS;
  float best_square = -1.f, best_along = 0.f;
  for (int s = 0; s < STRETCHES; ++s) {
    int code[R];
    float along = 0.f, square = 0.f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const float stretched = x[i] * __ldg(numbers + s), size = fabsf(stretched);
      int above = LEVELS / 2;
#pragma unroll
      for (int t = 0; t < (LEVELS - 1) / 2; ++t) above += size > __ldg(thresholds + t);
      code[i] = stretched < 0.f ? LEVELS - 1 - above : above;
      const float c = lane + WARP * i < D ? __ldg(centroids + code[i]) : 0.f;
      along += x[i] * c, square += c * c;
    }
    along = warp_sum(along), square = warp_sum(square);
    square = along * along / fmaxf(square, 1e-30f);
    if (s == 0 || square > best_square) {
      best_square = square, best_along = along;
#pragma unroll
      for (int i = 0; i < R; ++i) best[i] = code[i];
    }
  }
  return best_along;
}

template <int D, int LEVELS, int STRETCHES>
__device__ void round_vector(const float* u, const float* numbers, unsigned char* codes, float* overlap) {
  constexpr int R = (D + WARP - 1) / WARP;
  const int lane = threadIdx.x % WARP;
  float x[R];
  int best[R];
#pragma unroll
  for (int i = 0; i < R; ++i) x[i] = lane + WARP * i < D ? u[lane + WARP * i] : 0.f;
  const float along = round_values<D, LEVELS, STRETCHES>(x, numbers, lane, best);
#pragma unroll
  for (int i = 0; i < R; ++i)
    if (lane + WARP * i < D) codes[lane + WARP * i] = (unsigned char)best[i];
  if (lane == 0) *overlap = along;
}

}  // namespace tqd
