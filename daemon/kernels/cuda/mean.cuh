// What the key mean adds to the scores of a tile, without reading memory: with A and B the coefficients of a query
// (daemon/kernels/keys.py) and θ the angles per token,
//
//     bias(p) = Σ_j A_j·cos(p·θ_j) + B_j·sin(p·θ_j).
//
// Take a tile's middle as the origin: its tokens are at ±(i + ½), i = 0..15. Rotate A and B by the phase of the middle;
// then E_i = Σ A'_j·cos((i+½)θ_j) and O_i = Σ B'_j·sin((i+½)θ_j) give both tokens, E ± O. E and O are products of one
// constant table (16×64 cosines, 16×64 sines, 16 bits each) with the rotated coefficients, on the tensor cores.
//
// A warp's tiles are a fixed stride apart, so its phases advance by one constant rotation. Everything is in integers of
// 16 bits, split into two bytes: cosines signed, coefficients offset by 128, which the table's row sums take back.
#pragma once

namespace tqd {

constexpr int MEAN_PAIRS = 64;
constexpr float COEFFICIENT_MAX = 32512.f;  // a rotation keeps |A'| and |B'| below it, and both its bytes signed
constexpr int COLUMN = 36;                  // words of a column of coefficients in shared memory; not 32: banks
constexpr int MEAN_TABLE_WORDS = 1024;

// Constants of one rotary embedding, as daemon/kernels/cuda/angles.py lays them out:
// table | 32 row corrections | 64 angles in 2^-64 turns per half token, (low, high).
struct MeanConstants {
  const u32* words;

  __device__ __forceinline__ const uint4* table() const { return reinterpret_cast<const uint4*>(words); }
  __device__ __forceinline__ const int* corrections() const { return reinterpret_cast<const int*>(words + 1024); }
  __device__ __forceinline__ const uint4* angles() const { return reinterpret_cast<const uint4*>(words + 1056); }
  __device__ __forceinline__ uint2 angle(int pair) const {
    return __ldg(reinterpret_cast<const uint2*>(words + 1056) + pair);
  }
};

// The top 32 bits of n·angle: the phase as a fraction of a turn, exact for any position.
__device__ __forceinline__ u32 phase(int n, u32 low, u32 high) {
  return __umulhi((u32)n, low) + (u32)n * high - ((u32)(n >> 31) & low);
}

// (cos, sin) of the phase `tokens` further; accurate to the last bits of a float.
__device__ __forceinline__ float2 turned(int tokens, uint2 angle) {
  const int turn = (int)phase(2 * tokens, angle.x, angle.y);
  const float halves = (float)turn, rest = (float)(turn - (int)halves) * 1.4629180792671596e-9f;  // 2^-31 · π
  float sine, cosine;
  sincospif(halves * 4.656612873077393e-10f, &sine, &cosine);  // 2^-31
  return make_float2(fmaf(-sine, rest, cosine), fmaf(cosine, rest, sine));
}

// NT: tiles of 4 query heads. Lane 16·h + u holds pairs 4u..4u+3 of the heads 2h and 2h + 1 of each.
template <int NT, bool IN_REGISTERS>
struct MeanBias {
  float a[NT][2][4], b[NT][2][4], cosine[4], sine[4], step_cosine[4], step_sine[4], factor[NT];
  float round_low, round_high;
  u32 two_to_16, angle_low[4], angle_high[4];
  int correction[4];
  uint4 table[IN_REGISTERS ? 8 : 1];

  // Everything that comes from memory; asked for before the tiles, so that it does not wait behind them.
  __device__ __forceinline__ void load(const MeanConstants& from, int lane) {
    const int u = lane & 15, g = lane >> 2;
    const uint4 f0 = __ldg(from.angles() + 2 * u), f1 = __ldg(from.angles() + 2 * u + 1);
    angle_low[0] = f0.x, angle_high[0] = f0.y, angle_low[1] = f0.z, angle_high[1] = f0.w;
    angle_low[2] = f1.x, angle_high[2] = f1.y, angle_low[3] = f1.z, angle_high[3] = f1.w;
#pragma unroll
    for (int i = 0; i < 4; ++i) correction[i] = __ldg(from.corrections() + 8 * i + g);
    if (IN_REGISTERS)
#pragma unroll
      for (int i = 0; i < 8; ++i) table[IN_REGISTERS ? i : 0] = __ldg(from.table() + i * WARP + lane);
  }

  // The phases of the tile that begins at `position`.
  __device__ __forceinline__ void start(int position) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = (float)(int)phase(2 * position + 31, angle_low[e], angle_high[e]) * 1.4629180792671596e-9f;
      asm("sin.approx.ftz.f32 %0,%1;" : "=f"(sine[e]) : "f"(x));
      asm("cos.approx.ftz.f32 %0,%1;" : "=f"(cosine[e]) : "f"(x));
    }
  }

  // Coefficients of all heads, scaled to COEFFICIENT_MAX, [head][64] of (A, B); what a unit of them is worth; and the
  // (cos, sin) by which phases turn from one tile of the warp to the next.
  __device__ __forceinline__ void take(const float2* coefficients, const float2* worth, const float4* steps, int lane) {
    const int u = lane & 15, h = lane >> 4, c = lane & 3;
    const float4 s0 = steps[2 * u], s1 = steps[2 * u + 1];
    step_cosine[0] = s0.x, step_sine[0] = s0.y, step_cosine[1] = s0.z, step_sine[1] = s0.w;
    step_cosine[2] = s1.x, step_sine[2] = s1.y, step_cosine[3] = s1.z, step_sine[3] = s1.w;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
      for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float2 v = coefficients[(n * 4 + h * 2 + k) * MEAN_PAIRS + u * 4 + e];
          a[n][k][e] = v.x, b[n][k][e] = v.y;
        }
      factor[n] = worth[n * 4 + c].x;
    }
  }

  // Rotated coefficients of the current tile into `columns`, and the phases on to the warp's next one.
  __device__ __forceinline__ void rotate(u32* columns, int lane) {
    const int u = lane & 15, h = lane >> 4;
#pragma unroll
    for (int n = 0; n < NT; ++n)
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        float x[4], y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float r = e & 1 ? round_high : round_low;
          x[e] = fmaf(a[n][k][e], cosine[e], fmaf(b[n][k][e], sine[e], r));
          y[e] = fmaf(b[n][k][e], cosine[e], fmaf(-a[n][k][e], sine[e], r));
        }
        u32* to = columns + (n * 8 + (h * 2 + k) * 2) * COLUMN + (u >> 1) * 4 + (u & 1);
        u32 p = join(x[0], x[1], two_to_16), q = join(x[2], x[3], two_to_16);
        to[0] = permute_bytes(p, q, 0x7531u), to[COLUMN] = permute_bytes(p, q, 0x6420u);
        p = join(y[0], y[1], two_to_16), q = join(y[2], y[3], two_to_16);
        to[2] = permute_bytes(p, q, 0x7531u), to[COLUMN + 2] = permute_bytes(p, q, 0x6420u);
      }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float x = cosine[e];
      cosine[e] = fmaf(x, step_cosine[e], -sine[e] * step_sine[e]);
      sine[e] = fmaf(sine[e], step_cosine[e], x * step_sine[e]);
    }
  }

  // The biases of a tile in units of `factor`: [head tile][i] is token 8·i + g of head c, lane 4g + c.
  __device__ __forceinline__ void tile(float (&bias)[NT][4], const u32* columns, const uint4* shared_table, int lane) {
    const int g = lane >> 2, c = lane & 3;
    auto rows = [&](int i) { return IN_REGISTERS ? table[IN_REGISTERS ? i : 0] : shared_table[i * WARP + lane]; };
#pragma unroll
    for (int n = 0; n < NT; ++n) {
      const uint4* column = reinterpret_cast<const uint4*>(columns + (n * 8 + g) * COLUMN + c * 8);
      const uint4 w0 = column[0], w1 = column[1];
      int even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
      uint4 t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // the table's high bytes, then its low ones
        t = rows(2 * half), mma_unsigned(even, t.x, t.y, t.z, t.w, w0.x, w0.y);
        t = rows(4 + 2 * half), mma_unsigned(odd, t.x, t.y, t.z, t.w, w0.z, w0.w);
        t = rows(1 + 2 * half), mma_unsigned(even, t.x, t.y, t.z, t.w, w1.x, w1.y);
        t = rows(5 + 2 * half), mma_unsigned(odd, t.x, t.y, t.z, t.w, w1.z, w1.w);
        if (half == 0)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            even[i] = even[i] * 256 + correction[i >> 1], odd[i] = odd[i] * 256 + correction[2 + (i >> 1)];
      }
      const int e0 = even[0] + (even[1] >> 8), o0 = odd[0] + (odd[1] >> 8);
      const int e1 = even[2] + (even[3] >> 8), o1 = odd[2] + (odd[3] >> 8);
      bias[n][2] = (float)(e0 + o0), bias[n][3] = (float)(e1 + o1);
      bias[n][1] = __shfl_xor_sync(ALL, (float)(e0 - o0), 28);  // the mirrored half
      bias[n][0] = __shfl_xor_sync(ALL, (float)(e1 - o1), 28);
    }
  }
};

}  // namespace tqd
