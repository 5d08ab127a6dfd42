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

 private:
  // Of keys; values are n_kv · slots further.
  __device__ __forceinline__ long long place(int row, int kv, int slot) const {
    return (((long long)row * 2 * n_kv + kv) * slots + slot) * D;
  }
};

}  // namespace tqd
