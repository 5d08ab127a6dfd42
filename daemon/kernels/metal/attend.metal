// Pass 1: one SIMD-group attends from QUERIES query vectors of a KV head to one block of tokens: every n-th tile of
// packed ones, or every n-th 32 of those in full precision. It leaves weighted values, a maximum and a sum of weights.
//
// LANES neighbouring lanes share a token, 16 values each, so a tile is read in order by whole SIMD-groups, and the
// tokens that are read at the same time keep softmax states of their own until the end. Scores are base-2 logarithms.
//
// Template: DIM_K, DIM_V, K_HALF_BITS and V_HALF_BITS (0: that side is in full precision), K_TRELLIS and V_TRELLIS
// (the values of a vector, or 0), QUERIES, MASK (0: causal, 1: boolean, 2: additive), ROTARY (keys have lost a mean that turns with their position).

constexpr int WIDER = DIM_K > DIM_V ? DIM_K : DIM_V;
constexpr int LANES = WIDER > 128 ? 16 : WIDER > 64 ? 8 : 4;
constexpr int TOKENS = 32 / LANES;  // read at the same time
constexpr int K_WORDS = K_HALF_BITS * DIM_K / 2;
constexpr int V_WORDS = V_HALF_BITS * DIM_V / 2;
constexpr int K_SCALES = K_WORDS + V_WORDS;
constexpr int V_SCALES = K_SCALES + (K_HALF_BITS ? 16 : 0);

const int length = sizes[0];
const int packed_from = sizes[1];
const int packed_to = sizes[2];
const int packed_blocks = sizes[3];
const int plain_blocks = sizes[4];
const int n_queries = sizes[5];   // of a KV head
const int new_tokens = sizes[6];  // the last ones, whose queries these are
const int dropped = sizes[7];
const int pairs = sizes[8];  // of channels that rotate

const int lane = thread_index_in_simdgroup;
const int block = thread_position_in_grid.y;
const int query_groups = (n_queries + QUERIES - 1) / QUERIES;
const int kv_head = thread_position_in_grid.z / query_groups;
const int first_query = kv_head * n_queries + int(thread_position_in_grid.z) % query_groups * QUERIES;
const int end_query = (kv_head + 1) * n_queries;
const int chunk = lane % LANES * 16;  // the first of this lane's values
const bool in_keys = chunk < DIM_K;
const bool in_values = chunk < DIM_V;
const bool packed = block < packed_blocks;

threadgroup float k_table[32];
threadgroup float v_table[32];
if (thread_index_in_threadgroup < 32) {
  k_table[thread_index_in_threadgroup] = k_centroids[thread_index_in_threadgroup];
  v_table[thread_index_in_threadgroup] = v_centroids[thread_index_in_threadgroup];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float query[QUERIES][16];
float sum[QUERIES][16];
float largest[QUERIES];
float total[QUERIES];
for (int q = 0; q < QUERIES; q++) {
  largest[q] = -1e30f;  // finite, so that nothing hidden makes inf - inf
  total[q] = 0;
  for (int i = 0; i < 16; i++) {
    sum[q][i] = 0;
    query[q][i] = 0;
    if (in_keys && first_query + q < end_query) {
      int at = (first_query + q) * DIM_K + chunk + i;
      query[q][i] = packed ? packed_queries[at] : plain_queries[at];
    }
  }
}

const int plain = packed_from + length - packed_to;
const int first_tile = packed ? packed_from / 32 + block : block - packed_blocks;
const int end_tile = (packed ? packed_to + 31 : plain + 31) / 32;
const int stride = packed ? packed_blocks : plain_blocks;
for (int tile = first_tile; tile < end_tile; tile += stride) {
  const device uint* words = tiles + kv_head * tiles_strides[0] + (packed ? tile * tiles_strides[1] : 0);

  // turned to the tile's first position: what multiplies the cosines and sines of a token's place in the tile
  float turned[QUERIES][16];
  if (ROTARY && packed) {
    for (int i = 0; i < 8; i++) {
      int pair = chunk / 2 + i;
      bool rotates = in_keys && pair < pairs;
      int position = (tile * 32 + dropped) * int(angles_shape[1]);
      float c = rotates ? angles[position + pair] : 0;
      float s = rotates ? angles[position + pairs + pair] : 0;
      for (int q = 0; q < QUERIES; q++) {
        int at = (first_query + q) * DIM_K + pair;
        bool present = rotates && first_query + q < end_query;
        float a = present ? coefficients[at] : 0;
        float b = present ? coefficients[at + DIM_K / 2] : 0;
        turned[q][i] = a * c + b * s;
        turned[q][8 + i] = b * c - a * s;
      }
    }
  }

  for (int step = 0; step < LANES; step++) {
    int slot = step * TOKENS + lane / LANES;
    int token = tile * 32 + slot;
    bool valid = packed ? token >= packed_from && token < packed_to : token < plain;
    if (!packed && token >= packed_from) {
      token += packed_to - packed_from;
    }

    float score[QUERIES];
    float values[16];
    for (int q = 0; q < QUERIES; q++) {
      score[q] = 0;
    }
    if (valid && in_keys) {
      float scale = 1;
      if (K_HALF_BITS && packed) {
        read_packed<K_HALF_BITS, K_TRELLIS>(words, slot * DIM_K + chunk, k_table, values);
        scale = read_scale(words + K_SCALES, slot);
      } else if (K_HALF_BITS && token >= packed_to) {
        int64_t at = kv_head * k_tail_strides[0] + (token - packed_to) * k_tail_strides[1];
        read_plain(k_tail + at + chunk * k_tail_strides[2], k_tail_strides[2], values);
      } else {
        int64_t at = kv_head * k_head_strides[0] + token * k_head_strides[1];
        read_plain(k_head + at + chunk * k_head_strides[2], k_head_strides[2], values);
      }
      for (int q = 0; q < QUERIES; q++) {
        for (int i = 0; i < 16; i++) {
          score[q] += query[q][i] * values[i];
        }
        score[q] *= scale;
      }
      if (ROTARY && packed) {
        for (int i = 0; i < 8; i++) {
          int at = slot * DIM_K + chunk / 2 + i;
          float c = offsets[at];
          float s = offsets[at + DIM_K / 2];
          for (int q = 0; q < QUERIES; q++) {
            score[q] += turned[q][i] * c + turned[q][8 + i] * s;
          }
        }
      }
    }

    float weight[QUERIES];
    bool counts = false;
    for (int q = 0; q < QUERIES; q++) {
      for (ushort other = LANES / 2; other > 0; other /= 2) {
        score[q] += simd_shuffle_xor(score[q], other);
      }
      int n = first_query + q;
      int new_token = n % n_queries % new_tokens;
      bool visible = valid && n < end_query;
      if (visible && packed) {
        score[q] += constants[n];
      }
      if (MASK == 0) {
        visible = visible && token <= length - new_tokens + new_token;
      } else if (visible) {
        int head = n / new_tokens;
        int row = (mask_shape[0] > 1 ? head : 0) * int(mask_shape[1]) + (mask_shape[1] > 1 ? new_token : 0);
        if (MASK == 1) {
          visible = float(mask[row * length + token]) != 0;
        } else {
          score[q] += float(mask[row * length + token]) * M_LOG2E_F;
        }
      }
      if (!visible) {
        score[q] = -INFINITY;
      }
      if (score[q] > largest[q]) {
        float shrink = fast::exp2(largest[q] - score[q]);
        largest[q] = score[q];
        total[q] *= shrink;
        for (int i = 0; i < 16; i++) {
          sum[q][i] *= shrink;
        }
      }
      weight[q] = fast::exp2(score[q] - largest[q]);
      total[q] += weight[q];
      counts = counts || !(weight[q] <= negligible);  // NaN counts
    }
    if (!valid || !in_values || !counts) {
      continue;
    }

    float scale = 1;
    if (V_HALF_BITS && packed) {
      read_packed<V_HALF_BITS, V_TRELLIS>(words + K_WORDS, slot * DIM_V + chunk, v_table, values);
      scale = read_scale(words + V_SCALES, slot);
    } else if (V_HALF_BITS && token >= packed_to) {
      int64_t at = kv_head * v_tail_strides[0] + (token - packed_to) * v_tail_strides[1];
      read_plain(v_tail + at + chunk * v_tail_strides[2], v_tail_strides[2], values);
    } else {
      int64_t at = kv_head * v_head_strides[0] + token * v_head_strides[1];
      read_plain(v_head + at + chunk * v_head_strides[2], v_head_strides[2], values);
    }
    for (int q = 0; q < QUERIES; q++) {
      float scaled = weight[q] * scale;
      for (int i = 0; i < 16; i++) {
        sum[q][i] += scaled * values[i];
      }
    }
  }
}

for (int q = 0; q < QUERIES; q++) {
  float common = largest[q];
  for (ushort other = LANES; other < 32; other *= 2) {
    common = max(common, simd_shuffle_xor(common, other));
  }
  float shrink = fast::exp2(largest[q] - common);
  total[q] *= shrink;
  for (ushort other = LANES; other < 32; other *= 2) {
    total[q] += simd_shuffle_xor(total[q], other);
  }
  for (int i = 0; i < 16; i++) {
    sum[q][i] *= shrink;
    for (ushort other = LANES; other < 32; other *= 2) {
      sum[q][i] += simd_shuffle_xor(sum[q][i], other);
    }
  }
  int at = (first_query + q) * (packed_blocks + plain_blocks) + block;
  if (first_query + q < end_query) {
    if (lane < LANES && in_values) {
      for (int i = 0; i < 16; i++) {
        sums[at * DIM_V + chunk + i] = sum[q][i];
      }
    }
    if (lane == 0) {
      states[2 * at] = common;
      states[2 * at + 1] = total[q];
    }
  }
}
