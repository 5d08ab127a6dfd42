// The tokens of all rows that are in full precision: sinks, then tail. A kernel that attends to them writes them anew with
// the newest one behind them, so that a step needs no other node, and an array that somebody else still holds stays as it is.
#pragma once

namespace tqd {

template <class T, int D>
struct Plain {
  const T* data;  // (B, 2, H, slots, D): keys and values; the tail follows the sinks, after a gap of `left` tokens
  T* next;        // the same without the gap, and with the fresh token
  int n_kv, slots;
  Vectors<T> fresh_keys, fresh_values;  // ([B,] H, 1, D)

  static constexpr int R = D / WARP;
  static constexpr int TOGETHER = 16 / sizeof(T);  // tokens that a warp asks for at once

  // Attends from the query q of one head, numbers R·lane to R·lane + R − 1 of it, to this split's share of the tokens;
  // and passes those on, if it `passes`.
  __device__ __forceinline__ Merged<D> attend(const Span& span, int row, int kv, int split, int splits,
                                              const float (&q)[R], bool passes, int lane) const {
    Merged<D> all;
    const int count = span.packed_from + span.length - span.packed_to, stored = count - span.fresh;
    if (span.fresh && split == splits - 1) {
      Numbers<R, T> k[1], v[1];
      const T *key = fresh_keys.at(row, kv, 0), *value = fresh_values.at(row, kv, 0);
#pragma unroll
      for (int i = 0; i < R; ++i) {
        k[0].at[i] = key[(R * lane + i) * fresh_keys.dim];
        v[0].at[i] = value[(R * lane + i) * fresh_values.dim];
      }
      if (passes) put(row, kv, count - 1, lane, k[0], v[0]);
      take(all, q, k, v, 1);
    }
    for (int first = split; first < stored; first += TOGETHER * splits) {
      Numbers<R, T> k[TOGETHER], v[TOGETHER];
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) get(span, row, kv, min(first + u * splits, stored - 1), lane, k[u], v[u]);
      int there = 0;
#pragma unroll
      for (int u = 0; u < TOGETHER; ++u) there += first + u * splits < stored;
      if (passes)
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u)
          if (u < there) put(row, kv, first + u * splits, lane, k[u], v[u]);
      take(all, q, k, v, there);
    }
    return all;
  }

 private:
  // Keys and values of token i of a row, but not of the fresh one: numbers R·lane to R·lane + R − 1 of each.
  __device__ __forceinline__ void get(const Span& span, int row, int kv, int i, int lane, Numbers<R, T>& key,
                                      Numbers<R, T>& value) const {
    const long long from = place(row, kv, i < span.packed_from ? i : i + span.left);
    key = reinterpret_cast<const Numbers<R, T>*>(data + from)[lane];
    value = reinterpret_cast<const Numbers<R, T>*>(data + from + (long long)n_kv * slots * D)[lane];
  }

  // Passes token i on.
  __device__ __forceinline__ void put(int row, int kv, int i, int lane, const Numbers<R, T>& key,
                                      const Numbers<R, T>& value) const {
    const long long to = place(row, kv, i);
    reinterpret_cast<Numbers<R, T>*>(next + to)[lane] = key;
    reinterpret_cast<Numbers<R, T>*>(next + to + (long long)n_kv * slots * D)[lane] = value;
  }

  // Attends to the first `there` of N tokens.
  template <int N>
  static __device__ __forceinline__ void take(Merged<D>& all, const float (&q)[R], Numbers<R, T> (&k)[N],
                                              Numbers<R, T> (&v)[N], int there) {
    float s[N], most = LOWEST;
#pragma unroll
    for (int u = 0; u < N; ++u) {
      keep_packed(k[u]);
      float x = 0.f;
#pragma unroll
      for (int i = 0; i < R; ++i) x += q[i] * to_float(k[u].at[i]);
      x = warp_sum(x);
      s[u] = u < there ? x : MASKED;
      most = fmaxf(most, s[u]);
    }
    all.raise(most);
#pragma unroll
    for (int u = 0; u < N; ++u) {
      keep_packed(v[u]);
      const float p = exp2_fast(s[u] - all.top);
      all.total += p;
      all.add(p, v[u]);
    }
  }

  // Of keys; values are n_kv · slots further.
  __device__ __forceinline__ long long place(int row, int kv, int slot) const {
    return (((long long)row * 2 * n_kv + kv) * slots + slot) * D;
  }
};

}  // namespace tqd
