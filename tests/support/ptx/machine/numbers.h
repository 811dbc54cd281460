// Number formats of PTX: bit patterns in registers, and 16- and 8-bit floats by their values.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptx {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;

// A register holds the bits of a value, with zeros above them.
template <class T>
T from_bits(u64 bits) {
  T value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
u64 to_bits(T value) {
  u64 bits = 0;
  memcpy(&bits, &value, sizeof value);
  return bits;
}

// Rounds to `digits` bits behind the leading one, to even, and to multiples of 2^(least - digits).
inline double round_to(double value, int digits, int least) {
  if (value == 0 || !std::isfinite(value)) return value;
  int exponent = std::max(std::ilogb(value), least) - digits;
  return std::ldexp(std::nearbyint(std::ldexp(value, -exponent)), exponent);
}

// Bits of a float of `digits` bits behind the leading one, from a value that has no more.
inline u32 encode(double value, int digits, int least) {
  double size = std::fabs(value);
  if (size < std::ldexp(1.0, least)) return u32(std::ldexp(size, digits - least));
  int exponent = std::ilogb(size);
  u32 fraction = u32(std::ldexp(size, digits - exponent)) - (1u << digits);
  return (u32(exponent - least + 1) << digits) | fraction;
}

struct Half {
  u16 bits;
  Half() = default;
  explicit Half(double value) : bits(std::isnan(value) ? 0x7fff : u16(to_bits(_Float16(value)))) {}
  operator double() const { return from_bits<_Float16>(bits); }
};

struct Bfloat {
  u16 bits;
  Bfloat() = default;
  explicit Bfloat(double value) {
    u32 pattern = u32(to_bits(float(value)));
    if (std::isnan(value)) bits = 0x7fff;
    else bits = u16((pattern + 0x7fff + ((pattern >> 16) & 1)) >> 16);
  }
  operator double() const { return from_bits<float>(u64(bits) << 16); }
};

// e4m3: no infinities, one NaN; conversion to it saturates.
struct E4m3 {
  u8 bits;
  E4m3() = default;
  explicit E4m3(double value) {
    u8 sign = std::signbit(value) ? 0x80 : 0;
    double rounded = round_to(value, 3, -6);
    if (std::isnan(value)) bits = 0x7f;
    else if (std::fabs(rounded) > 448) bits = sign | 0x7e;
    else bits = sign | u8(encode(rounded, 3, -6));
  }
  operator double() const {
    int exponent = (bits >> 3) & 15, fraction = bits & 7;
    double size = exponent == 15 && fraction == 7 ? NAN
                  : exponent                      ? std::ldexp(8 + fraction, exponent - 10)
                                                  : std::ldexp(fraction, -9);
    return bits >> 7 ? -size : size;
  }
};

inline float flushed(float value) {
  return std::fabs(value) < 1.17549435e-38f ? std::copysign(0.0f, value) : value;
}

}  // namespace ptx
