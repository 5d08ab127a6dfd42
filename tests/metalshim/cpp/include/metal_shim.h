// The Metal Shading Language as C++ for Linux: types, math, SIMD-group functions, barriers.
// Only what tqd's kernels and MLX's utils.h use; anything else is a compile error, which keeps kernels to a list
// of functions that are known to exist on Apple's compiler. Every GPU thread is a fiber: see runtime.cpp.
#pragma once
#include <type_traits>

#include "../abi.h"

#define MSL_UNCHECKED __attribute__((no_sanitize("thread", "undefined")))
#define MSL_INLINE inline __attribute__((always_inline))
#define METAL_FUNC MSL_INLINE
#define __METAL__ 1
#define __METAL_VERSION__ 310
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define FLT_MAX __FLT_MAX__
#define M_LOG2E_F 1.44269504f

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef _Float16 half;

// As strict as Apple's: a float becomes a bfloat only by a written conversion.
struct bfloat {
  uint16_t bits;
  bfloat() = default;
  template <class U, std::enable_if_t<std::is_integral_v<U>, int> = 0>
  constexpr bfloat(U v) : bfloat((float)v) {}
  explicit constexpr bfloat(half h) : bfloat((float)h) {}
  explicit constexpr bfloat(float f) : bits(0) {
    uint32_t u = __builtin_bit_cast(uint32_t, f);
    bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? (uint16_t)((u >> 16) | 0x40) : (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  constexpr operator float() const { return __builtin_bit_cast(float, (uint32_t)bits << 16); }
  static constexpr bfloat of(uint16_t bits) {
    bfloat r(0.0f);
    r.bits = bits;
    return r;
  }
};
constexpr bfloat operator-(bfloat a) { return bfloat(-(float)a); }
#define MSL_BFLOAT(op)                                                                      \
  constexpr bfloat operator op(bfloat a, bfloat b) { return bfloat((float)a op(float) b); } \
  constexpr float operator op(bfloat a, float b) { return (float)a op b; }                  \
  constexpr float operator op(float a, bfloat b) { return a op(float) b; }
MSL_BFLOAT(+)
MSL_BFLOAT(-)
MSL_BFLOAT(*) MSL_BFLOAT(/)

    namespace metal {
  using ::bfloat;
  using std::bool_constant;
  using std::conditional_t;
  using std::enable_if_t;
  using std::is_floating_point_v;
  using std::is_integral_v;
  using std::is_same_v;
  using std::make_unsigned_t;

  template <class T>
  constexpr bool msl_number = std::is_arithmetic_v<T> || is_same_v<T, half> || is_same_v<T, bfloat>;

  // ---- vectors, without swizzles of more than one component
  template <class T, int N>
  struct vec;
#define MSL_VECTOR(N, STORED, FIELDS)                             \
  union {                                                         \
    T e[STORED];                                                  \
    struct {                                                      \
      FIELDS                                                      \
    };                                                            \
  };                                                              \
  vec() = default;                                                \
  constexpr vec(const vec& o) : e{} {                             \
    for (int i = 0; i < N; i++) e[i] = o.e[i];                    \
  }                                                               \
  vec& operator=(const vec& o) {                                  \
    for (int i = 0; i < N; i++) e[i] = o.e[i];                    \
    return *this;                                                 \
  }                                                               \
  template <class S, std::enable_if_t<msl_number<S>, int> = 0>    \
  constexpr vec(S s) : e{} {                                      \
    for (int i = 0; i < N; i++) e[i] = (T)s;                      \
  }                                                               \
  template <class S, std::enable_if_t<!is_same_v<S, T>, int> = 0> \
  explicit constexpr vec(const vec<S, N>& o) : e{} {              \
    for (int i = 0; i < N; i++) e[i] = (T)o.e[i];                 \
  }                                                               \
  T& operator[](size_t i) { return e[i]; }                        \
  constexpr const T& operator[](size_t i) const { return e[i]; }
  template <class T>
  struct alignas(2 * sizeof(T)) vec<T, 2> {
    MSL_VECTOR(2, 2, T x; T y;)
    constexpr vec(T a, T b) : e{a, b} {}
  };
  template <class T>
  struct alignas(4 * sizeof(T)) vec<T, 3> {
    MSL_VECTOR(3, 4, T x; T y; T z;)
    constexpr vec(T a, T b, T c) : e{a, b, c} {}
  };
  template <class T>
  struct alignas(4 * sizeof(T)) vec<T, 4> {
    MSL_VECTOR(4, 4, T x; T y; T z; T w;)
    constexpr vec(T a, T b, T c, T d) : e{a, b, c, d} {}
  };
#define MSL_VECTOR_OPERATOR(op)                                           \
  template <class T, int N>                                               \
  MSL_INLINE vec<T, N> operator op(vec<T, N> a, const vec<T, N>& b) {     \
    for (int i = 0; i < N; i++) a[i] = (T)(a[i] op b[i]);                 \
    return a;                                                             \
  }                                                                       \
  template <class T, int N, class S, enable_if_t<msl_number<S>, int> = 0> \
  MSL_INLINE vec<T, N> operator op(vec<T, N> a, S b) {                    \
    return a op vec<T, N>(b);                                             \
  }                                                                       \
  template <class T, int N, class S>                                      \
  MSL_INLINE vec<T, N>& operator op##=(vec<T, N>& a, const S & b) {       \
    return a = a op b;                                                    \
  }
  MSL_VECTOR_OPERATOR(+)
  MSL_VECTOR_OPERATOR(-)
  MSL_VECTOR_OPERATOR(*)
#define MSL_VECTORS(t)    \
  typedef vec<t, 2> t##2; \
  typedef vec<t, 3> t##3; \
  typedef vec<t, 4> t##4;
      MSL_VECTORS(float) MSL_VECTORS(half) MSL_VECTORS(bfloat) MSL_VECTORS(int) MSL_VECTORS(uint) MSL_VECTORS(ushort)
          MSL_VECTORS(uchar) MSL_VECTORS(char) template <class T, class U>
          MSL_INLINE constexpr T as_type(U u) {
    static_assert(sizeof(T) == sizeof(U), "as_type between sizes");
    if constexpr (is_same_v<T, U>) {
      return u;
    } else {
      T r;
      __builtin_memcpy(&r, &u, sizeof r);
      return r;
    }
  }

  // ---- limits
  template <class T>
  struct numeric_limits {
    static constexpr T max() {
      typedef make_unsigned_t<T> U;
      return std::is_signed_v<T> ? (T)((U) ~(U)0 >> 1) : (T) ~(T)0;
    }
    static constexpr T min() { return std::is_signed_v<T> ? (T)(-max() - 1) : (T)0; }
  };
#define MSL_FLOAT_LIMITS(t, MAX, INF, QUIET)         \
  template <>                                        \
  struct numeric_limits<t> {                         \
    static constexpr t max() { return MAX; }         \
    static constexpr t infinity() { return INF; }    \
    static constexpr t quiet_NaN() { return QUIET; } \
  };
  MSL_FLOAT_LIMITS(float, __FLT_MAX__, INFINITY, NAN)
  MSL_FLOAT_LIMITS(half, (half)65504.f, (half)INFINITY, (half)NAN)
  MSL_FLOAT_LIMITS(bfloat, bfloat::of(0x7f7f), bfloat::of(0x7f80), bfloat::of(0x7fc0))

// ---- math: half and bfloat arguments are computed in float
#define MSL_UNARY(name, expression)                     \
  MSL_INLINE float name(float x) { return expression; } \
  MSL_INLINE half name(half h) {                        \
    float x = h;                                        \
    return (half)(expression);                          \
  }
#define MSL_FUNCTIONS                                                         \
  MSL_UNARY(exp, MSL_ROUNDED(__builtin_expf(x)))                              \
  MSL_UNARY(exp2, MSL_ROUNDED(__builtin_exp2f(x)))                            \
  MSL_UNARY(log, MSL_ROUNDED(__builtin_logf(x)))                              \
  MSL_UNARY(sqrt, MSL_ROUNDED(__builtin_sqrtf(x)))                            \
  MSL_UNARY(cos, MSL_ROUNDED(__builtin_cosf(x)))                              \
  MSL_UNARY(sin, MSL_ROUNDED(__builtin_sinf(x)))                              \
  MSL_UNARY(floor, __builtin_floorf(x))                                       \
  MSL_UNARY(rint, __builtin_rintf(x))                                         \
  MSL_UNARY(fabs, __builtin_fabsf(x))                                         \
  MSL_INLINE float divide(float a, float b) { return a / b; }                 \
  MSL_INLINE float atan2(float a, float b) { return __builtin_atan2f(a, b); } \
  MSL_INLINE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#define MSL_ROUNDED(value) value
  MSL_FUNCTIONS
// No templates here: min(int, uint) must be ambiguous, as it is for Apple's compiler.
#define MSL_INTEGERS(t)                                          \
  MSL_INLINE constexpr t min(t a, t b) { return b < a ? b : a; } \
  MSL_INLINE constexpr t max(t a, t b) { return a < b ? b : a; } \
  MSL_INLINE constexpr t clamp(t x, t low, t high) { return min(max(x, low), high); }
  MSL_INTEGERS(short)
  MSL_INTEGERS(ushort)
  MSL_INTEGERS(int) MSL_INTEGERS(uint) MSL_INTEGERS(long) MSL_INTEGERS(ulong)
#define MSL_FLOATS(t)                                                       \
  MSL_INLINE bool isnan(t a) { return __builtin_isnan((float)a); }          \
  MSL_INLINE bool isinf(t a) { return __builtin_isinf((float)a); }          \
  MSL_INLINE t min(t a, t b) { return isnan(a) ? b : b < a ? b : a; }       \
  MSL_INLINE t max(t a, t b) { return isnan(a) ? b : a < b ? b : a; }       \
  MSL_INLINE t fmin(t a, t b) { return min(a, b); }                         \
  MSL_INLINE t fmax(t a, t b) { return max(a, b); }                         \
  MSL_INLINE t clamp(t x, t low, t high) { return min(max(x, low), high); } \
  MSL_INLINE t abs(t a) { return (t)__builtin_fabsf((float)a); }
      MSL_FLOATS(float) MSL_FLOATS(half) template <class T>
      MSL_INLINE constexpr T select(T a, T b, bool c) {
    return c ? b : a;
  }
  template <class T>
  MSL_INLINE T extract_bits(T v, uint offset, uint bits) {
    if (offset + bits > 8 * sizeof(T)) msl_fail(0, "extract_bits: offset %u + bits %u too large", offset, bits);
    uint rest = 8 * sizeof(T) - bits;
    return bits == 0 ? 0 : (T)((T)((make_unsigned_t<T>)v << (rest - offset)) >> rest);
  }
  namespace precise {
  MSL_FUNCTIONS
  }
  namespace fast {
#ifdef MSL_ROUGH  // off by up to 4 units in the last place; which ones is not known of Apple's
#undef MSL_ROUNDED
#define MSL_ROUNDED(value) msl_roughly(value)
  MSL_UNCHECKED inline float msl_roughly(float x) {
    uint bits = as_type<uint>(x);
    int off = (int)((bits * 2654435761u >> 16) % 9) - 4;
    return x == 0 || __builtin_isnan(x) || __builtin_isinf(x) ? x : as_type<float>(bits + off);
  }
#endif
  MSL_FUNCTIONS
  }

  // ---- barriers: a rendezvous carries its source line, so that a divergence is an error and never a hang
  enum class mem_flags { mem_none = 0, mem_threadgroup = 1, mem_device = 2 };
  constexpr mem_flags operator|(mem_flags a, mem_flags b) { return (mem_flags)((int)a | (int)b); }
#define MSL_LINE int line_ = __builtin_LINE()
  MSL_INLINE void threadgroup_barrier(mem_flags flags, MSL_LINE) { msl_group_barrier((int)flags, line_); }
  MSL_INLINE void simdgroup_barrier(mem_flags flags, MSL_LINE) { msl_simd_barrier((int)flags, line_); }

  // ---- SIMD-group functions: meet, then read the other lanes' operands
  template <class T>
  MSL_UNCHECKED inline T msl_operand(MslView * v, uint lane) {
    T r;
    __builtin_memcpy(&r, v->slot[lane], sizeof(T));
    return r;
  }
  template <class T, class F>
  MSL_UNCHECKED inline T msl_reduce(T x, F f, int line) {
    MslView* v = msl_simd(MSL_REDUCE, line, &x, sizeof x);
    if (!v->reduced) {  // in butterfly order over the lanes that take part; which order a GPU takes is not known
#ifdef MSL_ROUGH        // so here it is another one
      T all = msl_operand<T>(v, __builtin_ctz(v->mask));
      for (int i = __builtin_ctz(v->mask) + 1; i < 32; i++)
        if ((v->mask >> i) & 1) all = f(all, msl_operand<T>(v, i));
      __builtin_memcpy(v->result, &all, sizeof(T));
#else
      T t[32];
      bool on[32];
      for (int i = 0; i < 32; i++)
        if ((on[i] = (v->mask >> i) & 1)) t[i] = msl_operand<T>(v, i);
      for (int m = 16; m; m >>= 1)
        for (int i = 0; i < m; i++) {
          if (on[i] && on[i + m]) {
            t[i] = f(t[i], t[i + m]);
          } else if (on[i + m]) {
            t[i] = t[i + m];
            on[i] = true;
          }
        }
      __builtin_memcpy(v->result, &t[0], sizeof(T));
#endif
      v->reduced = 1;
    }
    T r;
    __builtin_memcpy(&r, v->result, sizeof r);
    return r;
  }
#define MSL_REDUCTION(name, expression)                                                       \
  template <class T>                                                                          \
  MSL_UNCHECKED inline T name(T x, MSL_LINE) {                                                \
    return msl_reduce(x, [](T a, T b) MSL_UNCHECKED -> T { return (T)(expression); }, line_); \
  }
  MSL_REDUCTION(simd_sum, a + b)
  MSL_REDUCTION(simd_max, max(a, b))
  MSL_REDUCTION(simd_min, min(a, b)) MSL_REDUCTION(simd_or, a | b) MSL_REDUCTION(simd_and, a & b) template <class T>
  MSL_UNCHECKED inline T msl_from(MslView * v, uint lane, T own) {
    if (lane > 31 || !((v->mask >> lane) & 1)) {
      msl_fail(0, "simd shuffle reads inactive lane %u", lane);
      return own;
    }
    return msl_operand<T>(v, lane);
  }
  MSL_INLINE uint msl_lane() { return msl_thread()->lane; }
  template <class T>
  MSL_UNCHECKED inline T simd_shuffle(T x, ushort lane, MSL_LINE) {
    return msl_from(msl_simd(MSL_SHUFFLE, line_, &x, sizeof x), lane, x);
  }
  template <class T>
  MSL_UNCHECKED inline T simd_shuffle_xor(T x, ushort mask, MSL_LINE) {
    MslView* v = msl_simd(MSL_SHUFFLE, line_, &x, sizeof x);
    return msl_from(v, msl_lane() ^ mask, x);
  }
  template <class T>
  MSL_UNCHECKED inline T simd_shuffle_down(T x, ushort by, MSL_LINE) {
    MslView* v = msl_simd(MSL_SHUFFLE, line_, &x, sizeof x);
    uint lane = msl_lane() + by;
    return lane < 32 && ((v->mask >> lane) & 1) ? msl_operand<T>(v, lane) : x;
  }
  template <class T>
  MSL_UNCHECKED inline T simd_shuffle_up(T x, ushort by, MSL_LINE) {
    MslView* v = msl_simd(MSL_SHUFFLE, line_, &x, sizeof x);
    return msl_lane() >= by ? msl_from(v, msl_lane() - by, x) : x;
  }
  template <class T>
  MSL_UNCHECKED inline T simd_shuffle_and_fill_up(T x, T fill, ushort by, MSL_LINE) {
    struct Pair {
      T x, fill;
    } own{x, fill};
    MslView* v = msl_simd(MSL_SHUFFLE, line_, &own, sizeof own);
    uint lane = msl_lane();
    return lane >= by ? msl_operand<Pair>(v, lane - by).x : msl_operand<Pair>(v, 32 + lane - by).fill;
  }
  template <class T>
  MSL_UNCHECKED inline T simd_broadcast(T x, ushort lane, MSL_LINE) {
    return msl_from(msl_simd(MSL_BROADCAST, line_, &x, sizeof x), lane, x);
  }
  template <class T>
  MSL_UNCHECKED inline T msl_scan(T x, uint inclusive, int line) {
    MslView* v = msl_simd(MSL_SCAN, line, &x, sizeof x);
    T sum = 0;
    for (uint i = 0; i < msl_lane() + inclusive; i++)
      if ((v->mask >> i) & 1) sum = (T)(sum + msl_operand<T>(v, i));
    return sum;
  }
  template <class T>
  inline T simd_prefix_inclusive_sum(T x, MSL_LINE) {
    return msl_scan(x, 1, line_);
  }
  template <class T>
  inline T simd_prefix_exclusive_sum(T x, MSL_LINE) {
    return msl_scan(x, 0, line_);
  }
  MSL_UNCHECKED inline uint msl_votes(bool p, int line, uint& present) {
    MslView* v = msl_simd(MSL_VOTE, line, &p, 1);
    uint yes = 0;
    for (uint i = 0; i < 32; i++)
      if (((v->mask >> i) & 1) && v->slot[i][0]) yes |= 1u << i;
    present = v->mask;
    return yes;
  }
  inline bool simd_any(bool p, MSL_LINE) {
    uint present;
    return msl_votes(p, line_, present) != 0;
  }
  inline bool simd_all(bool p, MSL_LINE) {
    uint present, yes = msl_votes(p, line_, present);
    return yes == present;
  }
}  // namespace metal
using metal::as_type;
using metal::vec;
using namespace metal;

// Address spaces vanish here and are checked by lint.h; translate.py turns threadgroup *declarations* into MSL_SHARED.
#define MSL_UINT3(n) uint3(n[0], n[1], n[2])
#define MSL_SHARED static __attribute__((section("msl_group")))
#ifdef MSL_ZONES  // behind each array: an overrun by pointer would otherwise land in the next one, which is no fault
#define MSL_ARRAY(name, size, ...)         \
  struct name##_and_zone {                 \
    __VA_ARGS__ array size;                \
    char zone[16];                         \
  };                                       \
  MSL_SHARED name##_and_zone name##_place; \
  auto& name = name##_place.array;         \
  msl_zone(name##_place.zone, sizeof name##_place.zone)
#else
#define MSL_ARRAY(name, size, ...) MSL_SHARED __VA_ARGS__ name size
#endif
#define device
#define constant const
#define threadgroup
#define thread
#define double MSL_has_no_double
