// Operations on values of one type, which arithmetic, atomics and reductions share.
#pragma once
#include "warp.h"

namespace ptx {

// Refuses an instruction that every lane of a warp has to execute, where some do not.
void require_all(const ThreadBlock& block, const Warp& warp, const Instruction& in, Mask mask);

// 16-bit floats are computed as doubles and rounded once.
template <class T> struct Computed { using type = T; };
template <> struct Computed<Half> { using type = double; };
template <> struct Computed<Bfloat> { using type = double; };

struct Add { template <class T> static T apply(T a, T b) { return a + b; } };
struct Subtract { template <class T> static T apply(T a, T b) { return a - b; } };
struct Multiply { template <class T> static T apply(T a, T b) { return a * b; } };

struct Divide {
  template <class T> static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) if (b == 0) return T(-1);
    return a / b;
  }
};

struct Remainder {
  template <class T> static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) return b == 0 ? a : a % b;
    else throw Error("rem of floats");
  }
};

// Of a NaN and a number the number; `.NaN` asks for the NaN, and has an operation of its own.
struct Min {
  template <class T> static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) return b < a ? b : a;
    else return std::fmin(a, b);
  }
};
struct Max {
  template <class T> static T apply(T a, T b) {
    if constexpr (std::is_integral_v<T>) return b > a ? b : a;
    else return std::fmax(a, b);
  }
};
template <class Operation>
struct OrNan {
  template <class T> static T apply(T a, T b) {
    if constexpr (!std::is_integral_v<T>) if (std::isnan(a) || std::isnan(b)) return T(NAN);
    return Operation::apply(a, b);
  }
};
template <class Operation>
struct OrZero {  // `.relu`
  template <class T> static T apply(T a, T b) { return std::max(Operation::apply(a, b), T(0)); }
};

struct MultiplyAdd {
  template <class T> static T apply(T a, T b, T c) {
    if constexpr (std::is_integral_v<T>) return a * b + c;
    else return std::fma(a, b, c);
  }
};

struct Negate { template <class T> static T apply(T a) { return -a; } };
struct Absolute {
  template <class T> static T apply(T a) {
    if constexpr (std::is_integral_v<T>) return a < 0 ? -a : a;
    else return std::fabs(a);
  }
};

}  // namespace ptx
