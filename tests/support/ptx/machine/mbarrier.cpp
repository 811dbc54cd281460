// mbarriers of a block, and the asynchronous copies that complete on them or on a wait.
#include "thread_block.h"

namespace ptx {

void ThreadBlock::initialize(u32 address, int expected) {
  const bool is_new = !mbarriers_.count(address);
  if (is_new && mbarriers_.size() == MOST_MBARRIERS)
    throw Error(name() + " has more than " + std::to_string(MOST_MBARRIERS) + " mbarriers");
  Mbarrier made;
  made.is_valid = true;
  made.expected = made.pending = expected;
  made.clock_index = is_new ? int(mbarriers_.size()) : mbarriers_[address].clock_index;
  made.clock = made.fence = made.next_clock = made.next_fence =
      Clock(launch_.num_warps + MOST_MBARRIERS);
  mbarriers_[address] = made;
}

Mbarrier& ThreadBlock::mbarrier(u32 address, const Access& access) {
  auto found = mbarriers_.find(address);
  if (found == mbarriers_.end() || !found->second.is_valid)
    throw Error("there is no mbarrier at " + std::to_string(address) + ": " + access.where());
  return found->second;
}

void ThreadBlock::arrive(Mbarrier& barrier, Warp& warp, i64 bytes) {
  barrier.next_clock.join(warp.clock);
  barrier.next_fence.join(warp.fence);
  warp.clock.tick(warp.index);
  barrier.bytes += bytes;
  barrier.pending--;
  end_phase(barrier);
}

void ThreadBlock::end_phase(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.phase++;
  barrier.pending = barrier.expected;
  barrier.clock = barrier.next_clock;
  barrier.fence = barrier.next_fence;
  copy_clocks_[barrier.clock_index]++;
}

void ThreadBlock::land(int index) {
  const TensorCopy copy = std::move(copies_[index]);
  copies_.erase(copies_.begin() + index);
  const TensorMap& map = copy.map;
  const Access access{*this, *by_index_[copy.warp], *copy.instruction, 0};
  Mbarrier& barrier = mbarrier(copy.mbarrier, access);
  const int writer = launch_.num_warps + barrier.clock_index;
  const u32 clock = copy_clocks_[barrier.clock_index];
  for (u64 element = 0; element < map.num_elements(); element++) {
    u64 rest = element, source = map.base;
    bool is_inside = true;
    for (u32 i = 0; i < map.rank; i++) {
      const i64 place = copy.coordinates[i] + i64(rest % map.box[i]);
      rest /= map.box[i];
      is_inside = is_inside && place >= 0 && place < i64(map.sizes[i]);
      source += u64(place) * (i ? map.strides[i - 1] : map.element_bytes);
    }
    const u32 target = swizzled(copy.target + u32(element) * map.element_bytes, int(map.swizzle));
    if (is_inside && !global.contains(source, map.element_bytes))
      throw Error("tensor copy reads out of bounds of global memory: " + access.where());
    if (is_inside) memcpy(shared.at(target), reinterpret_cast<u8*>(source), map.element_bytes);
    else memset(shared.at(target), 0, map.element_bytes);
    shared.end_copy(target, map.element_bytes, writer, clock, *copy.instruction);
  }
  barrier.next_clock.reach(writer, clock);
  barrier.bytes -= i64(map.bytes());
  end_phase(barrier);
}

void ThreadBlock::land(AsyncCopy& copy, const Warp& warp) {
  memset(shared.at(copy.target), 0, copy.size);
  memcpy(shared.at(copy.target), reinterpret_cast<u8*>(copy.source), copy.source_size);
  shared.end_copy(copy.target, copy.size, warp.index, warp.clock[warp.index], *copy.instruction);
}

}  // namespace ptx
