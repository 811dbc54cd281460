// Types of values, as opcodes name them.
#include "program.h"

namespace ptx {

const std::map<std::string, Type> TYPES = {
    {"pred", Type::Pred}, {"b8", Type::B8},       {"b16", Type::B16},       {"b32", Type::B32},
    {"b64", Type::B64},   {"b128", Type::B128},   {"u8", Type::U8},         {"u16", Type::U16},
    {"u32", Type::U32},   {"u64", Type::U64},     {"s8", Type::S8},         {"s16", Type::S16},
    {"s32", Type::S32},   {"s64", Type::S64},     {"f16", Type::F16},       {"bf16", Type::Bf16},
    {"f32", Type::F32},   {"f64", Type::F64},     {"f16x2", Type::F16x2},   {"bf16x2", Type::Bf16x2},
    {"e4m3x2", Type::E4m3x2}};

int size_of(Type type) {
  switch (type) {
    case Type::Pred: case Type::B8: case Type::U8: case Type::S8: return 1;
    case Type::B16: case Type::U16: case Type::S16: case Type::F16: case Type::Bf16:
    case Type::E4m3x2: return 2;
    case Type::B64: case Type::U64: case Type::S64: case Type::F64: return 8;
    case Type::B128: return 16;
    default: return 4;
  }
}

bool is_float(Type type) {
  return type == Type::F16 || type == Type::Bf16 || type == Type::F32 || type == Type::F64;
}

bool is_signed(Type type) {
  return type == Type::S8 || type == Type::S16 || type == Type::S32 || type == Type::S64;
}

}  // namespace ptx
