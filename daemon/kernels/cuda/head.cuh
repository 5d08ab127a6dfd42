// One query head: what warps and splits have of its outputs, and how they come together.
#pragma once

namespace tqd {

// A head's outputs so far, in units of 2^-top; lane L of the warp has numbers R·L to R·L + R − 1 of them.
template <int D>
struct Merged {
  static constexpr int R = D / WARP;

  float top = LOWEST, total = 0.f;
  Numbers<R> x = {};

  // Makes room for what has its maximum at `other`; returns the factor for it.
  __device__ __forceinline__ float raise(float other) {
    const float above = fmaxf(top, other), fade = exp2_fast(top - above);
    top = above, total *= fade;
#pragma unroll
    for (int i = 0; i < R; ++i) x.at[i] *= fade;
    return exp2_fast(other - above);
  }

  template <class T>
  __device__ __forceinline__ void add(float factor, const Numbers<R, T>& other) {
#pragma unroll
    for (int i = 0; i < R; ++i) x.at[i] += factor * to_float(other.at[i]);
  }
};

// Where the splits of all heads meet, in memory. No one waits there: the last one to come takes what the others left.
template <int D>
struct Meeting {
  static constexpr int R = D / WARP;
  static constexpr int AT_ONCE = 16;  // splits whose sums a warp asks for at once

  float* sums;       // (B·heads, splits, D)
  float2* extremes;  // (B·heads, splits)
  u32* counters;     // (B·heads,), zero between calls

  // Leaves a split's part; returns whether those of all others are there.
  __device__ __forceinline__ bool put_and_is_last(const Merged<D>& part, long long head, int split, int splits,
                                                  int lane) const {
    const long long to = head * splits + split;
    reinterpret_cast<Numbers<R>*>(sums + to * D)[lane] = part.x;
    if (lane == 0) extremes[to] = make_float2(part.top, part.total);
    bool last = false;
    __syncwarp();
    if (is_leader()) {
      last = count_up(counters + head) == (u32)splits - 1;
      if (last) counters[head] = 0;
    }
    return __any_sync(ALL, last);
  }

  __device__ __forceinline__ Merged<D> all(long long head, int splits, int lane) const {
    const long long from = head * splits;
    Merged<D> all;
    for (int first = 0; first < splits; first += AT_ONCE) {
      // asked for before the maxima are known: one trip to memory instead of two
      Numbers<R> x[AT_ONCE];
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) {
        x[u] = {};
        if (first + u < splits) x[u] = reinterpret_cast<const Numbers<R>*>(sums + (from + first + u) * D)[lane];
      }
      float2 of = make_float2(LOWEST, 0.f);  // of split first + lane
      if (lane < min(AT_ONCE, splits - first)) of = extremes[from + first + lane];
      const float most = warp_most(of.x);
      const float factor = all.raise(most) * exp2_fast(of.x - most);
      all.total += warp_sum(factor * of.y);
#pragma unroll
      for (int u = 0; u < AT_ONCE; ++u) all.add(__shfl_sync(ALL, factor, u), x[u]);
    }
    return all;
  }
};

}  // namespace tqd
