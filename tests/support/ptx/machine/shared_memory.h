// Shared memory of a block, with what is known of each byte: who wrote it, who read it, and which
// asynchronous operations are unfinished there.
#pragma once
#include "reports.h"
#include "warp.h"

namespace ptx {

// An access as reports name it.
struct Access {
  const ThreadBlock& block;
  const Warp& warp;
  const Instruction& instruction;
  int lane;
  std::string where() const;
};

class SharedMemory {
 public:
  SharedMemory(u32 size, int num_warps, bool is_watched, Reports& reports);

  u8* at(u32 address) { return &bytes_[address - SHARED_BASE]; }

  // Each refuses what is out of bounds or not aligned, and reports races and unfinished copies.
  void read(u32 address, u32 size, const Access& access) { check_read(address, size, access, false); }
  void read_by_matrix_unit(u32 address, u32 size, const Access& access);
  void write(u32 address, u32 size, const Access& access, const u8* values);

  // A matrix unit reads until it is waited for; a copy writes until it is.
  void begin_matrix_read(u32 address, u32 size);
  void end_matrix_read(u32 address, u32 size, const Warp& warp);
  void begin_copy(u32 address, u32 size, const Access& access, bool is_of_warp);
  void end_copy(u32 address, u32 size, int writer, u32 clock, const Instruction& instruction);

 private:
  struct Byte {
    u32 clock = 0;             // of the writer, when it wrote
    i32 line = 0;              // of the instruction that wrote
    u16 matrix_reads = 0;      // unfinished
    u8 copies = 0;             // unfinished
    i8 writer = -1;            // warp, or number of warps + mbarrier
    bool is_written = false;
    bool is_written_by_warp = false;  // by a store, which the matrix unit sees after a fence alone
  };
  std::vector<u8> bytes_;
  std::vector<Byte> known_;
  std::vector<u32> reads_;  // [size, num_warps]: the reader's clock
  int num_warps_;
  bool is_watched_;
  Reports& reports_;

  void check_bounds(u32 address, u32 size, const Access& access) const;
  void check_read(u32 address, u32 size, const Access& access, bool is_by_matrix_unit);
  void check_write(u32 address, u32 size, const Access& access, const u8* values);
  bool is_unordered(const Byte& byte, const Warp& warp) const;
  std::string name_of(int writer) const;
};

}  // namespace ptx
