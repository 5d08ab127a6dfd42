// Stands in for MLX's complex.h, whose members are overloaded on the address space alone.
#pragma once
template <typename T> struct complex_t {
  T real, imag;
  constexpr complex_t(T r, T i) : real(r), imag(i) {}
  constexpr complex_t(T r) : real(r), imag(0) {}
};
typedef complex_t<float> complex64_t;
