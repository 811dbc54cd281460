// Matrix instructions of one warp: mma.sync, and the loads and stores of its fragments.
#include "matrix.h"

#include "arithmetic.h"
#include "thread_block.h"

namespace ptx {
namespace {

constexpr int COLUMNS = 8;

// Each lane holds two neighbours of a row in a register, as PTX's manual draws it.
template <class T>
void multiply(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  Left left;
  std::vector<double> right(DEPTH * COLUMNS);
  read_left<T>(left, [&](int part, int lane) { return warp.get(in.operands[1].parts[part], lane); });
  for (int lane = 0; lane < LANES; lane++)
    for (int part = 0; part < 2; part++) {
      const u64 pair = warp.get(in.operands[2].parts[part], lane);
      const int depth = lane % 4 * 2 + part * 8;
      right[depth * COLUMNS + lane / 4] = from_bits<T>(pair);
      right[(depth + 1) * COLUMNS + lane / 4] = from_bits<T>(pair >> 16);
    }
  const std::vector<double> products = product(left, right, COLUMNS);
  Lanes sums[4];
  for (int part = 0; part < 4; part++)
    for (int lane = 0; lane < LANES; lane++) {
      const int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
      const float before = from_bits<float>(warp.get(in.operands[3].parts[part], lane));
      sums[part][lane] = to_bits(float(products[row * COLUMNS + column] + before));
    }
  for (int part = 0; part < 4; part++) warp.row(in.operands[0].parts[part]) = sums[part];
}

using Matrix = u16[8][8];

const Operand& part_of(const Operand& operand, int i) {
  return operand.kind == Operand::Vector ? operand.parts[i] : operand;
}

// Row `r` of matrix `m` is at the address that lane 8 m + r holds.
void load(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  Matrix matrices[4];
  for (int lane = 0; lane < 8 * in.count; lane++) {
    const u32 address = warp.shared_address(in.operands[1], lane);
    const Access access{block, warp, in, lane};
    if (address % 16) throw Error("ldmatrix is not aligned: " + access.where());
    block.shared.read(address, 16, access);
    memcpy(matrices[lane / 8][lane % 8], block.shared.at(address), 16);
  }
  const bool is_transposed = in.has("trans");
  for (int i = 0; i < in.count; i++)
    for (int lane = 0; lane < LANES; lane++) {
      const int row = lane / 4, column = lane % 4 * 2;
      const Matrix& matrix = matrices[i];
      const u32 first = is_transposed ? matrix[column][row] : matrix[row][column];
      const u32 second = is_transposed ? matrix[column + 1][row] : matrix[row][column + 1];
      warp.row(part_of(in.operands[0], i))[lane] = first | second << 16;
    }
}

void store(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  Matrix matrices[4];
  const bool is_transposed = in.has("trans");
  for (int i = 0; i < in.count; i++)
    for (int lane = 0; lane < LANES; lane++) {
      const u64 pair = warp.get(part_of(in.operands[1], i), lane);
      const int row = lane / 4, column = lane % 4 * 2;
      Matrix& matrix = matrices[i];
      (is_transposed ? matrix[column][row] : matrix[row][column]) = u16(pair);
      (is_transposed ? matrix[column + 1][row] : matrix[row][column + 1]) = u16(pair >> 16);
    }
  for (int lane = 0; lane < 8 * in.count; lane++) {
    const u32 address = warp.shared_address(in.operands[0], lane);
    const Access access{block, warp, in, lane};
    if (address % 16) throw Error("stmatrix is not aligned: " + access.where());
    block.shared.write(address, 16, access, reinterpret_cast<u8*>(matrices[lane / 8][lane % 8]));
  }
}

}  // namespace

void decode_matrix(Instruction& in) {
  const std::string& name = in.words[0];
  if (name == "mma" && in.has("m16n8k16") && in.words.size() > 7 && in.type == Type::F32) {
    if (in.words[7] == "bf16") in.execute = multiply<Bfloat>;
    if (in.words[7] == "f16") in.execute = multiply<Half>;
  }
  if (name != "ldmatrix" && name != "stmatrix") return;
  in.count = in.has("x4") ? 4 : in.has("x2") ? 2 : 1;
  in.execute = name == "ldmatrix" ? load : store;
}

}  // namespace ptx
