// Encodes the vectors of one tile of one KV head and packs them: one threadgroup a tile, keys first, then values.
//
// Template: DIM_K, DIM_V, K_HALF_BITS and V_HALF_BITS (0: that side is in full precision and has no part in a tile),
// K_TRELLIS and V_TRELLIS (whether its codes form a trellis), STRETCHES (of a vector, that are tried).

constexpr int WIDER = DIM_K > DIM_V ? DIM_K : DIM_V;
constexpr int K_WORDS = K_HALF_BITS * DIM_K / 2;
constexpr int V_WORDS = V_HALF_BITS * DIM_V / 2;
constexpr int V_SCALES = K_WORDS + V_WORDS + (K_HALF_BITS ? 16 : 0);
constexpr int WORDS = V_SCALES + (V_HALF_BITS ? 16 : 0);

const int first = sizes[0];  // slot of the first vector, counted from the first tile
const int count = sizes[1];
const bool keeps = sizes[2] != 0;  // slots before it hold tokens of the old tile

const int tile = threadgroup_position_in_grid.y;
const int kv_head = threadgroup_position_in_grid.z;
const int thread_index = thread_index_in_threadgroup;

threadgroup uchar codes[32 * WIDER];
threadgroup half scales[32];

device uint* to = tiles + (kv_head * threadgroups_per_grid.y + tile) * WORDS;
const device uint* from = old + kv_head * old_strides[0];
const int kept = keeps && tile == 0 ? first : 0;

if (K_HALF_BITS) {
  encode<DIM_K, K_HALF_BITS, K_TRELLIS, STRETCHES>(
      k + kv_head * count * DIM_K, tile * 32 - first, count, k_thresholds, k_centroids, stretches,
      codes, scales, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  pack<DIM_K, K_HALF_BITS>(codes, from, kept, to, thread_index);
  pack_scales(scales, from + K_WORDS + V_WORDS, kept, to + K_WORDS + V_WORDS, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
if (V_HALF_BITS) {
  encode<DIM_V, V_HALF_BITS, V_TRELLIS, STRETCHES>(
      v + kv_head * count * DIM_V, tile * 32 - first, count, v_thresholds, v_centroids, stretches,
      codes, scales, thread_index);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  pack<DIM_V, V_HALF_BITS>(codes, from + K_WORDS, kept, to + K_WORDS, thread_index);
  pack_scales(scales, from + V_SCALES, kept, to + V_SCALES, thread_index);
}
