#include "global_memory.h"

#include "thread_block.h"

namespace ptx {

Buffer* GlobalMemory::find(u64 address, u32 size) {
  const auto holds = [&](const Buffer& each) {
    return address >= each.base && address + size <= each.base + each.size;
  };
  if (last_ && holds(*last_)) return last_;
  for (int i = 0; i < num_buffers_; i++)
    if (holds(buffers_[i])) return last_ = &buffers_[i];
  return nullptr;
}

bool GlobalMemory::is_constant(u64 address, u32 size) const {
  for (auto& each : program_.constants) {
    u64 base = u64(each->data.data());
    if (address >= base && address + size <= base + each->data.size()) return true;
  }
  return false;
}

GlobalMemory::Byte& GlobalMemory::known(u64 address) {
  u64 number = address >> PAGE_BITS;
  if (number != last_page_) {
    auto& page = pages_[number];
    if (!page) page = std::make_unique<Page>();
    page_ = page.get();
    last_page_ = number;
  }
  return (*page_)[address & ((1 << PAGE_BITS) - 1)];
}

u8* GlobalMemory::access(
    u64 address, u32 size, Kind kind, const Access& access, const u8* values) {
  Buffer* buffer = find(address, size);
  if (!buffer) {
    if (kind == Kind::Read && is_constant(address, size)) return reinterpret_cast<u8*>(address);
    std::string near;
    for (int i = 0; i < num_buffers_; i++) {
      const i64 from = i64(address - buffers_[i].base), bytes = i64(buffers_[i].size);
      if (from >= -NEAR && from < bytes + NEAR)
        near += ", byte " + std::to_string(from) + " of a tensor of " + std::to_string(bytes);
    }
    throw Error("access out of bounds of global memory, to " + std::to_string(size) + " bytes" +
                near + ": " + access.where());
  }
  if (address % size)
    throw Error("global access of " + std::to_string(size) + " bytes is not aligned: " +
                access.where());
  buffer->is_written |= kind != Kind::Read;
  if (!is_watched_) return reinterpret_cast<u8*>(address);
  const bool is_in_conflict = kind == Kind::Read ? buffer->before == 2 : buffer->before != 0;
  if (is_in_conflict && !access.warp.waited_for_launch)
    reports_.add("dependent" + std::to_string(access.instruction.line),
                 "access to a tensor of the launch before, without griddepcontrol.wait: " +
                 access.where());
  for (u32 i = 0; i < size; i++)
    watch(address + i, kind, access, values && values[i] == *reinterpret_cast<u8*>(address + i));
  return reinterpret_cast<u8*>(address);
}

void GlobalMemory::watch(u64 address, Kind kind, const Access& access, bool is_same_value) {
  Byte& byte = known(address);
  const u32 self = access.block.id() + 1;
  const Warp& warp = access.warp;
  const bool is_pair_of_atomics = kind == Kind::Atomic && byte.is_atomic;
  const auto line = [&] { return std::to_string(access.instruction.line); };
  if (byte.writer && !is_pair_of_atomics && !is_same_value) {
    if (byte.writer != self)
      reports_.add("programs" + line(), "race between programs on a global byte, written by "
                   "program " + std::to_string(byte.writer - 1) + ": " + access.where());
    // Of warps that hold the same elements one stores, and each may load them again.
    else if (kind != Kind::Read && byte.warp != warp.index && warp.clock[byte.warp] < byte.clock)
      reports_.add("warps" + line(), "race between warps on a global byte, written by warp " +
                   std::to_string(byte.warp) + ": " + access.where());
  }
  if (kind == Kind::Read) {
    byte.reader = !byte.reader || byte.reader == self ? self : MANY;
    return;
  }
  if (byte.reader && byte.reader != self && !is_pair_of_atomics)
    reports_.add("reader" + line(), "race: write of a global byte that another program reads: " +
                 access.where());
  byte.writer = self;
  byte.warp = u8(warp.index);
  byte.clock = warp.clock[warp.index];
  byte.is_atomic = kind == Kind::Atomic;
}

}  // namespace ptx
