// Instructions on bits and predicates: moves, logic, shifts, fields, comparison, selection.
#include <climits>

#include "arithmetic.h"

namespace ptx {
namespace {

u64 low(int bits) { return bits >= 64 ? ~u64(0) : (u64(1) << bits) - 1; }
u64 width_mask(const Instruction& in) {
  return in.type == Type::Pred ? 1 : low(8 * size_of(in.type));
}

// Calls `f` with the operands behind the result, for each lane.
template <class F>
void compute(Warp& warp, const Instruction& in, Mask mask, F f) {
  Lanes& out = warp.row(in.operands[0]);
  const auto arg = [&](int i, int lane) { return warp.get(in.operands[i], lane); };
  each_lane(mask, [&](int lane) {
    if constexpr (std::is_invocable_v<F, u64, u64, u64, u64>)
      out[lane] = f(arg(1, lane), arg(2, lane), arg(3, lane), arg(4, lane));
    else if constexpr (std::is_invocable_v<F, u64, u64, u64>)
      out[lane] = f(arg(1, lane), arg(2, lane), arg(3, lane));
    else if constexpr (std::is_invocable_v<F, u64, u64>)
      out[lane] = f(arg(1, lane), arg(2, lane));
    else
      out[lane] = f(arg(1, lane));
  });
}

void move(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const Operand &to = in.operands[0], &from = in.operands[1];
  const u64 whole = width_mask(in);
  each_lane(mask, [&](int lane) {
    if (to.kind == Operand::Vector) {
      const int bits = 8 * size_of(in.type) / int(to.parts.size());
      u64 value = warp.get(from, lane);
      for (auto& part : to.parts) { warp.row(part)[lane] = value & low(bits); value >>= bits; }
    } else if (from.kind == Operand::Vector) {
      const int bits = 8 * size_of(in.type) / int(from.parts.size());
      u64 value = 0;
      for (size_t i = 0; i < from.parts.size(); i++)
        value |= (warp.get(from.parts[i], lane) & low(bits)) << (bits * i);
      warp.row(to)[lane] = value;
    } else {
      warp.row(to)[lane] = warp.get(from, lane) & whole;
    }
  });
}

void logical_and(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [](u64 a, u64 b) { return a & b; });
}
void logical_or(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [](u64 a, u64 b) { return a | b; });
}
void exclusive_or(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [whole = width_mask(in)](u64 a, u64 b) { return (a ^ b) & whole; });
}
void complement(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [whole = width_mask(in)](u64 a) { return ~a & whole; });
}

void shift_left(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const u64 bits = 8 * size_of(in.type);
  compute(warp, in, mask, [&](u64 a, u64 by) {
    return u32(by) >= bits ? 0 : (a << u32(by)) & low(int(bits));
  });
}

i64 extended(u64 value, int bits) { return i64(value << (64 - bits)) >> (64 - bits); }

void shift_right(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const int bits = 8 * size_of(in.type);
  compute(warp, in, mask, [&](u64 a, u64 by) -> u64 {
    const int amount = int(std::min<u64>(u32(by), bits));
    if (is_signed(in.type)) return u64(extended(a, bits) >> std::min(amount, 63)) & low(bits);
    return amount >= bits ? 0 : (a & low(bits)) >> amount;
  });
}

void extract_field(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const int bits = 8 * size_of(in.type);
  compute(warp, in, mask, [&](u64 a, u64 position, u64 length) -> u64 {
    const int from = position & 255, count = length & 255;
    u64 field = from >= bits ? 0 : ((a & low(bits)) >> from) & low(count);
    if (!is_signed(in.type) || !count) return field;
    const int top = std::min(bits - 1, from + count - 1);
    if ((a >> top) & 1) field |= ~low(count);
    return field & low(bits);
  });
}

void insert_field(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [&](u64 field, u64 into, u64 position, u64 length) -> u64 {
    const u64 place = low(length & 255) << (position & 255);
    return ((into & ~place) | ((field << (position & 255)) & place)) & width_mask(in);
  });
}

void permute_bytes(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [](u64 a, u64 b, u64 selector) {
    const u64 bytes = u32(a) | (b << 32);
    u64 out = 0;
    for (int i = 0; i < 4; i++) {
      const int chosen = (selector >> (4 * i)) & 15;
      u64 byte = (bytes >> (8 * (chosen & 7))) & 255;
      if (chosen & 8) byte = byte & 128 ? 255 : 0;
      out |= byte << (8 * i);
    }
    return out;
  });
}

void logic_of_three(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [](u64 a, u64 b, u64 c, u64 table) {
    u32 out = 0;
    for (int i = 0; i < 8; i++)
      if ((table >> i) & 1)
        out |= u32(i & 4 ? a : ~a) & u32(i & 2 ? b : ~b) & u32(i & 1 ? c : ~c);
    return u64(out);
  });
}

void funnel_shift(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [&](u64 lower, u64 upper, u64 by) {
    const u64 value = u32(lower) | (upper << 32);
    const int amount = in.has("wrap") ? by & 31 : int(std::min<u64>(u32(by), 32));
    return u64(u32(in.has("l") ? (value << amount) >> 32 : value >> amount));
  });
}

void leading_zeros(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const int bits = 8 * size_of(in.type);
  compute(warp, in, mask, [&](u64 a) -> u64 {
    a &= low(bits);
    return a ? __builtin_clzll(a) - (64 - bits) : bits;
  });
}

void count_ones(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [&](u64 a) -> u64 { return __builtin_popcountll(a & width_mask(in)); });
}

void reverse(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const int bits = 8 * size_of(in.type);
  compute(warp, in, mask, [&](u64 a) {
    u64 out = 0;
    for (int i = 0; i < bits; i++) out |= ((a >> i) & 1) << (bits - 1 - i);
    return out;
  });
}

void select(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  compute(warp, in, mask, [&](u64 a, u64 b, u64 is_first) {
    return (is_first & 1 ? a : b) & width_mask(in);
  });
}

// Comparison: the bits say for which of less, equal, greater and unordered it holds.
constexpr int LESS = 1, EQUAL = 2, GREATER = 4, UNORDERED = 8;
const std::map<std::string, int> COMPARISONS = {
    {"eq", EQUAL},          {"ne", LESS | GREATER},    {"lt", LESS},
    {"le", LESS | EQUAL},   {"gt", GREATER},           {"ge", GREATER | EQUAL},
    {"lo", LESS},           {"ls", LESS | EQUAL},      {"hi", GREATER},
    {"hs", GREATER | EQUAL},
    {"equ", EQUAL | UNORDERED},        {"neu", LESS | GREATER | UNORDERED},
    {"ltu", LESS | UNORDERED},         {"leu", LESS | EQUAL | UNORDERED},
    {"gtu", GREATER | UNORDERED},      {"geu", GREATER | EQUAL | UNORDERED},
    {"num", LESS | EQUAL | GREATER},   {"nan", UNORDERED}};

template <class T>
int relation(u64 a, u64 b) {
  const auto left = typename Computed<T>::type(from_bits<T>(a));
  const auto right = typename Computed<T>::type(from_bits<T>(b));
  return left < right ? LESS : left > right ? GREATER : left == right ? EQUAL : UNORDERED;
}

template <class T>
void compare(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  const Lanes &a = warp.row(in.operands[1]), &b = warp.row(in.operands[2]);
  each_lane(mask, [&](int lane) {
    bool holds = relation<T>(a[lane], b[lane]) & in.count, fails = !holds;
    if (in.operands.size() > 3) {
      const bool other = warp.get(in.operands[3], lane) & 1;
      const auto joined = [&](bool value) {
        return in.has("and") ? value && other : in.has("or") ? value || other : value != other;
      };
      holds = joined(holds);
      fails = joined(fails);
    }
    warp.row(in.operands[0])[lane] = holds;
    if (in.operands[0].second) warp.row(in.operands[0].second)[lane] = fails;
  });
}

Handler comparison(Type type) {
  switch (type) {
    case Type::B16: case Type::U16: return compare<u16>;
    case Type::S16: return compare<i16>;
    case Type::B32: case Type::U32: return compare<u32>;
    case Type::S32: return compare<i32>;
    case Type::B64: case Type::U64: return compare<u64>;
    case Type::S64: return compare<i64>;
    case Type::F16: return compare<Half>;
    case Type::Bf16: return compare<Bfloat>;
    case Type::F32: return compare<float>;
    case Type::F64: return compare<double>;
    default: return nullptr;
  }
}

}  // namespace

void decode_bits(Instruction& in) {
  static const std::map<std::string, Handler> HANDLERS = {
      {"mov", move},           {"and", logical_and},    {"or", logical_or},
      {"xor", exclusive_or},   {"not", complement},     {"shl", shift_left},
      {"shr", shift_right},    {"bfe", extract_field},  {"bfi", insert_field},
      {"prmt", permute_bytes}, {"lop3", logic_of_three}, {"shf", funnel_shift},
      {"clz", leading_zeros},  {"popc", count_ones},    {"brev", reverse},
      {"selp", select}};
  if (in.words[0] == "mov" && in.operands[1].kind == Operand::Parameter) return;  // an address
  if (auto found = HANDLERS.find(in.words[0]); found != HANDLERS.end()) in.execute = found->second;
  if (in.words[0] == "setp") {
    in.count = COMPARISONS.at(in.words[1]);
    in.execute = comparison(in.type);
  }
}

}  // namespace ptx
