// Codes of 3 bits that form a trellis: what daemon/kernels/trellis.py does.

// The level of a code, in steps, after the codes that the low five bits of state stand for: two bits of one, three of the next.
METAL_FUNC float trellis_level(uint code, uint state) {
  int q = 8 * code + ((13 * state + 16) & 31u);
  int distance = q < 44 ? 43 - q : q - 44;
  float magnitude = float(2 * distance + max(distance, 13) + max(distance, 32) - 45) + 0.5f;
  return q < 44 ? -magnitude : magnitude;
}

// Viterbi's algorithm over the values of a vector from begin on, each in the lane of its number: a lane is a state, and
// way holds the state before it at each step. Returns the cost of a lane's state, in the low bits the state itself.
template <int DIM>
METAL_FUNC int trellis_way(
    const thread float* u, float unit, int begin, int steps, int cost, thread uchar* way, int lane) {
  for (int step = 0; step < steps; step++) {
    const int d = (begin + step + DIM) % DIM;
    float value = simd_shuffle(u[d / 32], ushort(d % 32));
    value = isnan(value) ? 0 : clamp(value, -8.0f, 8.0f);
    int least = 0x7fffffff;
    for (int m = 0; m < 8; m++) {
      const int before = 4 * m + lane / 8;  // this state knows the low two bits of the code there
      const float away = value - trellis_level(lane % 8, before) * unit;
      least = min(least, simd_shuffle(cost, ushort(before)) + (int(away * away * 1048576.0f) & ~31));
    }
    way[step] = uchar(least & 31);
    cost = (least & ~31) | lane;
  }
  return cost;
}

// The codes of the vector u; returns a lane's share of the product of u with their levels.
template <int DIM>
METAL_FUNC float encode_trellis(const thread float* u, float unit, threadgroup uchar* codes, int lane) {
  constexpr int NEAR = 16;
  uchar way[DIM > 2 * NEAR ? DIM : 2 * NEAR];
  uint state = uint(simd_min(trellis_way<DIM>(u, unit, -NEAR, 2 * NEAR, lane, way, lane))) & 31;
  for (int step = 2 * NEAR - 1; step >= NEAR; step--) {
    state = simd_shuffle(uint(way[step]), ushort(state));
  }
  trellis_way<DIM>(u, unit, 0, DIM, (lane == int(state) ? 0 : 1 << 30) | lane, way, lane);
  float along = 0;
  for (int d = DIM - 1; d >= 0; d--) {
    const uint before = simd_shuffle(uint(way[d]), ushort(state));
    if (d % 32 == lane) {
      codes[d] = uchar(state & 7);
      along += u[d / 32] * trellis_level(state & 7, before) * unit;
    }
    state = before;
  }
  return along;
}
