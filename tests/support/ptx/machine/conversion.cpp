// Conversion between types of numbers: cvt, cvta.
#include "warp.h"

namespace ptx {
namespace {

enum class Rounding { ToEven, ToZero, Down, Up };

Rounding rounding_of(const Instruction& in) {
  if (in.has("rz") || in.has("rzi")) return Rounding::ToZero;
  if (in.has("rm") || in.has("rmi")) return Rounding::Down;
  if (in.has("rp") || in.has("rpi")) return Rounding::Up;
  return Rounding::ToEven;
}

double to_integer(double value, Rounding rounding) {
  switch (rounding) {
    case Rounding::ToZero: return std::trunc(value);
    case Rounding::Down: return std::floor(value);
    case Rounding::Up: return std::ceil(value);
    default: return std::nearbyint(value);
  }
}

i64 integer_of(u64 bits, Type type) {
  switch (type) {
    case Type::S8: return i8(bits);
    case Type::S16: return i16(bits);
    case Type::S32: return i32(bits);
    case Type::U8: case Type::B8: return u8(bits);
    case Type::U16: case Type::B16: return u16(bits);
    case Type::U32: case Type::B32: return u32(bits);
    default: return i64(bits);
  }
}

double float_of(u64 bits, Type type) {
  switch (type) {
    case Type::F16: return from_bits<Half>(bits);
    case Type::Bf16: return from_bits<Bfloat>(bits);
    case Type::F32: return from_bits<float>(bits);
    case Type::F64: return from_bits<double>(bits);
    default: {
      const i64 value = integer_of(bits, type);
      return type == Type::U64 ? double(u64(value)) : double(value);
    }
  }
}

u64 bits_of_integer(i64 value, Type type) {
  return size_of(type) == 8 ? u64(value) : u64(value) & ((u64(1) << (8 * size_of(type))) - 1);
}

// Saturates, and makes a NaN zero, as hardware does.
u64 integer_from(double value, Type type) {
  const int bits = 8 * size_of(type);
  if (std::isnan(value)) return size_of(type) == 8 ? u64(1) << 63 : 0;
  if (!is_signed(type)) {
    if (value <= 0) return 0;
    return value >= std::ldexp(1, bits) ? bits_of_integer(-1, type) : u64(value);
  }
  const double limit = std::ldexp(1, bits - 1);
  const i64 most = i64((u64(1) << (bits - 1)) - 1);
  return bits_of_integer(value >= limit ? most : value < -limit ? -most - 1 : i64(value), type);
}

u64 float_from(double value, Type type, Rounding rounding) {
  switch (type) {
    case Type::F16: return to_bits(Half(value));
    case Type::Bf16: return to_bits(Bfloat(value));
    case Type::F64: return to_bits(value);
    default: {
      float near = float(value);
      if (rounding == Rounding::ToZero && std::fabs(double(near)) > std::fabs(value))
        near = std::nextafter(near, 0.0f);
      return to_bits(near);
    }
  }
}

void convert(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const Type to = in.type, from = in.second_type == Type::None ? in.type : in.second_type;
  const Rounding rounding = rounding_of(in);
  const bool is_to_integer = in.has("rni") || in.has("rzi") || in.has("rmi") || in.has("rpi");
  each_lane(mask, [&](int lane) {
    const u64 bits = warp.get(in.operands[1], lane);
    u64& out = warp.row(in.operands[0])[lane];
    if (!is_float(to) && !is_float(from)) {
      out = bits_of_integer(integer_of(bits, from), to);
      return;
    }
    double value = float_of(bits, from);
    if (is_to_integer || !is_float(to)) value = to_integer(value, rounding);
    if (in.has("sat")) value = value > 0 ? std::min(value, 1.0) : 0;
    if (in.has("relu") && value < 0) value = 0;
    out = is_float(to) ? float_from(value, to, rounding) : integer_from(value, to);
  });
}

// Two numbers in one register, the first operand in its upper half.
template <class To>
void convert_pair(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    u64 out = 0;
    for (int i : {1, 2}) {
      float value = from_bits<float>(warp.get(in.operands[i], lane));
      if (in.has("relu") && value < 0) value = 0;
      out = out << (8 * sizeof(To)) | to_bits(To(value));
    }
    warp.row(in.operands[0])[lane] = out;
  });
}

template <class To, class From>
void convert_packed(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    const u64 bits = warp.get(in.operands[1], lane);
    const u64 first = to_bits(To(double(from_bits<From>(bits))));
    const u64 second = to_bits(To(double(from_bits<From>(bits >> (8 * sizeof(From))))));
    warp.row(in.operands[0])[lane] = first | second << (8 * sizeof(To));
  });
}

void copy_address(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const Operand& from = in.operands[1];
  each_lane(mask, [&](int lane) { warp.row(in.operands[0])[lane] = warp.get(from, lane); });
}

Handler pair_conversion(Type to, Type from) {
  if (from == Type::F32) {
    if (to == Type::F16x2) return convert_pair<Half>;
    if (to == Type::Bf16x2) return convert_pair<Bfloat>;
    if (to == Type::E4m3x2) return convert_pair<E4m3>;
  }
  if (to == Type::F16x2 && from == Type::E4m3x2) return convert_packed<Half, E4m3>;
  if (to == Type::E4m3x2 && from == Type::F16x2) return convert_packed<E4m3, Half>;
  return nullptr;
}

}  // namespace

void decode_conversion(Instruction& in) {
  const auto is_pair = [](Type type) {
    return type == Type::F16x2 || type == Type::Bf16x2 || type == Type::E4m3x2;
  };
  if (in.words[0] == "cvta") in.execute = copy_address;
  if (in.words[0] != "cvt") return;
  in.execute = is_pair(in.type) ? pair_conversion(in.type, in.second_type) : Handler(convert);
}

}  // namespace ptx
