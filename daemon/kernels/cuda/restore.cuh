// All keys, or all values, of a row as the model made them: what MLX's own attention reads for a prompt. One node for a side.
//
// A block takes the 32 tokens of a tile of one head: it decodes them into shared memory, multiplies them by the matrix that
// leads out of the stored basis, and gives keys back what they have lost. Tokens in full precision are copied.
#pragma once

namespace tqd {

// What was taken off a side before it was packed; null pointers: nothing was.
struct Lost {
  const float* scales;  // of channels, (H, D)
  const float* mean;    // (H, D)
  const int* channels;  // (D, 3): pair or −1, the channel that rotates with this one, whether this is the second of the two
  const float* table;   // (positions, width): cosines of all pairs, then sines
  int n_pairs, width;

  // RoPE_p(mean) of one channel.
  __device__ __forceinline__ float shift(const float* of_head, int d, int position) const {
    const int pair = channels[3 * d];
    if (pair < 0) return of_head[d];
    const float* row = table + (long long)position * width;
    const float turned = of_head[channels[3 * d + 1]] * row[n_pairs + pair];
    return fmaf(of_head[d], row[pair], channels[3 * d + 2] ? turned : -turned);
  }
};

// A number that half precision can hold is not made infinite by its error.
__device__ __forceinline__ void put_held(__half* at, float x) { put(at, x > 65504.f ? 65504.f : x < -65504.f ? -65504.f : x); }
template <class T>
__device__ __forceinline__ void put_held(T* at, float x) {
  put(at, x);
}

template <int D, class F, int ORDER, bool KEYS, class X, class T>
struct Restore {
  static constexpr int EACH = 8;  // tokens of a thread, which share what it reads of the matrix

  Tiles tiles;
  int codes_at, scales_at;  // words of a tile
  Vectors<X> head, tail;    // (H, n, D): what comes before the packed tokens, and after them
  const float* levels;
  const float* basis;  // (D, D): stored vectors are rows times it
  Lost lost;
  T* out;  // (H, length, D)

  __device__ void run(const Span span, int kv, int c) const {
    __shared__ float4 channels[D * TILE / 4];  // a channel's tokens lie together
    __shared__ float levels_here[32];
    float* x = reinterpret_cast<float*>(channels);
    auto is_packed = [&](int p) { return p >= span.packed_from && p < span.packed_to; };
    T* to = out + ((long long)kv * span.length + c * TILE) * D;

    for (int i = threadIdx.x; i < TILE * D; i += blockDim.x) {
      const int p = c * TILE + i / D, d = i % D;
      if (p >= span.length || is_packed(p)) continue;
      const X* from = p < span.packed_from ? head.at(0, kv, p) + d * head.dim : tail.at(0, kv, p - span.packed_to) + d * tail.dim;
      put(to + i, to_float(*from));
    }
    if (c * TILE >= span.packed_to || c * TILE + TILE <= span.packed_from) return;

    if (threadIdx.x < 32) levels_here[threadIdx.x] = levels[threadIdx.x];
    __syncthreads();
    const u32* tile = tiles.at(kv, c);
    for (int i = threadIdx.x; i < TILE * D; i += blockDim.x) {
      const int t = i % TILE, d = i / TILE;
      x[i] = is_packed(c * TILE + t)
                 ? packed_value<F, D, ORDER, KEYS>(tile + codes_at, levels_here, t, d) * scale_of<ORDER>(tile + scales_at, t)
                 : 0.f;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < D * (TILE / EACH); i += blockDim.x) {
      const int d = i % D, first = i / D * EACH;
      float y[EACH] = {};
      for (int j = 0; j < D; ++j) {
        const float entry = basis[j * D + d];
#pragma unroll
        for (int u = 0; u < EACH; u += 4) {
          const float4 tokens = channels[(j * TILE + first + u) / 4];
          y[u] = fmaf(tokens.x, entry, y[u]), y[u + 1] = fmaf(tokens.y, entry, y[u + 1]);
          y[u + 2] = fmaf(tokens.z, entry, y[u + 2]), y[u + 3] = fmaf(tokens.w, entry, y[u + 3]);
        }
      }
      const float scale = lost.scales ? lost.scales[kv * D + d] : 1.f;
#pragma unroll
      for (int u = 0; u < EACH; ++u) {
        const int t = first + u, p = c * TILE + t;
        if (!is_packed(p)) continue;
        const float shift = lost.mean ? lost.shift(lost.mean + kv * D, d, p + span.dropped) : 0.f;
        put_held(to + t * D + d, fmaf(y[u], scale, shift));
      }
    }
  }
};

}  // namespace tqd
