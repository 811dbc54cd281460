// Instructions that load, store and update memory: ld, st, atom, red.
#include "arithmetic.h"
#include "thread_block.h"

namespace ptx {
namespace {

// The registers of an operand: those of a vector, or itself.
struct Registers {
  const Operand* first;
  int count;
  explicit Registers(const Operand& operand)
      : first(operand.kind == Operand::Vector ? operand.parts.data() : &operand),
        count(operand.kind == Operand::Vector ? int(operand.parts.size()) : 1) {}
};

bool is_shared(const Instruction& in) {
  for (auto& word : in.words) if (word.rfind("shared", 0) == 0) return true;
  return false;
}

void unpack(Warp& warp, const Registers& to, int lane, const u8* from, Type type) {
  const int size = size_of(type);
  for (int i = 0; i < to.count; i++) {
    u64 value = 0;
    memcpy(&value, from + i * size, size);
    const int above = 64 - 8 * size;
    if (is_signed(type)) value = u64(i64(value << above) >> above);
    warp.row(to.first[i])[lane] = value;
  }
}

void load_parameter(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  const u8* from = block.launch().parameters + in.operands[1].offset;
  each_lane(mask, [&](int lane) { unpack(warp, Registers(in.operands[0]), lane, from, in.type); });
}

void address_parameter(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  const u64 address = u64(block.launch().parameters + in.operands[1].offset);
  each_lane(mask, [&](int lane) { warp.row(in.operands[0])[lane] = address; });
}

void check_alignment(u64 address, u32 size, const Access& access) {
  if (address % size)
    throw Error("shared access of " + std::to_string(size) + " bytes is not aligned: " +
                access.where());
}

void load_shared(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  const Registers to(in.operands[0]);
  const u32 size = u32(to.count * size_of(in.type));
  each_lane(mask, [&](int lane) {
    const u32 address = warp.shared_address(in.operands[1], lane);
    const Access access{block, warp, in, lane};
    check_alignment(address, size, access);
    block.shared.read(address, size, access);
    unpack(warp, to, lane, block.shared.at(address), in.type);
  });
}

void load_global(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  const Registers to(in.operands[0]);
  const u32 size = u32(to.count * size_of(in.type));
  each_lane(mask, [&](int lane) {
    const u64 address = warp.address(in.operands[1], lane);
    unpack(warp, to, lane,
           block.global.access(address, size, Kind::Read, {block, warp, in, lane}), in.type);
  });
}

struct Values {
  u8 bytes[64];
  u32 size;
  Values(const Warp& warp, const Registers& from, int lane, Type type)
      : size(u32(from.count * size_of(type))) {
    for (int i = 0; i < from.count; i++) {
      const u64 value = warp.get(from.first[i], lane);
      memcpy(bytes + i * size_of(type), &value, size_of(type));
    }
  }
};

void store_shared(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    const Values values(warp, Registers(in.operands[1]), lane, in.type);
    const u32 address = warp.shared_address(in.operands[0], lane);
    const Access access{block, warp, in, lane};
    check_alignment(address, values.size, access);
    block.shared.write(address, values.size, access, values.bytes);
  });
}

void store_global(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    const Values values(warp, Registers(in.operands[1]), lane, in.type);
    const u64 address = warp.address(in.operands[0], lane);
    const Access access{block, warp, in, lane};
    memcpy(block.global.access(address, values.size, Kind::Write, access, values.bytes),
           values.bytes, values.size);
  });
}

struct And { template <class T> static T apply(T a, T b) { return T(u64(a) & u64(b)); } };
struct Or { template <class T> static T apply(T a, T b) { return T(u64(a) | u64(b)); } };
struct Xor { template <class T> static T apply(T a, T b) { return T(u64(a) ^ u64(b)); } };
struct Exchange { template <class T> static T apply(T, T b) { return b; } };

// One lane after the other; `atom` returns the value before, `red` does not.
template <class Operation, class T>
void update(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  using C = typename Computed<T>::type;
  const int at = in.words[0] == "red" ? 0 : 1;
  each_lane(mask, [&](int lane) {
    const u64 address = warp.address(in.operands[at], lane);
    u8* place = block.global.access(address, sizeof(T), Kind::Atomic, {block, warp, in, lane});
    T before;
    memcpy(&before, place, sizeof before);
    const T operand = from_bits<T>(warp.get(in.operands[at + 1], lane));
    T after = T(Operation::template apply<C>(C(before), C(operand)));
    if (in.has("cas"))
      after = to_bits(before) == to_bits(operand) ? from_bits<T>(warp.get(in.operands[at + 2], lane))
                                                  : before;
    memcpy(place, &after, sizeof after);
    if (at) warp.row(in.operands[0])[lane] = to_bits(before);
  });
}

template <class Operation>
Handler float_or_integer_update(Type type) {
  switch (type) {
    case Type::F32: return update<Operation, float>;
    case Type::F64: return update<Operation, double>;
    case Type::F16: return update<Operation, Half>;
    case Type::Bf16: return update<Operation, Bfloat>;
    case Type::S32: return update<Operation, i32>;
    case Type::S64: return update<Operation, i64>;
    case Type::U32: case Type::B32: return update<Operation, u32>;
    case Type::U64: case Type::B64: return update<Operation, u64>;
    default: return nullptr;
  }
}

template <class Operation>
Handler integer_update(Type type) {
  if (size_of(type) == 8) return update<Operation, u64>;
  return size_of(type) == 4 ? Handler(update<Operation, u32>) : nullptr;
}

Handler update_of(const Instruction& in) {
  if (is_shared(in)) return nullptr;
  if (in.has("add")) return float_or_integer_update<Add>(in.type);
  if (in.has("min")) return float_or_integer_update<Min>(in.type);
  if (in.has("max")) return float_or_integer_update<Max>(in.type);
  if (in.has("and")) return integer_update<And>(in.type);
  if (in.has("or")) return integer_update<Or>(in.type);
  if (in.has("xor")) return integer_update<Xor>(in.type);
  return in.has("exch") || in.has("cas") ? integer_update<Exchange>(in.type) : nullptr;
}

}  // namespace

void decode_memory(Instruction& in) {
  const std::string& name = in.words[0];
  if (name == "ld" && !in.has("local")) {
    const bool is_parameter = in.operands[1].kind == Operand::Parameter;
    if (is_parameter) in.execute = load_parameter;
    else if (!in.has("param")) in.execute = is_shared(in) ? load_shared : load_global;
  }
  if (name == "st" && !in.has("local") && !in.has("param"))
    in.execute = is_shared(in) ? store_shared : store_global;
  if (name == "mov" && in.operands[1].kind == Operand::Parameter) in.execute = address_parameter;
  if (name == "atom" || name == "red") in.execute = update_of(in);
}

}  // namespace ptx
