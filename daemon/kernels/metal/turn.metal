// Queries as the first pass of attention wants them, times factor: as they are, in the basis of packed keys, and what
// they ask of the mean that those have lost. One threadgroup a query vector.
//
// Template: DIM, GROUPED (query heads of a KV head times query tokens), NEW (query tokens), TURNED (keys are packed),
// SCALED and MEAN (what they have lost). A pair of channels that rotates has a coefficient for its cosine and, DIM / 2
// further, one for its sine; channels that do not rotate ask the same of every position.

const int row = threadgroup_position_in_grid.z;
const int kv_head = row / GROUPED;
const int lane = thread_index_in_simdgroup;
const int simdgroup = simdgroup_index_in_threadgroup;
const int threads = threads_per_threadgroup.x;
const int thread_index = thread_index_in_threadgroup;
const int64_t from = row / NEW * queries_strides[0] + row % NEW * queries_strides[1];

threadgroup float query[DIM];
threadgroup float asked[DIM];
threadgroup float same[8];
for (int d = thread_index; d < DIM; d += threads) {
  query[d] = float(queries[from + d * queries_strides[2]]) * factor;
  asked[d] = SCALED ? query[d] * scales[kv_head * DIM + d] : query[d];
  plain[row * DIM + d] = query[d];
}
threadgroup_barrier(mem_flags::mem_threadgroup);

float alike = 0;  // at every position
for (int d = thread_index; d < DIM; d += threads) {
  float value = query[d];
  if (TURNED) {
    value = 0;
    for (int j = 0; j < DIM; j++) {
      value += asked[j] * basis[j * DIM + d];
    }
  }
  packed[row * DIM + d] = value;
  if (MEAN) {
    const int pair = channels[3 * d];
    const int other = channels[3 * d + 1];
    const float own = mean[kv_head * DIM + d];
    if (pair < 0) {
      alike += query[d] * own;
    } else if (channels[3 * d + 2] == 0) {
      coefficients[row * DIM + pair] = query[d] * own + query[other] * mean[kv_head * DIM + other];
      coefficients[row * DIM + DIM / 2 + pair] = query[other] * own - query[d] * mean[kv_head * DIM + other];
    }
  }
  if (d >= pairs && d < DIM / 2) {  // that there are no pairs for
    coefficients[row * DIM + d] = 0;
    coefficients[row * DIM + DIM / 2 + d] = 0;
  }
}
alike = simd_sum(alike);
if (lane == 0) {
  same[simdgroup] = alike;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
if (thread_index == 0) {
  float sum = 0;
  for (int i = 0; i < threads / 32; i++) {
    sum += same[i];
  }
  constants[row] = sum;
  for (int i = threadgroups_per_grid.z; row == 0 && i < 8; i++) {
    constants[i] = 0;  // for MLX would put a smaller array into another address space
  }
}
