// Instructions of arithmetic and comparison, for every type of number.
#include "arithmetic.h"

namespace ptx {
namespace {

template <class T>
T argument(const Instruction& in, u64 bits) {
  T value = from_bits<T>(bits);
  if constexpr (std::is_same_v<T, float>) return in.flushes ? flushed(value) : value;
  return value;
}

template <class T, class Result>
u64 result(const Instruction& in, Result value) {
  if constexpr (std::is_same_v<T, float>) return to_bits(in.flushes ? flushed(value) : value);
  else return to_bits(T(value));
}

template <class Operation, class T>
void unary(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  using C = typename Computed<T>::type;
  const Lanes& a = warp.row(in.operands[1]);
  Lanes& out = warp.row(in.operands[0]);
  each_lane(mask, [&](int lane) {
    out[lane] = result<T>(in, Operation::template apply<C>(C(argument<T>(in, a[lane]))));
  });
}

template <class Operation, class T>
void binary(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  using C = typename Computed<T>::type;
  const Lanes &a = warp.row(in.operands[1]), &b = warp.row(in.operands[2]);
  Lanes& out = warp.row(in.operands[0]);
  each_lane(mask, [&](int lane) {
    const C left = C(argument<T>(in, a[lane])), right = C(argument<T>(in, b[lane]));
    out[lane] = result<T>(in, Operation::template apply<C>(left, right));
  });
}

template <class Operation, class T>
void ternary(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  using C = typename Computed<T>::type;
  const Lanes &a = warp.row(in.operands[1]), &b = warp.row(in.operands[2]);
  const Lanes& c = warp.row(in.operands[3]);
  Lanes& out = warp.row(in.operands[0]);
  each_lane(mask, [&](int lane) {
    out[lane] = result<T>(in, Operation::template apply<C>(C(argument<T>(in, a[lane])),
                                                           C(argument<T>(in, b[lane])),
                                                           C(argument<T>(in, c[lane]))));
  });
}

// Both halves of a register, each as `Half` or `Bfloat`.
template <class Operation, class T>
void binary_of_pairs(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const Lanes &a = warp.row(in.operands[1]), &b = warp.row(in.operands[2]);
  Lanes& out = warp.row(in.operands[0]);
  each_lane(mask, [&](int lane) {
    u64 pair = 0;
    for (int shift : {0, 16}) {
      const double left = from_bits<T>(a[lane] >> shift), right = from_bits<T>(b[lane] >> shift);
      pair |= to_bits(T(Operation::template apply<double>(left, right))) << shift;
    }
    out[lane] = pair;
  });
}

template <class T>
void fma_of_pairs(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const Lanes &a = warp.row(in.operands[1]), &b = warp.row(in.operands[2]);
  const Lanes& c = warp.row(in.operands[3]);
  Lanes& out = warp.row(in.operands[0]);
  each_lane(mask, [&](int lane) {
    u64 pair = 0;
    for (int shift : {0, 16}) {
      const double left = from_bits<T>(a[lane] >> shift), right = from_bits<T>(b[lane] >> shift);
      const double product = left * right;
      pair |= to_bits(T(product + from_bits<T>(c[lane] >> shift))) << shift;
    }
    out[lane] = pair;
  });
}

// Product of twice the width, whole (`.wide`) or its upper half (`.hi`), and a sum with it.
template <class T, class Wide, bool is_wide>
void multiply_wide(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  using Result = std::conditional_t<is_wide, Wide, T>;
  const Lanes &a = warp.row(in.operands[1]), &b = warp.row(in.operands[2]);
  const Lanes* c = in.operands.size() > 3 ? &warp.row(in.operands[3]) : nullptr;
  Lanes& out = warp.row(in.operands[0]);
  each_lane(mask, [&](int lane) {
    const Wide product = Wide(from_bits<T>(a[lane])) * Wide(from_bits<T>(b[lane]));
    Result total = Result(is_wide ? product : product >> (8 * sizeof(T)));
    if (c) total += from_bits<Result>((*c)[lane]);
    out[lane] = u64(to_bits(total));
  });
}

Handler wide_product(const Instruction& in) {
  const bool is_wide = in.has("wide");
  switch (in.type) {
    case Type::S16: return is_wide ? multiply_wide<i16, i32, true> : multiply_wide<i16, i32, false>;
    case Type::U16: return is_wide ? multiply_wide<u16, u32, true> : multiply_wide<u16, u32, false>;
    case Type::S32: return is_wide ? multiply_wide<i32, i64, true> : multiply_wide<i32, i64, false>;
    case Type::U32: return is_wide ? multiply_wide<u32, u64, true> : multiply_wide<u32, u64, false>;
    case Type::S64: return is_wide ? nullptr : Handler(multiply_wide<i64, __int128, false>);
    case Type::U64: return is_wide ? nullptr : Handler(multiply_wide<u64, unsigned __int128, false>);
    default: return nullptr;
  }
}

// Returns the handler `Make<T>::handler` for the type of an instruction.
template <template <class> class Make>
Handler by_type(Type type) {
  switch (type) {
    case Type::U16: case Type::B16: return Make<u16>::handler;
    case Type::S16: return Make<i16>::handler;
    case Type::U32: case Type::B32: return Make<u32>::handler;
    case Type::S32: return Make<i32>::handler;
    case Type::U64: case Type::B64: return Make<u64>::handler;
    case Type::S64: return Make<i64>::handler;
    case Type::F16: return Make<Half>::handler;
    case Type::Bf16: return Make<Bfloat>::handler;
    case Type::F32: return Make<float>::handler;
    case Type::F64: return Make<double>::handler;
    default: return nullptr;
  }
}

template <class Operation>
struct Of {
  template <class T> struct Unary { static constexpr Handler handler = unary<Operation, T>; };
  template <class T> struct Binary { static constexpr Handler handler = binary<Operation, T>; };
  template <class T> struct Ternary { static constexpr Handler handler = ternary<Operation, T>; };

  static Handler binary_of(Type type) {
    if (type == Type::F16x2) return binary_of_pairs<Operation, Half>;
    if (type == Type::Bf16x2) return binary_of_pairs<Operation, Bfloat>;
    return by_type<Binary>(type);
  }
};

template <class Operation>
Handler extreme(const Instruction& in) {
  if (in.has("NaN")) return Of<OrNan<Operation>>::binary_of(in.type);
  if (in.has("relu")) return Of<OrZero<Operation>>::binary_of(in.type);
  return Of<Operation>::binary_of(in.type);
}

Handler sum_of_product(const Instruction& in) {
  if (in.has("wide") || in.has("hi")) return wide_product(in);
  if (in.type == Type::F16x2) return fma_of_pairs<Half>;
  if (in.type == Type::Bf16x2) return fma_of_pairs<Bfloat>;
  return by_type<Of<MultiplyAdd>::Ternary>(in.type);
}

// Functions of floats; `.approx` ones are computed as well as the host does.
template <double (*function)(double)>
struct Function {
  template <class T> static T apply(T a) { return T(function(double(a))); }
};
double reciprocal(double x) { return 1 / x; }
double reciprocal_root(double x) { return 1 / std::sqrt(x); }

template <double (*function)(double)>
Handler function_of(Type type) {
  if (type == Type::F64) return unary<Function<function>, double>;
  return type == Type::F32 ? Handler(unary<Function<function>, float>) : nullptr;
}

void copy_sign(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const u64 sign = in.type == Type::F64 ? u64(1) << 63 : u64(1) << 31;
  each_lane(mask, [&](int lane) {
    const u64 of = warp.get(in.operands[1], lane), value = warp.get(in.operands[2], lane);
    warp.row(in.operands[0])[lane] = (value & (sign - 1)) | (of & sign);
  });
}

}  // namespace

void decode_arithmetic(Instruction& in) {
  const std::string& name = in.words[0];
  const bool is_product = name == "mul" || name == "mad";
  if (name == "add") in.execute = Of<Add>::binary_of(in.type);
  if (name == "sub") in.execute = Of<Subtract>::binary_of(in.type);
  if (name == "mul") in.execute = Of<Multiply>::binary_of(in.type);
  if (is_product && (in.has("wide") || in.has("hi"))) in.execute = wide_product(in);
  else if (name == "mad" || name == "fma") in.execute = sum_of_product(in);
  if (name == "div") in.execute = Of<Divide>::binary_of(in.type);
  if (name == "rem" && !is_float(in.type)) in.execute = Of<Remainder>::binary_of(in.type);
  if (name == "min") in.execute = extreme<Min>(in);
  if (name == "max") in.execute = extreme<Max>(in);
  if (name == "neg") in.execute = by_type<Of<Negate>::Unary>(in.type);
  if (name == "abs") in.execute = by_type<Of<Absolute>::Unary>(in.type);
  if (name == "ex2") in.execute = function_of<std::exp2>(in.type);
  if (name == "lg2") in.execute = function_of<std::log2>(in.type);
  if (name == "rcp") in.execute = function_of<reciprocal>(in.type);
  if (name == "rsqrt") in.execute = function_of<reciprocal_root>(in.type);
  if (name == "sqrt") in.execute = function_of<std::sqrt>(in.type);
  if (name == "sin") in.execute = function_of<std::sin>(in.type);
  if (name == "cos") in.execute = function_of<std::cos>(in.type);
  if (name == "tanh") in.execute = function_of<std::tanh>(in.type);
  if (name == "copysign") in.execute = copy_sign;
}

}  // namespace ptx
