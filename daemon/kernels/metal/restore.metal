// All keys, or all values, of a row as the model made them: one threadgroup for 16 tokens of a KV head. Tiles are decoded
// into threadgroup memory and multiplied by the matrix that leads out of the stored basis; keys get back what they have
// lost. Tokens in full precision are copied.
//
// Template: DIM, HALF_BITS (twice the width of a code), TRELLIS (the values of a vector, or 0), CODES and SCALES (the first
// words of each in a tile), SCALED and MEAN (what keys have lost), CLIPS (half precision must not become infinite), T.

constexpr int SLOTS = 16;
constexpr int EACH = 8;  // tokens of a thread, which share what it reads of the matrix

const int length = sizes[0];
const int packed_from = sizes[1];
const int packed_to = sizes[2];
const int dropped = sizes[3];
const int pairs = sizes[4];  // of channels that rotate

const int first = threadgroup_position_in_grid.y * SLOTS;
const int kv_head = threadgroup_position_in_grid.z;
const int thread_index = thread_index_in_threadgroup;
device T* to = out + (int64_t(kv_head) * length + first) * DIM;

for (int i = thread_index; i < SLOTS * DIM; i += 256) {
  const int token = first + i / DIM;
  const int d = i % DIM;
  if (token < packed_from && token < length) {
    to[i] = T(head[kv_head * head_strides[0] + token * head_strides[1] + d * head_strides[2]]);
  } else if (token >= packed_to && token < length) {
    to[i] = T(tail[kv_head * tail_strides[0] + (token - packed_to) * tail_strides[1] + d * tail_strides[2]]);
  }
}

threadgroup float4 vectors[DIM * SLOTS / 4];  // a channel's tokens lie together
threadgroup float table[32];
threadgroup float* numbers = (threadgroup float*)vectors;
const bool any = first < packed_to && first + SLOTS > packed_from;
if (thread_index < 32) {
  table[thread_index] = centroids[thread_index];
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (any) {
  const device uint* tile = tiles + kv_head * tiles_strides[0] + first / 32 * tiles_strides[1];
  for (int i = thread_index; i < DIM; i += 256) {  // 16 values of one token
    const int slot = i % SLOTS;
    const int chunk = i / SLOTS * 16;
    const int token = first + slot;
    const bool packed = token >= packed_from && token < packed_to;
    float values[16];
    float scale = 0;
    if (packed) {
      read_packed<HALF_BITS, TRELLIS>(tile + CODES, token % 32 * DIM + chunk, table, values);
      scale = read_scale(tile + SCALES, token % 32);
    }
    for (int j = 0; j < 16; j++) {
      numbers[(chunk + j) * SLOTS + slot] = packed ? values[j] * scale : 0;
    }
  }
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (any) {
  for (int i = thread_index; i < DIM * (SLOTS / EACH); i += 256) {
    const int d = i % DIM;
    const int slot = i / DIM * EACH;
    float sum[EACH];
    for (int k = 0; k < EACH; k++) {
      sum[k] = 0;
    }
    for (int j = 0; j < DIM; j++) {
      const float entry = basis[j * DIM + d];
      for (int k = 0; k < EACH; k += 4) {
        const float4 tokens = vectors[(j * SLOTS + slot + k) / 4];
        for (int n = 0; n < 4; n++) {
          sum[k + n] += entry * tokens[n];
        }
      }
    }
    const int pair = MEAN ? channels[3 * d] : -1;
    const float scale = SCALED ? scales[kv_head * DIM + d] : 1;
    const float own = MEAN ? mean[kv_head * DIM + d] : 0;
    const float other = MEAN && pair >= 0 ? mean[kv_head * DIM + channels[3 * d + 1]] : 0;
    for (int k = 0; k < EACH; k++) {
      const int token = first + slot + k;
      if (token < packed_from || token >= packed_to) {
        continue;
      }
      float value = sum[k] * scale;
      if (MEAN && pair >= 0) {
        const int at = (token + dropped) * int(angles_shape[1]) + pair;
        const float turned = other * angles[at + pairs];
        value += own * angles[at] + (channels[3 * d + 2] ? turned : -turned);
      } else {
        value += own;
      }
      if (CLIPS) {  // comparisons, because a clamp would lose NaN
        value = value > 65504.0f ? 65504.0f : value < -65504.0f ? -65504.0f : value;
      }
      to[(slot + k) * DIM + d] = T(value);
    }
  }
}
