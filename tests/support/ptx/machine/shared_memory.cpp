#include "shared_memory.h"

namespace ptx {

SharedMemory::SharedMemory(u32 size, int num_warps, bool is_watched, Reports& reports)
    : bytes_(size + 16, 0xcd), num_warps_(num_warps), is_watched_(is_watched), reports_(reports) {
  if (!is_watched) return;
  known_.resize(size);
  reads_.resize(size_t(size) * num_warps);
}

void SharedMemory::check_bounds(u32 address, u32 size, const Access& access) const {
  u32 limit = u32(bytes_.size()) - 16;
  if (address < SHARED_BASE || u64(address) + size > u64(SHARED_BASE) + limit)
    throw Error("access out of bounds of shared memory, to " + std::to_string(size) +
                " bytes at " + std::to_string(i64(address) - SHARED_BASE) + " of " +
                std::to_string(limit) + ": " + access.where());
}

std::string SharedMemory::name_of(int writer) const {
  return writer < num_warps_ ? "warp " + std::to_string(writer) : "a tensor copy";
}

// Whether the last write of a byte is not ordered before what the warp does now.
bool SharedMemory::is_unordered(const Byte& byte, const Warp& warp) const {
  return byte.writer >= 0 && byte.writer != warp.index && warp.clock[byte.writer] < byte.clock;
}

void SharedMemory::check_read(u32 address, u32 size, const Access& access, bool is_by_matrix_unit) {
  check_bounds(address, size, access);
  if (!is_watched_) return;
  const Warp& warp = access.warp;
  const auto line = [&] { return std::to_string(access.instruction.line); };
  for (u32 i = address - SHARED_BASE; i < address - SHARED_BASE + size; i++) {
    const Byte& byte = known_[i];
    const auto place = [&] { return "shared byte " + std::to_string(i); };
    const auto writer = [&] {
      return name_of(byte.writer) + " (line " + std::to_string(byte.line) + ")";
    };
    if (byte.copies)
      reports_.add("copy" + line(), "read of " + place() + " before the asynchronous copy to it was "
                   "waited for: " + access.where());
    else if (!byte.is_written)
      reports_.add("unwritten" + line(), "read of " + place() + ", which was not written: " +
                   access.where());
    if (is_unordered(byte, warp))
      reports_.add("race" + line() + "/" + std::to_string(byte.line), "race: read of " + place() +
                   ", written by " + writer() + " without a barrier between: " + access.where());
    else if (is_by_matrix_unit && byte.is_written_by_warp && warp.fence[byte.writer] < byte.clock)
      reports_.add("fence" + line(), "wgmma reads " + place() + ", written by " + writer() +
                   " without a proxy fence between: " + access.where());
    reads_[size_t(i) * num_warps_ + warp.index] = warp.clock[warp.index];
  }
}

void SharedMemory::check_write(u32 address, u32 size, const Access& access, const u8* values) {
  check_bounds(address, size, access);
  if (!is_watched_) return;
  const Warp& warp = access.warp;
  const auto line = [&] { return std::to_string(access.instruction.line); };
  for (u32 k = 0, i = address - SHARED_BASE; k < size; k++, i++) {
    const Byte& byte = known_[i];
    const auto place = [&] { return "shared byte " + std::to_string(i); };
    if (byte.copies)
      reports_.add("copy" + line(), "write of " + place() + " before the asynchronous copy to it "
                   "was waited for: " + access.where());
    // Warps that hold the same elements may write the same values.
    if (is_unordered(byte, warp) && !(values && values[k] == bytes_[i]))
      reports_.add("race" + line() + "/" + std::to_string(byte.line), "race: write of " + place() +
                   ", written by " + name_of(byte.writer) + " (line " + std::to_string(byte.line) +
                   ") without a barrier between: " + access.where());
    if (byte.matrix_reads)
      reports_.add("matrix" + line(), "write of " + place() + ", which an unfinished wgmma reads: " +
                   access.where());
    const u32* reads = &reads_[size_t(i) * num_warps_];
    for (int other = 0; other < num_warps_; other++)
      if (other != warp.index && warp.clock[other] < reads[other])
        reports_.add("overwrite" + line(), "race: write of " + place() + ", read by warp " +
                     std::to_string(other) + " without a barrier between: " + access.where());
  }
}

void SharedMemory::read_by_matrix_unit(u32 address, u32 size, const Access& access) {
  check_read(address, size, access, true);
}

void SharedMemory::write(u32 address, u32 size, const Access& access, const u8* values) {
  check_write(address, size, access, values);
  if (is_watched_)
    for (u32 i = address - SHARED_BASE; i < address - SHARED_BASE + size; i++) {
      Byte& byte = known_[i];
      byte.clock = access.warp.clock[access.warp.index];
      byte.line = access.instruction.line;
      byte.writer = i8(access.warp.index);
      byte.is_written = byte.is_written_by_warp = true;
    }
  memcpy(at(address), values, size);
}

void SharedMemory::begin_matrix_read(u32 address, u32 size) {
  if (is_watched_)
    for (u32 i = 0; i < size; i++) known_[address - SHARED_BASE + i].matrix_reads++;
}

void SharedMemory::end_matrix_read(u32 address, u32 size, const Warp& warp) {
  if (!is_watched_) return;
  for (u32 i = address - SHARED_BASE; i < address - SHARED_BASE + size; i++) {
    known_[i].matrix_reads--;
    reads_[size_t(i) * num_warps_ + warp.index] = warp.clock[warp.index];
  }
}

void SharedMemory::begin_copy(u32 address, u32 size, const Access& access, bool is_of_warp) {
  check_write(address, size, access, nullptr);
  if (!is_watched_) return;
  for (u32 i = address - SHARED_BASE; i < address - SHARED_BASE + size; i++) {
    Byte& byte = known_[i];
    byte.copies++;
    if (!is_of_warp) continue;
    byte.clock = access.warp.clock[access.warp.index];
    byte.line = access.instruction.line;
    byte.writer = i8(access.warp.index);
    byte.is_written_by_warp = false;
  }
}

void SharedMemory::end_copy(
    u32 address, u32 size, int writer, u32 clock, const Instruction& instruction) {
  if (!is_watched_) return;
  for (u32 i = address - SHARED_BASE; i < address - SHARED_BASE + size; i++) {
    Byte& byte = known_[i];
    byte.copies--;
    byte.clock = clock;
    byte.line = instruction.line;
    byte.writer = i8(writer);
    byte.is_written = true;
    byte.is_written_by_warp = false;
  }
}

}  // namespace ptx
