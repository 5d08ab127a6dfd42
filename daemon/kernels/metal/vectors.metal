// Encoding rotated vectors as daemon/kernels/codec.py does, and packing their codes as packing.py does.

// Comparisons, because max and min would lose NaN.
METAL_FUNC float at_least(float x, float low) { return x < low ? low : x; }
METAL_FUNC half to_half(float x) { return half(x > 65504.0f ? 65504.0f : x); }

// The code of the nearest centroid: thresholds lie between those that are not negative.
METAL_FUNC int nearest(float u, int levels, const device float* thresholds) {
  int code = levels / 2;
  for (int i = 0; i < (levels - 1) / 2; i++) {
    code += abs(u) > thresholds[i] ? 1 : 0;
  }
  return u < 0 ? levels - 1 - code : code;
}

// Codes and scales of the 32 slots whose first one takes vector begin; slots without a vector get zeros.
// Codes are nearest to a vector of length √DIM times the stretch that leaves the smallest angle, or form a TRELLIS.
template <int DIM, int HALF_BITS, bool TRELLIS, int STRETCHES>
METAL_FUNC void encode(
    const device float* vectors, int begin, int count, const device float* thresholds,
    const device float* centroids, const device float* stretches, threadgroup uchar* codes, threadgroup half* scales, int thread_index) {
  constexpr int SHARE = (DIM + 31) / 32;  // values of a lane
  constexpr int LEVELS = HALF_BITS == 7 ? 11 : 1 << (HALF_BITS / 2);
  constexpr float tiny = 1e-30f;
  const int lane = thread_index % 32;
  for (int slot = thread_index / 32; slot < 32; slot += 8) {
    const int token = begin + slot;
    const bool there = token >= 0 && token < count;
    float z[SHARE];
    float squares = 0;
    float largest = 0;
    bool broken = false;
    for (int i = 0; i < SHARE; i++) {
      int d = lane + 32 * i;
      z[i] = there && d < DIM ? vectors[token * DIM + d] : 0;
      squares += z[i] * z[i];
      largest = max(largest, abs(z[i]));
      broken = broken || isnan(z[i]);
    }
    half scale;
    if (HALF_BITS == 16) {
      largest = simd_max(largest);
      scale = to_half((simd_any(broken) ? NAN : largest) / 127.0f);
      float divisor = float(scale) == 0 ? 1 : float(scale);
      for (int i = 0; i < SHARE; i++) {
        int d = lane + 32 * i;
        float code = rint(z[i] / divisor);
        int whole = isnan(code) ? 0 : int(clamp(code, -127.0f, 127.0f));
        if (d < DIM) {
          codes[slot * DIM + d] = uchar(whole & 255);
        }
      }
    } else {
      const float norm = precise::sqrt(simd_sum(squares));
      const float factor = precise::sqrt(float(DIM)) / at_least(norm, tiny);
      float overlap = 0;
      float closest = -1;
      if (TRELLIS) {
        for (int i = 0; i < SHARE; i++) {
          z[i] *= factor;
          if (lane + 32 * i < DIM && !there) {
            codes[slot * DIM + lane + 32 * i] = 0;
          }
        }
        if (there) {
          overlap = simd_sum(encode_trellis<DIM>(z, centroids[0], codes + slot * DIM, lane));
        }
      }
      for (int n = 0; n < (TRELLIS ? 0 : STRETCHES); n++) {
        int candidate[SHARE];
        float along = 0;
        float size = 0;
        for (int i = 0; i < SHARE; i++) {
          candidate[i] = there ? nearest(z[i] * factor * stretches[n], LEVELS, thresholds) : 0;
          float c = lane + 32 * i < DIM ? centroids[candidate[i]] : 0;
          along += z[i] * factor * c;
          size += c * c;
        }
        along = simd_sum(along);
        size = simd_sum(size);
        float cosine = along * along / at_least(size, tiny);
        if (n > 0 && !(cosine > closest)) {
          continue;
        }
        closest = cosine;
        overlap = along;
        for (int i = 0; i < SHARE; i++) {
          int d = lane + 32 * i;
          if (d < DIM) {
            codes[slot * DIM + d] = uchar(candidate[i]);
          }
        }
      }
      scale = norm > tiny ? to_half(precise::sqrt(float(DIM)) * norm / at_least(overlap, tiny)) : half(0);
    }
    if (lane == 0) {
      scales[slot] = scale;
    }
  }
}

// Words of 32 · DIM codes; what belongs to the first kept tokens comes from the words at from.
template <int DIM, int HALF_BITS>
METAL_FUNC void pack(
    const threadgroup uchar* codes, const device uint* from, int kept, device uint* to, int thread_index) {
  constexpr bool PAIRS = HALF_BITS == 7;  // two codes below 11 are one number
  constexpr int BITS = PAIRS ? 7 : HALF_BITS / 2;  // of a number, and words of a group of 32
  const int kept_numbers = kept * DIM / (PAIRS ? 2 : 1);
  for (int word = thread_index; word < HALF_BITS * DIM / 2; word += 256) {
    int at = word % BITS;
    int shift = 0;
    int width = BITS == 8 ? 8 : 4;
    while ((BITS & width) == 0 || at >= width) {  // find the plane that the word is in
      if (BITS & width) {
        at -= width;
        shift += width;
      }
      width /= 2;
    }
    const int first_number = word / BITS * 32 + at * (32 / width);
    const uint field = (1u << width) - 1;
    uint packed = 0;
    uint old = 0;
    for (int i = 0; i < 32 / width; i++) {
      int number = first_number + i;
      if (number < kept_numbers) {
        old |= field << (i * width);
      } else {
        uint value = PAIRS ? codes[2 * number] + 11u * codes[2 * number + 1] : codes[number];
        packed |= ((value >> shift) & field) << (i * width);
      }
    }
    to[word] = old ? packed | (from[word] & old) : packed;
  }
}

METAL_FUNC void pack_scales(
    const threadgroup half* scales, const device uint* from, int kept, device uint* to, int thread_index) {
  if (thread_index < 16) {
    uint packed = 0;
    for (int i = 0; i < 2; i++) {
      int slot = 2 * thread_index + i;
      uint bits = slot < kept ? from[thread_index] >> (16 * i) & 0xffffu : uint(as_type<ushort>(scales[slot]));
      packed |= bits << (16 * i);
    }
    to[thread_index] = packed;
  }
}
