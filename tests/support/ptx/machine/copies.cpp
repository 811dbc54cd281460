// Instructions of asynchronous copies: cp.async in groups, tensor copies (TMA), mbarriers.
#include "thread_block.h"

namespace ptx {
namespace {

void copy_async(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    const Access access{block, warp, in, lane};
    const u32 target = warp.shared_address(in.operands[0], lane);
    const u64 source = warp.address(in.operands[1], lane);
    const int size = int(warp.get(in.operands[2], lane));
    const int given = in.operands.size() > 3 ? int(warp.get(in.operands[3], lane)) : size;
    if (given > size) throw Error("cp.async reads more than it writes: " + access.where());
    if (target % size || (given && source % size))
      throw Error("cp.async is not aligned: " + access.where());
    if (given) block.global.access(source, given == size ? size : 1, Kind::Read, access);
    block.shared.begin_copy(target, size, access, true);
    warp.copies.open.push_back({target, source, size, given, &in});
  });
}

void commit_copies(ThreadBlock&, Warp& warp, const Instruction&, Mask) { warp.copies.commit(); }

void wait_for_copies(ThreadBlock& block, Warp& warp, const Instruction& in, Mask) {
  const size_t allowed = in.operands.empty() ? 0 : warp.get(in.operands[0], 0);
  if (in.has("wait_all")) warp.copies.commit();
  warp.copies.wait(allowed, [&](AsyncCopy& copy) { block.land(copy, warp); });
}

void copy_tensor(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    const Access access{block, warp, in, lane};
    TensorCopy copy{&in, warp.index, {}, {}, 0, 0};
    copy.target = warp.shared_address(in.operands[0], lane);
    copy.mbarrier = warp.shared_address(in.operands[2], lane);
    const Operand& map = in.operands[1];
    memcpy(&copy.map, reinterpret_cast<void*>(warp.address(map, lane)), sizeof copy.map);
    if (copy.map.magic != TensorMap::MAGIC)
      throw Error("there is no tensor map: " + access.where());
    for (auto& part : map.parts[0].parts) copy.coordinates.push_back(i32(warp.get(part, lane)));
    if (copy.target % 128) throw Error("target of a tensor copy is not aligned: " + access.where());
    block.mbarrier(copy.mbarrier, access);
    block.shared.begin_copy(copy.target, u32(copy.map.bytes()), access, false);
    block.begin(copy);
  });
}

void initialize(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  const u8 content[8] = {};
  each_lane(mask, [&](int lane) {
    const u32 address = warp.shared_address(in.operands[0], lane);
    block.shared.write(address, sizeof content, {block, warp, in, lane}, content);
    block.initialize(address, int(warp.get(in.operands[1], lane)));
  });
}

void invalidate(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) {
    const u32 address = warp.shared_address(in.operands[0], lane);
    block.mbarrier(address, {block, warp, in, lane}).is_valid = false;
  });
}

void arrive(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  const size_t at = in.operands[0].kind == Operand::Address ? 0 : 1;
  each_lane(mask, [&](int lane) {
    auto& barrier = block.mbarrier(
        warp.shared_address(in.operands[at], lane), {block, warp, in, lane});
    const bool announces = in.has("expect_tx");
    block.arrive(barrier, warp, announces ? i64(warp.get(in.operands[at + 1], lane)) : 0);
  });
}

void try_wait(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  bool all_over = true;
  warp.waits_for = warp.shared_address(in.operands[1], __builtin_ctz(mask));
  each_lane(mask, [&](int lane) {
    auto& barrier = block.mbarrier(
        warp.shared_address(in.operands[1], lane), {block, warp, in, lane});
    const bool is_over = (barrier.phase & 1) != (warp.get(in.operands[2], lane) & 1);
    warp.row(in.operands[0])[lane] = is_over;
    all_over = all_over && is_over;
    if (!is_over) return;
    warp.clock.join(barrier.clock);
    warp.fence.join(barrier.fence);
  });
  warp.num_spins = all_over ? 0 : warp.num_spins + 1;
}

}  // namespace

void decode_copies(Instruction& in) {
  if (in.begins_with("cp", "async")) {
    if (in.has("commit_group") && !in.has("bulk")) in.execute = commit_copies;
    const bool is_wait = in.has("wait_group") || in.has("wait_all");
    if (is_wait && !in.has("bulk")) in.execute = wait_for_copies;
    if (in.has("cg") || in.has("ca")) in.execute = copy_async;
    const bool is_load = in.words.size() > 5 && in.words[5].rfind("shared", 0) == 0;
    if (in.has("bulk") && in.has("tensor") && is_load) in.execute = copy_tensor;
  }
  if (in.begins_with("mbarrier", "init")) in.execute = initialize;
  if (in.begins_with("mbarrier", "inval")) in.execute = invalidate;
  if (in.begins_with("mbarrier", "arrive")) in.execute = arrive;
  if (in.begins_with("mbarrier", "try_wait")) in.execute = try_wait;
  if (in.begins_with("mbarrier", "test_wait")) in.execute = try_wait;
}

}  // namespace ptx
