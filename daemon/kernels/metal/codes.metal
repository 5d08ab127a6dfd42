// Reading stored vectors 16 values at a time, whether packed (docs/adr/0005-tile-layout.md) or in full precision.

// One code of 3 bits.
METAL_FUNC uint code_of_3_bits(const device uint* words, uint at) {
  const device uint* group = words + at / 32 * 3;
  uint low = group[at / 16 % 2] >> (2 * (at % 16));
  return (low & 3u) | (((group[2] >> (at % 32)) & 1u) << 2);
}

// Values of codes first … first + 15 of a side's code words; first is a multiple of 16. HALF_BITS is twice the width
// of a code: 16 are the bytes of int8, the others index the centroids in table. TRELLIS: the values of a vector whose
// codes form a trellis, with its step in table; 0: they do not.
template <int HALF_BITS, int TRELLIS>
METAL_FUNC void read_packed(
    const device uint* words, uint first, const threadgroup float* table, thread float* values) {
  if (HALF_BITS == 16) {
    const device uint4* packed = (const device uint4*)(words + first / 4);
    for (uint i = 0; i < 16; i++) {
      values[i] = float(int(packed[0][i / 4] << (24 - 8 * (i % 4))) >> 24);
    }
    return;
  }
  if (HALF_BITS == 7) {  // two codes below 11 in the 7 bits of one number: planes of 4, 2 and 1 bits of it
    const device uint* group = words + first / 64 * 7;
    uint quarter = first / 16 % 4;
    uint four = group[quarter];
    uint two = group[4 + quarter / 2] >> (16 * (quarter % 2));
    uint one = group[6] >> (8 * quarter);
    for (uint i = 0; i < 8; i++) {
      uint pair = ((four >> (4 * i)) & 15u) | (((two >> (2 * i)) & 3u) << 4) | (((one >> i) & 1u) << 6);
      uint second = (pair * 187u) >> 11;  // pair / 11
      values[2 * i] = table[pair - 11u * second];
      values[2 * i + 1] = table[second];
    }
    return;
  }
  // one plane for each power of two in the width, the largest first: it has the low bits of a code
  const device uint* group = words + first / 32 * (HALF_BITS / 2);
  uint half_group = first / 16 % 2;
  uint planes[4] = {0, 0, 0, 0};
  if (HALF_BITS & 8) {
    planes[0] = group[2 * half_group];
    planes[1] = group[2 * half_group + 1];
    group += 4;
  }
  if (HALF_BITS & 4) {
    planes[2] = group[half_group];
    group += 2;
  }
  if (HALF_BITS & 2) {
    planes[3] = group[0] >> (16 * half_group);
  }
  uint state = 0;
  if (TRELLIS) {  // before a vector's first code comes its last one
    uint before = first % TRELLIS ? first - 1 : first + TRELLIS - 1;
    state = 8 * code_of_3_bits(words, before - 1) + code_of_3_bits(words, before);
  }
  for (uint i = 0; i < 16; i++) {
    uint code = 0;
    uint shift = 0;
    if (HALF_BITS & 8) {
      code = (planes[i / 8] >> (4 * (i % 8))) & 15u;
      shift = 4;
    }
    if (HALF_BITS & 4) {
      code |= ((planes[2] >> (2 * i)) & 3u) << shift;
      shift += 2;
    }
    if (HALF_BITS & 2) {
      code |= ((planes[3] >> i) & 1u) << shift;
    }
    if (TRELLIS) {
      values[i] = trellis_level(code, state) * table[0];
      state = 8 * state + code;
    } else {
      values[i] = table[code];
    }
  }
}

// The scale of a slot: fp16, in token order.
METAL_FUNC float read_scale(const device uint* words, uint slot) {
  return float(((const device half*)words)[slot]);
}

// 16 values in full precision, stride elements apart.
template <typename T>
METAL_FUNC void read_plain(const device T* row, int64_t stride, thread float* values) {
  if (stride == 1) {
    const device vec<T, 4>* quads = (const device vec<T, 4>*)row;
    for (uint i = 0; i < 4; i++) {
      vec<T, 4> quad = quads[i];
      for (uint j = 0; j < 4; j++) {
        values[4 * i + j] = float(quad[j]);
      }
    }
  } else {
    for (uint i = 0; i < 16; i++) {
      values[i] = float(row[i * stride]);
    }
  }
}
