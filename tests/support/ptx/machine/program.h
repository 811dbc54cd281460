// Program: the instructions of one kernel, made by the parser, executed by warps.
#pragma once
#include <array>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.h"

namespace ptx {

constexpr int LANES = 32;
constexpr u32 SHARED_BASE = 1024;  // address of shared memory, so that a null pointer is outside
using Lanes = std::array<u64, LANES>;
using Mask = u32;

class ThreadBlock;
class Warp;
struct Instruction;
using Handler = void (*)(ThreadBlock&, Warp&, const Instruction&, Mask);

// A program that cannot go on: unknown PTX, an access out of bounds, a deadlock.
struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Type {
  None, Pred, B8, B16, B32, B64, B128, U8, U16, U32, U64, S8, S16, S32, S64,
  F16, Bf16, F32, F64, F16x2, Bf16x2, E4m3x2,
};
extern const std::map<std::string, Type> TYPES;
int size_of(Type type);
bool is_float(Type type);
bool is_signed(Type type);

struct Operand {
  enum Kind { Register, Vector, Address, Parameter, Label };
  Kind kind = Register;
  int index = 0;              // of a register; of an address that of its base
  int second = 0;             // of the second register in `a|b`
  i64 offset = 0;             // of an address from its base; of a parameter in their block
  std::vector<Operand> parts; // of a vector; the coordinates of a tensor copy's address
  std::string text;
};

struct Instruction {
  int line = 0;
  std::string text;
  int guard = -1;  // register of the predicate
  bool is_guard_negated = false;
  std::vector<std::string> words;  // of the opcode, as in `ld`, `global`, `v4`, `b32`
  std::vector<Operand> operands;
  Type type = Type::None, second_type = Type::None;
  bool flushes = false;  // denormal numbers, `.ftz`
  int target = 0;        // of a branch
  int count = 1;         // of matrices, of columns: what the handler says
  Handler execute = nullptr;

  bool has(const char* word) const;
  bool begins_with(const char* first, const char* second) const;
};

struct Parameter {
  std::string name;
  int offset, size;
};

struct Constant {
  std::string name;
  std::vector<u8> data;
};

struct Program {
  std::string name;
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  std::vector<std::unique_ptr<Constant>> constants;  // global variables
  std::map<u64, int> literals;                       // register of each number in the text
  int num_registers = 0;
  int parameter_bytes = 0;
};

// Registers of `%tid.x` and its like come first, in this order; then one that is never read.
extern const std::vector<std::string> SPECIAL;
int sink();

// Returns the program of the only kernel in `text`.
std::unique_ptr<Program> parse(const std::string& text);

// The decoders of each kind of instruction: they set `execute` of one that they know.
void decode_arithmetic(Instruction&);
void decode_bits(Instruction&);
void decode_conversion(Instruction&);
void decode_control(Instruction&);
void decode_memory(Instruction&);
void decode_matrix(Instruction&);
void decode_warpgroup(Instruction&);
void decode_copies(Instruction&);

}  // namespace ptx
