// The fast kernel: decode attention over tiles in fragment order, on Hopper's tensor cores. One query token, up to 8 query
// heads per KV head, both sides packed; sinks and tail in full precision; one node for a layer and all rows of a batch,
// which takes in the newest token too.
//
// A block of 8 + 4 warps serves one KV head of one row over one split of its tiles. Each of the 8 owns whole tiles and a
// ring of bulk copies: no barrier in the loop. Codes are signed bytes after one permutation, so scores and outputs are
// integer products: queries and weights have 16 bits, as two bytes in the columns that few heads leave empty.
//   scores   16 tokens × (4 heads × 2 bytes), over dimensions
//   outputs  16 dimensions × (4 heads × 2 bytes), over 32 tokens; weights are in units of the warp's reference maximum,
//            and sums become float32 only when a score or a scale exceeds its reference
// The other 4 attend to the tokens in full precision meanwhile, a head each; they give registers to the 8 and are gone
// when those have finished. Then one warp a head merges what the block has, and the last one of its head to do so merges
// the splits, rotates back and writes: after the one barrier of the block, nobody waits for anybody.
#pragma once

namespace tqd {

constexpr int TILE_WARPS = 8, PLAIN_WARPS = 4, THREADS = (TILE_WARPS + PLAIN_WARPS) * WARP;
constexpr int PARTS = TILE_WARPS + 1;  // of a head in a block: a warp's tiles each, and the plain tokens
constexpr int TILE_REGISTERS = 216, PLAIN_REGISTERS = 72;  // of a thread; the launch gives 168 to all
constexpr float QUERY_MAX = 32512.f, WEIGHT_MAX = 65535.f;
constexpr float HEADROOM = 3.f;      // bits by which a new reference exceeds the score that asked for it
constexpr int FLUSH_TILES = 1024;    // before a sum of 127·255·32 a tile exceeds 31 bits

template <int D, int G, int KB, int VB, bool ROTARY>
struct Shape {
  static constexpr int NT = (G + 3) / 4, GP = NT * 4;  // tiles of 4 heads, and heads with padding
  static constexpr int STAGES = KB + VB > 12 ? 2 : 3;
  static constexpr bool TABLE_IN_REGISTERS = ROTARY && NT == 1 && KB != 5;
  static constexpr int K_WORDS = KB * D, V_WORDS = VB * D, WORDS = K_WORDS + V_WORDS + TILE;
  static constexpr int ROW = D + 8;  // of a warp's outputs in shared memory; padded against bank conflicts

  static constexpr int aligned(int bytes) { return (bytes + 127) / 128 * 128; }
  static constexpr int QUERY = aligned(TILE_WARPS * STAGES * 8);  // after the barriers
  static constexpr int FACTORS = QUERY + GP * 2 * D;              // (factor, ½ correction) a head
  static constexpr int EXTREMES = FACTORS + GP * 8;               // (maximum, Σ) a part and head
  static constexpr int CONSTANTS = aligned(EXTREMES + PARTS * GP * 8);
  static constexpr int MEANS = CONSTANTS + 4 * WARP * 16;  // (worth, constant) a head
  static constexpr int PLAIN = aligned(MEANS + GP * 8);    // outputs of the plain tokens
  static constexpr int COEFFICIENTS = aligned(PLAIN + GP * ROW * 4);
  static constexpr int STEPS = aligned(COEFFICIENTS + (ROTARY ? GP * MEAN_PAIRS * 8 : 0));
  static constexpr int COLUMNS = STEPS + (ROTARY ? MEAN_PAIRS * 8 : 0);
  static constexpr int TABLE = aligned(COLUMNS + (ROTARY ? TILE_WARPS * 2 * NT * 8 * COLUMN * 4 : 0));
  static constexpr int RING = aligned(TABLE + (ROTARY && !TABLE_IN_REGISTERS ? MEAN_TABLE_WORDS * 4 : 0));
  static constexpr int BYTES = RING + TILE_WARPS * STAGES * WORDS * 4;
  static_assert(STAGES * WORDS >= GP * ROW, "a warp's outputs take the place of its ring");
};

// Where a block's numbers go, and what they are of.
struct Block {
  int row, kv, n_kv, split, splits;
};

template <int D, int G, int KB, int VB, bool ROTARY, class T>
struct Fragments {
  using S = Shape<D, G, KB, VB, ROTARY>;
  static constexpr int R = D / WARP, NT = S::NT, GP = S::GP, MT = D / 16;

  Vectors<T> queries;  // ([B,] heads, 1, D)
  Tiles tiles;
  Plain<T, D> plain;
  const int* spans;      // of each row
  const float* k_signs;  // (KV heads, D): the rotation's sign times the key scale
  const float* v_signs;  // (D,)
  const float* mean;     // (KV heads, D), times the rotary embedding's own factor; null: nothing was subtracted
  int n_pairs, pair_step, pair_gap;  // pair j of channels that rotate together is j·step and j·step + gap
  MeanConstants constants;
  const T* logits;  // learned sinks (heads,), or null
  float scale, k_step, v_step;
  float* sums;       // (B·heads, splits, D)
  float2* extremes;  // (B·heads, splits)
  u32* counters;     // (B·heads,), zero between calls
  T* out;            // (B, heads, D)

  __device__ __forceinline__ void run(const Block at, unsigned char* shared) const {
    const int warp = warp_index(), lane = threadIdx.x % WARP;
    if (warp < TILE_WARPS) {
      attend_tiles(at, shared, warp, lane);
      asm volatile("bar.sync 2, %0;" ::"n"(THREADS) : "memory");
      if (warp < G) conclude(at, shared, warp, lane);
    } else {
      fewer_registers<PLAIN_REGISTERS>();
      for (int h = warp - TILE_WARPS; h < G; h += PLAIN_WARPS) attend_plain(at, shared, h, lane);
      asm volatile("bar.arrive 2, %0;" ::"n"(THREADS) : "memory");
    }
  }

 private:
  __device__ __forceinline__ long long head_of(const Block& at, int h) const {
    return ((long long)at.row * at.n_kv + at.kv) * G + h;
  }
  static __device__ __forceinline__ float2* part(unsigned char* shared, int index) {
    return reinterpret_cast<float2*>(shared + S::EXTREMES) + index * GP;
  }
  static __device__ __forceinline__ float* outputs(unsigned char* shared, int index) {
    return reinterpret_cast<float*>(index < TILE_WARPS ? shared + S::RING + index * S::STAGES * S::WORDS * 4
                                                       : shared + S::PLAIN);
  }

  // What a warp needs of its query head, read before any tile so that it does not wait behind them.
  struct Query {
    T q[R], a[2], b[2];
    float signs[R], mu[R], mu_a[2], mu_b[2];
  };

  __device__ __forceinline__ Query read(const Block& at, int h, int lane) const {
    Query x;
    const T* q = queries.at(at.row, at.kv * G + (h < G ? h : 0), 0);
    const float* mu = mean + at.kv * D;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int d = lane + WARP * i;
      x.q[i] = h < G ? q[d * queries.dim] : T(0.f);
      x.signs[i] = __ldg(k_signs + at.kv * D + d);
      x.mu[i] = mean && d >= 2 * n_pairs ? __ldg(mu + d) : 0.f;
    }
    if (ROTARY)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int j = lane + WARP * i, first = j * pair_step, second = first + pair_gap;
        const bool there = j < n_pairs && h < G;
        x.a[i] = there ? q[first * queries.dim] : T(0.f);
        x.b[i] = there ? q[second * queries.dim] : T(0.f);
        x.mu_a[i] = there ? __ldg(mu + first) : 0.f, x.mu_b[i] = there ? __ldg(mu + second) : 0.f;
      }
    return x;
  }

  // A head's query as bytes (high, low) and their factor; what the key mean adds to its scores.
  __device__ __forceinline__ void prepare(const Query& query, unsigned char* shared, int h, int lane) const {
    float x[R], constant = 0.f;
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const float q = to_float(query.q[i]);
      constant += q * query.mu[i];
      x[i] = q * query.signs[i] * rsqrtf((float)D);
    }
    float worth = 0.f;
    if constexpr (ROTARY) {
      float a[2], b[2], most = 0.f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float first = to_float(query.a[i]), second = to_float(query.b[i]);
        a[i] = first * query.mu_a[i] + second * query.mu_b[i];
        b[i] = second * query.mu_a[i] - first * query.mu_b[i];
        most = fmaxf(most, a[i] * a[i] + b[i] * b[i]);
      }
      most = warp_most(most);
      const float inverse_root = most > 0.f ? rsqrtf(most) : 0.f, inverse = COEFFICIENT_MAX * inverse_root;
      float2* to = reinterpret_cast<float2*>(shared + S::COEFFICIENTS) + h * MEAN_PAIRS;
#pragma unroll
      for (int i = 0; i < 2; ++i) to[lane + WARP * i] = make_float2(a[i] * inverse, b[i] * inverse);
      worth = 256.f / (COEFFICIENT_MAX * COEFFICIENT_MAX) * most * inverse_root * scale * LOG2E;
    }
    constant = warp_sum(constant) * scale * LOG2E;

    hadamard<R>(x, lane);
    float most = 0.f;
    int total = 0;
#pragma unroll
    for (int i = 0; i < R; ++i) most = fmaxf(most, fabsf(x[i]));
    most = warp_most(most);
    const float inverse = most > 0.f ? __fdividef(QUERY_MAX, most) : 0.f;
    signed char* bytes = reinterpret_cast<signed char*>(shared + S::QUERY);
#pragma unroll
    for (int i = 0; i < R; ++i) {
      const int v = __float2int_rn(x[i] * inverse), low = (signed char)(v & 255);
      total += v;
      bytes[2 * h * D + lane + WARP * i] = (signed char)((v - low) >> 8);
      bytes[(2 * h + 1) * D + lane + WARP * i] = (signed char)low;
    }
    const float sum = (float)__reduce_add_sync(ALL, total);
    if (lane == 0) {
      // integers would lose a NaN, and after the transform every number of its head is one
      const float factor = x[0] == x[0] ? most * (1.f / QUERY_MAX) * scale * LOG2E * k_step : x[0];
      reinterpret_cast<float2*>(shared + S::FACTORS)[h] = make_float2(factor, KB == 8 ? 0.f : .5f * sum * factor);
      reinterpret_cast<float2*>(shared + S::MEANS)[h] = make_float2(worth, constant);
    }
  }

  __device__ __forceinline__ void attend_tiles(const Block& at, unsigned char* shared, int warp, int lane) const {
    const int g = lane >> 2, c = lane & 3;
    unsigned char* ring = shared + S::RING + warp * S::STAGES * S::WORDS * 4;
    const u32 barriers = shared_address(shared) + warp * S::STAGES * 8, slots = shared_address(ring);

    const bool copies = is_leader();
    if (copies) {
#pragma unroll
      for (int s = 0; s < S::STAGES; ++s) barrier_init(barriers + 8 * s);
      barriers_visible();
    }
    // asked for before most tiles: otherwise it would wait behind megabytes of them
    const Span span = span_of(spans, at.row);
    const Query query = read(at, warp, lane);
    MeanBias<NT, S::TABLE_IN_REGISTERS> bias;
    if (ROTARY) bias.load(constants, lane);
    uint2 step;
    if (ROTARY && warp >= TILE_WARPS - 2) step = constants.angle(threadIdx.x % MEAN_PAIRS);
    // Tiles of this warp: every `apart`th. Whether the first one is needed is not known yet: it is copied all the same.
    const int first = at.split * TILE_WARPS + warp, apart = at.splits * TILE_WARPS;
    const bool ahead_of_span = first < tiles.room;
    const u64 once = read_once();
    const u32* next = tiles.at(at.kv, first);
    const long long stride = apart * tiles.tile;
    if (copies && ahead_of_span) copy_to_shared(slots, next, S::WORDS * 4, barriers, once);
    const int end = (span.packed_to + TILE - 1) / TILE;
    if (copies)
#pragma unroll
      for (int s = 1; s < S::STAGES; ++s)
        if (first + s * apart < end)
          copy_to_shared(slots + s * S::WORDS * 4, next + s * stride, S::WORDS * 4, barriers + 8 * s, once);
    next += S::STAGES * stride;
    more_registers<TILE_REGISTERS>();  // waits for the other warps to give them: the copies are on their way by then
    // Constants go through shared memory, to each lane its own copy: where the compiler knows that a number is the same
    // for all, it spends an instruction on every use of it.
    uint4* kept = reinterpret_cast<uint4*>(shared + S::CONSTANTS) + lane;
    if (warp == 0) kept[0] = lookup_words<KB>();
    if (warp == 1) kept[WARP] = lookup_words<VB>();
    if (warp == 2) kept[2 * WARP] = make_uint4(__float_as_uint(ROUNDING), __float_as_uint(ROUNDING_HIGH), 65536u, 0u);
    if (warp == 3)
      kept[3 * WARP] =
          make_uint4(__float_as_uint(ROUNDING + 32896.f), __float_as_uint(ROUNDING_HIGH + 32896.f), 0u, 0u);
    uint4* table = reinterpret_cast<uint4*>(shared + S::TABLE);
    if (ROTARY && !S::TABLE_IN_REGISTERS)
      for (int i = threadIdx.x; i < MEAN_TABLE_WORDS / 4; i += TILE_WARPS * WARP) table[i] = __ldg(constants.table() + i);
    if (ROTARY) bias.start(first * TILE + span.dropped);
    if (ROTARY && warp >= TILE_WARPS - 2)  // two warps that have no query to prepare, mostly
      reinterpret_cast<float2*>(shared + S::STEPS)[threadIdx.x % MEAN_PAIRS] = turned(apart * TILE, step);
    if (warp < GP) prepare(query, shared, warp, lane);
    asm volatile("bar.sync 1, %0;" ::"n"(TILE_WARPS * WARP) : "memory");  // the other warps have no part in it

    u32 q_low[NT][D / 32], q_high[NT][D / 32];  // columns of the queries: first and second 16 dimensions of a step
    float factor[NT], offset[NT], constant[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const float2 f = reinterpret_cast<const float2*>(shared + S::FACTORS)[n * 4 + c];
      factor[n] = f.x, offset[n] = f.y;
      constant[n] = reinterpret_cast<const float2*>(shared + S::MEANS)[n * 4 + c].y;
#pragma unroll
      for (int j = 0; j < D / 32; ++j) {
        const u32* p = reinterpret_cast<const u32*>(shared + S::QUERY + (n * 8 + g) * D + c * (D / 4) + j * 8);
        q_low[n][j] = p[0], q_high[n][j] = p[1];
      }
    }
    Lookup k_lookup, v_lookup;
    const uint4 rounding = kept[2 * WARP];
    {
      uint4 v = kept[0];
      k_lookup = {v.x, v.y, v.z, v.w, 0};
      if (KB != VB) v = kept[WARP];
      v_lookup = {v.x, v.y, v.z, v.w, 0};
    }
    u32* columns = reinterpret_cast<u32*>(shared + S::COLUMNS) + warp * 2 * NT * 8 * COLUMN;
    if constexpr (ROTARY) {
      bias.round_low = __uint_as_float(kept[3 * WARP].x), bias.round_high = __uint_as_float(kept[3 * WARP].y);
      bias.two_to_16 = rounding.z;
      bias.take(reinterpret_cast<const float2*>(shared + S::COEFFICIENTS),
                reinterpret_cast<const float2*>(shared + S::MEANS),
                reinterpret_cast<const float4*>(shared + S::STEPS), lane);
      bias.rotate(columns, lane);
      __syncwarp();
    }

    int acc[NT][MT][4];
    float flushed[NT][MT * 2], top[NT], total[NT], weights[NT], v_top = 1e-30f, per_weight = 0.f;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      top[n] = LOWEST, total[n] = weights[n] = 0.f;
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        acc[n][i][0] = acc[n][i][1] = acc[n][i][2] = acc[n][i][3] = 0;
        flushed[n][2 * i] = flushed[n][2 * i + 1] = 0.f;
      }
    }
    const int source = 8 * c + (g >> 1);  // the lane whose weights become this lane's column
    int stage = 0, t = first;
    u32 turn = 0;
    for (int it = 0; t < end; ++it, t += apart) {
      barrier_wait(barriers + 8 * stage, turn);
      const u32* tile = reinterpret_cast<const u32*>(ring + stage * S::WORDS * 4);
      float added[NT][4];
      if (ROTARY) bias.tile(added, columns + (it & 1) * NT * 8 * COLUMN, table, lane);

      float s[NT][4];
      {
        u32 w[D / 32 * KB];
        lane_words(tile, lane, w);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          u32 r[D / 8];
#pragma unroll
          for (int i = 0; i < D / 64; ++i) decode_group<KB>(w + (half * (D / 64) + i) * KB, r + 8 * i, k_lookup);
          int x[NT][4];
#pragma unroll
          for (int n = 0; n < NT; ++n) x[n][0] = x[n][1] = x[n][2] = x[n][3] = 0;
#pragma unroll
          for (int j = 0; j < D / 32; ++j)
#pragma unroll
            for (int n = 0; n < NT; ++n)
              mma_signed(x[n], r[2 * j], r[D / 16 + 2 * j], r[2 * j + 1], r[D / 16 + 2 * j + 1], q_low[n][j], q_high[n][j]);
#pragma unroll
          for (int n = 0; n < NT; ++n) {
            s[n][2 * half] = fmaf((float)(x[n][0] * 256 + x[n][1]), factor[n], offset[n]);
            s[n][2 * half + 1] = fmaf((float)(x[n][2] * 256 + x[n][3]), factor[n], offset[n]);
          }
        }
      }
      float k_scale[4], v_scale[4];
      read_scales(tile + S::K_WORDS + S::V_WORDS, g, k_scale);
      read_scales(tile + S::K_WORDS + S::V_WORDS + TILE / 2, g, v_scale);
#pragma unroll
      for (int n = 0; n < NT; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[n][i] = fmaf(s[n][i], k_scale[i], constant[n]);
          if (ROTARY) s[n][i] = fmaf(added[n][i], bias.factor[n], s[n][i]);
        }
      if (t * TILE < span.packed_from || t * TILE + TILE > span.packed_to) {
        __syncwarp();  // keeps this a branch, instead of predicated instructions on every tile
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int p = t * TILE + i * 8 + g;
          if (p < span.packed_from || p >= span.packed_to) {
            v_scale[i] = 0.f;
#pragma unroll
            for (int n = 0; n < NT; ++n) s[n][i] = MASKED;
          }
        }
      }

      float v_most = fmaxf(fmaxf(v_scale[0], v_scale[1]), fmaxf(v_scale[2], v_scale[3])), most[NT];
      bool exceeds = (it & (FLUSH_TILES - 1)) == FLUSH_TILES - 1 || v_most > v_top;
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        most[n] = fmaxf(fmaxf(s[n][0], s[n][1]), fmaxf(s[n][2], s[n][3]));
        exceeds |= most[n] > top[n];
      }
      if (__any_sync(ALL, exceeds)) {
        v_most = warp_most(v_most);
        const float unit = v_top * (1.f / WEIGHT_MAX);
        if (v_most > v_top) v_top = v_most * 1.25f;
        per_weight = __fdividef(WEIGHT_MAX, v_top);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
          float x = most[n];
#pragma unroll
          for (int o = 4; o < WARP; o <<= 1) x = fmaxf(x, __shfl_xor_sync(ALL, x, o));
          const float above = x > top[n] ? x + HEADROOM : top[n], fade = exp2_fast(top[n] - above);
          top[n] = above, total[n] *= fade, weights[n] *= fade;
          if (it > 0)
#pragma unroll
            for (int i = 0; i < MT; ++i) {
              int* a = acc[n][i];
              flushed[n][2 * i] = fade * fmaf(fmaf((float)a[0], 256.f, (float)a[1]), unit, flushed[n][2 * i]);
              flushed[n][2 * i + 1] = fade * fmaf(fmaf((float)a[2], 256.f, (float)a[3]), unit, flushed[n][2 * i + 1]);
              a[0] = a[1] = a[2] = a[3] = 0;
            }
        }
      }

      u32 b0[NT], b1[NT];
#pragma unroll
      for (int n = 0; n < NT; ++n) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float p = exp2_fast(s[n][i] - top[n]), w = p * v_scale[i];
          total[n] += p, weights[n] += w;
          x[i] = fmaf(w, per_weight, __uint_as_float(i & 1 ? rounding.y : rounding.x));
        }
        const u32 y = join(x[0], x[1], rounding.z), z = join(x[2], x[3], rounding.z);
        const u32 low = permute_bytes(y, z, 0x6420u), high = permute_bytes(y, z, 0x7531u);
        const u32 h0 = __shfl_sync(ALL, high, source), l0 = __shfl_sync(ALL, low, source);
        const u32 h1 = __shfl_sync(ALL, high, source + 4), l1 = __shfl_sync(ALL, low, source + 4);
        b0[n] = g & 1 ? l0 : h0, b1[n] = g & 1 ? l1 : h1;
      }
      if (ROTARY) bias.rotate(columns + ((it + 1) & 1) * NT * 8 * COLUMN, lane);
      {
        u32 w[D / 32 * VB];
        lane_words(tile + S::K_WORDS, lane, w);
#pragma unroll
        for (int j = 0; j < D / 32; ++j) {
          u32 r[8];
          decode_group<VB>(w + j * VB, r, v_lookup);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_unsigned(acc[n][2 * j], r[0], r[2], r[1], r[3], b0[n], b1[n]);
#pragma unroll
          for (int n = 0; n < NT; ++n) mma_unsigned(acc[n][2 * j + 1], r[4], r[6], r[5], r[7], b0[n], b1[n]);
        }
      }
      __syncwarp();
      if (copies && t + S::STAGES * apart < end)
        copy_to_shared(slots + stage * S::WORDS * 4, next, S::WORDS * 4, barriers + 8 * stage, once);
      next += stride;
      if (++stage == S::STAGES) stage = 0, turn ^= 1;
    }

    if (first >= end && ahead_of_span) barrier_wait(barriers, 0);  // outputs take its place
    float* to = outputs(shared, warp);
    const float unit = v_top * (1.f / WEIGHT_MAX), half = VB == 8 ? 0.f : .5f;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      float sum = total[n], missing = weights[n];
#pragma unroll
      for (int o = 4; o < WARP; o <<= 1) {
        sum += __shfl_xor_sync(ALL, sum, o);
        missing += __shfl_xor_sync(ALL, missing, o);
      }
#pragma unroll
      for (int i = 0; i < MT; ++i) {
        const int* a = acc[n][i];
        float* at_head = to + (n * 4 + c) * S::ROW + i * 16 + g;
        at_head[0] = v_step * (fmaf(fmaf((float)a[0], 256.f, (float)a[1]), unit, flushed[n][2 * i]) + half * missing);
        at_head[8] = v_step * (fmaf(fmaf((float)a[2], 256.f, (float)a[3]), unit, flushed[n][2 * i + 1]) + half * missing);
      }
      if (g == 0) part(shared, warp)[n * 4 + c] = make_float2(top[n], sum);
    }
  }

  static __device__ __forceinline__ void read_scales(const u32* words, int g, float (&scale)[4]) {
    const uint2 w = reinterpret_cast<const uint2*>(words)[g];
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&w.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&w.y));
    scale[0] = a.x, scale[1] = a.y, scale[2] = b.x, scale[3] = b.y;
  }

  // One head's share of the plain tokens; their outputs are rotated once, into the stored basis.
  __device__ __forceinline__ void attend_plain(const Block& at, unsigned char* shared, int h, int lane) const {
    const Span span = span_of(spans, at.row);
    const T* query = queries.at(at.row, at.kv * G + h, 0);
    float q[R];
#pragma unroll
    for (int i = 0; i < R; ++i) q[i] = to_float(query[(R * lane + i) * queries.dim]) * scale * LOG2E;
    Merged<D> all = plain.attend(span, at.row, at.kv, at.split, at.splits, q, h == 0, lane);
    if (lane == 0) part(shared, TILE_WARPS)[h] = make_float2(all.top, all.total);
    if (all.total == 0.f) return;
    const Numbers<R> signs = reinterpret_cast<const Numbers<R>*>(v_signs)[lane];
#pragma unroll
    for (int i = 0; i < R; ++i) all.x.at[i] *= signs.at[i] * rsqrtf((float)D);
    hadamard<R>(all.x.at, lane);
    reinterpret_cast<Numbers<R>*>(outputs(shared, TILE_WARPS) + h * S::ROW)[lane] = all.x;
  }

  // All of a head: its parts in this block and, if this warp is the last one of its head, the other splits.
  __device__ __forceinline__ void conclude(const Block& at, unsigned char* shared, int h, int lane) const {
    const Numbers<R> signs = reinterpret_cast<const Numbers<R>*>(v_signs)[lane];  // needed last
    Merged<D> all = merge_parts(shared, h, lane);
    if (at.splits > 1) {
      const Meeting<D> meeting{sums, extremes, counters};
      if (!meeting.put_and_is_last(all, head_of(at, h), at.split, at.splits, lane)) return;
      all = meeting.all(head_of(at, h), at.splits, lane);
    }
    finish(all, signs, at, h, lane);
  }

  static __device__ __forceinline__ Merged<D> merge_parts(unsigned char* shared, int h, int lane) {
    float2 of[PARTS];
    float above = LOWEST;
#pragma unroll
    for (int w = 0; w < PARTS; ++w) of[w] = part(shared, w)[h], above = fmaxf(above, of[w].x);
    Merged<D> all;
    all.top = above;
#pragma unroll
    for (int w = 0; w < PARTS; ++w) {
      if (w == TILE_WARPS && of[w].y == 0.f) break;  // no plain token: nobody has written outputs of any
      const float factor = exp2_fast(of[w].x - above);
      all.total += factor * of[w].y;
      all.add(factor, reinterpret_cast<const Numbers<R>*>(outputs(shared, w) + h * S::ROW)[lane]);
    }
    return all;
  }

  // Takes the learned sink in; then out of the stored basis, and into the caller's dtype.
  __device__ __forceinline__ void finish(Merged<D>& all, const Numbers<R>& signs, const Block& at, int h,
                                         int lane) const {
    if (logits) all.total += all.raise(to_float(logits[at.kv * G + h]) * LOG2E);
    const float factor = __fdividef(rsqrtf((float)D), all.total);
    hadamard<R>(all.x.at, lane);
    Numbers<R, T> y;
#pragma unroll
    for (int i = 0; i < R; ++i) put(y.at + i, all.x.at[i] * signs.at[i] * factor);
    reinterpret_cast<Numbers<R, T>*>(out + head_of(at, h) * D)[lane] = y;
  }
};

}  // namespace tqd
