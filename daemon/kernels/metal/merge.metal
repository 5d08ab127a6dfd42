// Pass 2: one threadgroup merges the blocks of one query vector. What came from packed values is in their rotated
// basis: it goes through the matrix that leads out of it, and to the rest. All is divided by the sum of all weights.
//
// Template: DIM_V, SINKS (each head has a learned logit that takes weight and gives nothing), TURNED (values are packed), T.

constexpr int SHARE = (DIM_V + 31) / 32;  // values of a lane

const int n_queries = sizes[5];
const int new_tokens = sizes[6];
const int rotated_blocks = sizes[9];
const int blocks = sums_shape[1];

const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int query = threadgroup_position_in_grid.z;

threadgroup float shared_sums[8][2 * DIM_V];
threadgroup float shared_totals[8];

float largest = -1e30f;
for (int block = lane; block < blocks; block += 32) {
  largest = max(largest, states[2 * (query * blocks + block)]);
}
largest = simd_max(largest);
float sink = -INFINITY;
if (SINKS) {
  sink = sinks[query / n_queries * (n_queries / new_tokens) + query % n_queries / new_tokens];
  largest = max(largest, sink);
}

float rotated[SHARE];
float plain[SHARE];
for (int i = 0; i < SHARE; i++) {
  rotated[i] = 0;
  plain[i] = 0;
}
float total = 0;
for (int block = simdgroup; block < blocks; block += 8) {
  int at = query * blocks + block;
  float shrink = fast::exp2(states[2 * at] - largest);
  total += shrink * states[2 * at + 1];
  for (int i = 0; i < SHARE; i++) {
    int d = lane + 32 * i;
    float part = d < DIM_V ? shrink * sums[at * DIM_V + d] : 0;
    if (block < rotated_blocks) {
      rotated[i] += part;
    } else {
      plain[i] += part;
    }
  }
}
for (int i = 0; i < SHARE; i++) {
  int d = lane + 32 * i;
  if (d < DIM_V) {
    shared_sums[simdgroup][d] = rotated[i];
    shared_sums[simdgroup][DIM_V + d] = plain[i];
  }
}
if (lane == 0) {
  shared_totals[simdgroup] = total;
}
threadgroup_barrier(mem_flags::mem_threadgroup);

total = SINKS ? fast::exp2(sink - largest) : 0;
for (int i = 0; i < 8; i++) {
  total += shared_totals[i];
}
float share = total == 0 ? 0 : 1 / total;  // nothing visible gives zeros
for (int i = thread_index_in_threadgroup; i < 2 * DIM_V; i += 256) {
  float value = 0;
  for (int j = 0; j < 8; j++) {
    value += shared_sums[j][i];
  }
  shared_sums[0][i] = value * share;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
for (int d = thread_index_in_threadgroup; d < DIM_V; d += 256) {
  float value = shared_sums[0][DIM_V + d];
  if (TURNED) {
    for (int j = 0; j < DIM_V; j++) {
      value += shared_sums[0][j] * basis[j * DIM_V + d];
    }
  }
  out[query * DIM_V + d] = T(value);
}
