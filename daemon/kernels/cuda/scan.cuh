// The general kernel: flash decoding on CUDA cores for every shape, width, order, mask and number of queries.
// It decodes 32 tokens at a time into shared memory; fragments.cuh is the fast one.
//
// A block serves up to 16 query rows (query head × query token) of one KV head, over one split of the tokens.
// Scores: a warp takes a query row, a lane takes a token. Outputs: a lane takes every 32nd dimension.
#pragma once

namespace tqd {

constexpr int SCAN_WARPS = 8, SCAN_ROWS = 16;

// What was taken off packed keys: pairs of channels that rotate together, int32 (pairs, 2); the channels that do not
// rotate; and a table of cosines, sines and ones, (positions, width), one row where nothing rotates.
struct Mean {
  const float* mean;  // (H, DK)
  const int* pairs;
  const int* plain;
  const float* table;
  int n_pairs, n_plain, rows;

  __device__ __forceinline__ int width() const { return 2 * n_pairs + (n_plain > 0); }
};

// Coefficient j of a query q for the table's columns (daemon/kernels/keys.py).
__device__ __forceinline__ float coefficient(const Mean& m, const float* q, const float* mean, int j) {
  if (j < 2 * m.n_pairs) {
    const int a = m.pairs[2 * (j % m.n_pairs)], b = m.pairs[2 * (j % m.n_pairs) + 1];
    return j < m.n_pairs ? q[a] * mean[a] + q[b] * mean[b] : q[b] * mean[a] - q[a] * mean[b];
  }
  float sum = 0.f;
  for (int i = 0; i < m.n_plain; ++i) sum += q[m.plain[i]] * mean[m.plain[i]];
  return sum;
}

template <int DK, int DV, class KF, class VF, int ORDER, class Q, class K, class V>
struct Scan {
  static constexpr int K_WORDS = KF::template WORDS<DK>, V_WORDS = VF::template WORDS<DV>;
  static constexpr int K_SCALES = K_WORDS + V_WORDS, V_SCALES = K_SCALES + (KF::FULL ? 0 : TILE / 2);
  static constexpr int OUT = (DV + WARP - 1) / WARP;  // dimensions of a lane

  Vectors<Q> queries;    // ([B,] heads, L, DK)
  const float* rotated;  // the same in the keys' stored basis, scaled per channel; unused where keys are not packed
  Tiles tiles;
  Vectors<K> k_head, k_tail;
  Vectors<V> v_head, v_tail;
  const float* k_levels;  // centroids, 32 numbers
  const float* v_levels;
  const float* mask;  // added to the scores, (mask_heads, L, length), or null: causal
  int mask_heads;
  Mean mean;
  int group, L, heads;  // query heads of a KV head, query tokens, query heads
  float scale;
  float* sums;     // (B·heads·L, splits, 2, DV): Σ weight·value in the stored basis, and in the model's
  float* extremes;  // (B·heads·L, splits, 2): running maximum, in log2, and Σ weight

  __device__ void run(const Span span, int b, int kv, int block, int split, int splits, float* smem) const {
    const int tid = threadIdx.x, warp = tid / WARP, lane = tid % WARP;
    const int first = block * SCAN_ROWS, n_rows = min(SCAN_ROWS, group * L - first);
    const int width = KF::FULL ? 0 : mean.width(), q_stride = 2 * DK + width, k_stride = (DK + width) | 1;
    float* qs = smem;  // raw | rotated | coefficients
    float* ks = qs + SCAN_ROWS * q_stride;
    float* vs = ks + TILE * k_stride;
    __shared__ float levels[2][32];
    if (tid < 64) levels[tid / 32][tid % 32] = (tid < 32 ? k_levels : v_levels)[tid % 32];
    auto row_of = [&](int r) {
      return ((long long)(b * heads + kv * group + (first + r) / L)) * L + (first + r) % L;
    };
    for (int i = tid; i < n_rows * DK; i += blockDim.x) {
      const int r = i / DK, d = i % DK;
      qs[r * q_stride + d] = to_float(queries.at(b, kv * group + (first + r) / L, (first + r) % L)[d * queries.dim]);
      if (!KF::FULL) qs[r * q_stride + DK + d] = rotated[row_of(r) * DK + d];
    }
    __syncthreads();
    if constexpr (!KF::FULL) {  // else nothing has lost a mean
      for (int i = tid; i < n_rows * width; i += blockDim.x)
        qs[i / width * q_stride + 2 * DK + i % width] =
            coefficient(mean, qs + i / width * q_stride, mean.mean + kv * DK, i % width);
    }

    constexpr int MINE = SCAN_ROWS / SCAN_WARPS;
    float top[MINE], total[MINE], out[MINE][2][OUT];
    for (int i = 0; i < MINE; ++i) {
      top[i] = LOWEST, total[i] = 0.f;
      for (int o = 0; o < OUT; ++o) out[i][0][o] = out[i][1][o] = 0.f;
    }
    const int chunks = (span.length + TILE - 1) / TILE;
    for (int c = (int)((long long)chunks * split / splits), end = (int)((long long)chunks * (split + 1) / splits);
         c < end; ++c) {
      __syncthreads();
      load(span, b, kv, c, width, k_stride, ks, vs, levels);
      __syncthreads();
      const int p = c * TILE + lane;
      const bool packed = p >= span.packed_from && p < span.packed_to;
#pragma unroll
      for (int i = 0; i < MINE; ++i) {
        const int r = warp + i * SCAN_WARPS;
        if (r >= n_rows) continue;
        const int l = (first + r) % L, h = kv * group + (first + r) / L;
        float s = 0.f;
        const float* k = ks + lane * k_stride;
        const float* q = qs + r * q_stride;
        if (!KF::FULL && packed) {
          for (int d = 0; d < DK + width; ++d) s += q[DK + d] * k[d];
        } else {
          for (int d = 0; d < DK; ++d) s += q[d] * k[d];
        }
        s *= scale;
        const bool seen = mask ? p < span.length : p <= span.length - L + l;
        if (mask && seen) s += mask[((long long)(mask_heads > 1 ? h : 0) * L + l) * span.length + p];
        s = seen ? s * LOG2E : -1e38f;
        const float above = fmaxf(top[i], warp_max(s)), fade = exp2f(top[i] - above), w = seen ? exp2f(s - above) : 0.f;
        top[i] = above;
        total[i] = total[i] * fade + warp_sum(w);
        for (int o = 0; o < OUT; ++o) out[i][0][o] *= fade, out[i][1][o] *= fade;
        for (int t = 0; t < TILE; ++t) {
          const float weight = __shfl_sync(ALL, w, t);
          const int at = c * TILE + t;
          const int basis = !VF::FULL && at >= span.packed_from && at < span.packed_to ? 0 : 1;
#pragma unroll
          for (int o = 0; o < OUT; ++o) {
            const float v = lane + o * WARP < DV ? vs[t * DV + lane + o * WARP] : 0.f;
            out[i][0][o] += basis == 0 ? weight * v : 0.f;
            out[i][1][o] += basis == 1 ? weight * v : 0.f;
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
      const int r = warp + i * SCAN_WARPS;
      if (r >= n_rows) continue;
      const long long at = row_of(r) * splits + split;
      for (int o = 0; o < OUT; ++o)
        if (lane + o * WARP < DV) {
          sums[at * 2 * DV + lane + o * WARP] = out[i][0][o];
          sums[(at * 2 + 1) * DV + lane + o * WARP] = out[i][1][o];
        }
      if (lane == 0) extremes[at * 2] = top[i], extremes[at * 2 + 1] = total[i];
    }
  }

 private:
  // Decodes 32 tokens; those that are not there become zeros, whatever their slots hold.
  __device__ void load(const Span span, int b, int kv, int c, int width, int k_stride, float* ks, float* vs,
                       float (&levels)[2][32]) const {
    const bool any = c * TILE < span.packed_to && c * TILE + TILE > span.packed_from;
    const u32* tile = any ? tiles.at(kv, c) : nullptr;
    for (int i = threadIdx.x; i < TILE * DK; i += blockDim.x) {
      const int t = i / DK, d = i % DK, p = c * TILE + t;
      float x = 0.f;
      if (p < span.length) {
        if (KF::FULL || p < span.packed_from) {
          x = to_float(k_head.at(b, kv, p)[d * k_head.dim]);
        } else if (p >= span.packed_to) {
          x = to_float(k_tail.at(b, kv, p - span.packed_to)[d * k_tail.dim]);
        } else if constexpr (!KF::FULL) {
          x = packed_value<KF, DK, ORDER, true>(tile, levels[0], t, d) * scale_of<ORDER>(tile + K_SCALES, t);
        }
      }
      ks[t * k_stride + d] = x;
    }
    for (int i = threadIdx.x; i < TILE * width; i += blockDim.x) {
      const int p = c * TILE + i / width;
      const bool packed = p >= span.packed_from && p < span.packed_to;
      const int row = mean.rows == 1 ? 0 : p + span.dropped;
      ks[i / width * k_stride + DK + i % width] = packed ? mean.table[(long long)row * width + i % width] : 0.f;
    }
    for (int i = threadIdx.x; i < TILE * DV; i += blockDim.x) {
      const int t = i / DV, d = i % DV, p = c * TILE + t;
      float x = 0.f;
      if (p < span.length) {
        if (VF::FULL || p < span.packed_from) {
          x = to_float(v_head.at(b, kv, p)[d * v_head.dim]);
        } else if (p >= span.packed_to) {
          x = to_float(v_tail.at(b, kv, p - span.packed_to)[d * v_tail.dim]);
        } else if constexpr (!VF::FULL) {
          x = packed_value<VF, DV, ORDER, false>(tile + K_WORDS, levels[1], t, d) * scale_of<ORDER>(tile + V_SCALES, t);
        }
      }
      vs[i] = x;
    }
  }
};

// Queries (heads, L, DK) as packed keys want them: times their channels' scales (KV heads, DK), or null, and then times
// `basis` (DK, DK) as row vectors. One block a query row.
template <int DK, class Q>
__device__ void scan_turn(const Vectors<Q>& queries, const float* basis, const float* scales, int group, int L, float* out) {
  __shared__ float x[DK];
  const int row = blockIdx.x, h = row / L;
  const Q* query = queries.at(0, h, row % L);
  for (int d = threadIdx.x; d < DK; d += blockDim.x)
    x[d] = to_float(query[d * queries.dim]) * (scales ? scales[h / group * DK + d] : 1.f);
  __syncthreads();
  for (int d = threadIdx.x; d < DK; d += blockDim.x) {
    float y = 0.f;
    for (int i = 0; i < DK; ++i) y = fmaf(x[i], basis[i * DK + d], y);
    out[(long long)row * DK + d] = y;
  }
}

// Merges the splits of one query row. What came from packed values goes into the model's basis, as a row vector times
// `basis` (DV, DV); null: nothing did. `logits` are learned sinks (heads,), or null. One block a row of `out` (rows, DV).
template <int DV, class S, class T>
__device__ void scan_merge(const float* sums, const float* extremes, const float* basis, const S* logits, int heads, int L,
                           int splits, T* out) {
  __shared__ float x[2 * DV];
  const long long row = blockIdx.x;
  const float sink = logits ? to_float(logits[row / L % heads]) * LOG2E : LOWEST;
  float top = sink, total = 0.f;
  for (int s = 0; s < splits; ++s) top = fmaxf(top, extremes[(row * splits + s) * 2]);
  for (int s = 0; s < splits; ++s)
    total += exp2f(extremes[(row * splits + s) * 2] - top) * extremes[(row * splits + s) * 2 + 1];
  if (logits) total += exp2f(sink - top);
  for (int d = threadIdx.x; d < 2 * DV; d += blockDim.x) {
    float sum = 0.f;
    for (int s = 0; s < splits; ++s)
      sum += exp2f(extremes[(row * splits + s) * 2] - top) * sums[(row * splits + s) * 2 * DV + d];
    x[d] = sum / total;
  }
  __syncthreads();
  for (int d = threadIdx.x; d < DV; d += blockDim.x) {
    float y = x[DV + d];
    if (basis)
      for (int i = 0; i < DV; ++i) y = fmaf(x[i], basis[i * DV + d], y);
    put(out + row * DV + d, y);
  }
}

}  // namespace tqd
