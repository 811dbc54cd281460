// Matrix instructions of four warps (wgmma): operands in shared memory by descriptors, computed
// when they are waited for. Each warp has its 16 rows of the product.
#include "arithmetic.h"
#include "matrix.h"
#include "thread_block.h"

namespace ptx {
namespace {

// Shared memory descriptor: where the elements of an operand are, in the layouts of wgmma.
class Descriptor {
 public:
  Descriptor(u64 bits, bool is_transposed)
      : start_(field(bits)), leading_(field(bits >> 16)), stride_(field(bits >> 32)),
        swizzle_bits_(SWIZZLE_BITS[bits >> 62]), is_transposed_(is_transposed) {
    if ((bits >> 49) & 7) throw Error("wgmma has a descriptor with a base offset");
  }

  // Address of a 16-bit element: `outer` is its row of A or column of B, `depth` that of the sum.
  u32 address(int outer, int depth) const {
    const u32 pitch = 16u << swizzle_bits_;
    const int inner = is_transposed_ ? outer : depth, other = is_transposed_ ? depth : outer;
    u32 offset;
    if (swizzle_bits_ && !is_transposed_) {
      offset = other % 8 * pitch + other / 8 * stride_ + inner * 2;
    } else if (swizzle_bits_) {
      const int per_row = int(pitch) / 2;
      offset = inner % per_row * 2 + inner / per_row * leading_;
      offset += other % 8 * pitch + other / 8 * stride_;
    } else {
      offset = inner % 8 * 2 + other % 8 * 16;
      offset += inner / 8 * (is_transposed_ ? stride_ : leading_);
      offset += other / 8 * (is_transposed_ ? leading_ : stride_);
    }
    return swizzled(start_ + offset, swizzle_bits_);
  }

 private:
  static constexpr int SWIZZLE_BITS[4] = {0, 3, 2, 1};
  static u32 field(u64 bits) { return u32(bits & 0x3fff) << 4; }
  u32 start_, leading_, stride_;
  int swizzle_bits_;
  bool is_transposed_;
};

std::vector<u32> addresses(const Descriptor& descriptor, int first, int count) {
  std::vector<u32> found;
  for (int outer = first; outer < first + count; outer++)
    for (int depth = 0; depth < DEPTH; depth++) found.push_back(descriptor.address(outer, depth));
  return found;
}

// Operands: sums, A, B, whether to add to the sums, the signs of A and B, and for each operand in
// shared memory whether it is transposed.
void begin(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  const auto flag = [&](size_t from_end) {
    return (warp.get(in.operands[in.operands.size() - from_end], 0) & 1) != 0;
  };
  WarpgroupProduct product{&in, {}, {}, {}, (warp.get(in.operands[3], 0) & 1) != 0};
  product.right = addresses(Descriptor(warp.get(in.operands[2], 0), flag(1)), 0, in.count);
  const Operand& left = in.operands[1];
  if (left.kind == Operand::Vector) {
    for (auto& part : left.parts)
      for (u64 value : warp.row(part)) product.left_registers.push_back(value);
  } else {
    product.left = addresses(Descriptor(warp.get(left, 0), flag(2)), warp.index % 4 * 16, 16);
  }
  for (auto all : {&product.left, &product.right})
    for (u32 address : *all) {
      block.shared.read_by_matrix_unit(address, 2, {block, warp, in, 0});
      block.shared.begin_matrix_read(address, 2);
    }
  warp.products.open.push_back(std::move(product));
}

template <class T>
double element(ThreadBlock& block, u32 address) {
  u16 bits;
  memcpy(&bits, block.shared.at(address), sizeof bits);
  return from_bits<T>(bits);
}

template <class T>
void finish(ThreadBlock& block, Warp& warp, const WarpgroupProduct& product) {
  const Instruction& in = *product.instruction;
  Left left;
  std::vector<double> right(DEPTH * in.count);
  for (size_t i = 0; i < product.right.size(); i++)
    right[i % DEPTH * in.count + i / DEPTH] = element<T>(block, product.right[i]);
  for (size_t i = 0; i < product.left.size(); i++)
    left[i / DEPTH][i % DEPTH] = element<T>(block, product.left[i]);
  if (product.left.empty())
    read_left<T>(left, [&](int part, int lane) {
      return product.left_registers[part * LANES + lane];
    });
  const std::vector<double> products = ptx::product(left, right, in.count);
  const auto& sums = in.operands[0].parts;
  for (size_t i = 0; i < sums.size(); i++)
    for (int lane = 0; lane < LANES; lane++) {
      const int row = lane / 4 + i / 2 % 2 * 8, column = int(i / 4 * 8) + lane % 4 * 2 + i % 2;
      u64& sum = warp.row(sums[i])[lane];
      const float before = product.accumulates ? from_bits<float>(sum) : 0;
      sum = to_bits(float(products[row * in.count + column] + before));
    }
  for (auto all : {&product.left, &product.right})
    for (u32 address : *all) block.shared.end_matrix_read(address, 2, warp);
}

void fence(ThreadBlock&, Warp&, const Instruction&, Mask) {}

void commit(ThreadBlock&, Warp& warp, const Instruction&, Mask) { warp.products.commit(); }

void wait(ThreadBlock& block, Warp& warp, const Instruction& in, Mask) {
  warp.products.wait(warp.get(in.operands[0], 0), [&](const WarpgroupProduct& product) {
    const bool is_bfloat = product.instruction->words.back() == "bf16";
    is_bfloat ? finish<Bfloat>(block, warp, product) : finish<Half>(block, warp, product);
  });
}

}  // namespace

void decode_warpgroup(Instruction& in) {
  if (in.begins_with("wgmma", "fence")) in.execute = fence;
  if (in.begins_with("wgmma", "commit_group")) in.execute = commit;
  if (in.begins_with("wgmma", "wait_group")) in.execute = wait;
  if (!in.begins_with("wgmma", "mma_async") || in.type != Type::F32) return;
  const std::string& shape = in.words[4];  // as in m64n128k16
  const size_t columns = shape.find('n'), depth = shape.find('k');
  in.count = std::stoi(shape.substr(columns + 1, depth - columns - 1));
  const bool is_known = in.words.back() == "bf16" || in.words.back() == "f16";
  if (is_known && shape.substr(depth + 1) == "16") in.execute = begin;
}

}  // namespace ptx
