// The tokens of all rows that are in full precision: sinks, then tail. A kernel that attends to them writes them anew with
// the newest one behind them, so that a step needs no other node, and an array that somebody else still holds stays as it is.
#pragma once

namespace tqd {

// One token's keys or values: where they are, how far apart, and where they go.
template <class T>
struct PlainVector {
  const T* from;
  long long dim;
  T* to;
};

template <class T, int D>
struct Plain {
  const T* data;  // (B, 2, H, slots, D): keys and values; the tail follows the sinks, after a gap of `left` tokens
  T* next;        // the same without the gap, and with the fresh token
  int n_kv, slots;
  Vectors<T> fresh_keys, fresh_values;  // ([B,] H, 1, D)

  // Token i of the plain ones of a row; side 0 is keys, 1 values.
  __device__ __forceinline__ PlainVector<T> at(const Span& span, int row, int kv, int i, int count, int side) const {
    T* to = next + place(row, kv, i, side);
    if (span.fresh && i == count - 1) {
      const Vectors<T>& fresh = side ? fresh_values : fresh_keys;
      return {fresh.at(row, kv, 0), fresh.dim, to};
    }
    return {data + place(row, kv, i < span.packed_from ? i : i + span.left, side), 1, to};
  }

 private:
  __device__ __forceinline__ long long place(int row, int kv, int slot, int side) const {
    return ((((long long)row * 2 + side) * n_kv + kv) * slots + slot) * D;
  }
};

}  // namespace tqd
