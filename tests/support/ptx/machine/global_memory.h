// Global memory: the tensors that a launch may access, and who accessed each byte in it.
#pragma once
#include <array>
#include <memory>
#include <unordered_map>

#include "shared_memory.h"

namespace ptx {

// Storage of a tensor. The C interface passes these as they are.
struct Buffer {
  u64 base, size;
  u64 before;      // in: the launch before this one read it (1) or wrote it (2), or neither (0)
  u64 is_written;  // out: this launch wrote it
};

enum class Kind { Read, Write, Atomic };

class GlobalMemory {
 public:
  // `buffers`: by ascending address.
  GlobalMemory(Buffer* buffers, int num_buffers, const Program& program, bool is_watched,
               Reports& reports)
      : buffers_(buffers), num_buffers_(num_buffers), program_(program), is_watched_(is_watched),
        reports_(reports) {}

  // Refuses an access that is not aligned or not in one tensor; reports races between programs,
  // between warps of one, and with the launch before. `values`: those that are written.
  u8* access(u64 address, u32 size, Kind kind, const Access& access, const u8* values = nullptr);

  bool contains(u64 address, u32 size) { return find(address, size) || is_constant(address, size); }

 private:
  struct Byte {
    u32 writer = 0;  // block + 1
    u32 clock = 0;
    u32 reader = 0;  // block + 1, or `MANY`
    u8 warp = 0;
    bool is_atomic = false;
  };
  static constexpr u32 MANY = ~0u;
  static constexpr i64 NEAR = 65536;  // bytes from a tensor, for the report
  static constexpr int PAGE_BITS = 9;
  using Page = std::array<Byte, 1 << PAGE_BITS>;

  Buffer* buffers_;
  int num_buffers_;
  const Program& program_;
  bool is_watched_;
  Reports& reports_;
  Buffer* last_ = nullptr;
  std::unordered_map<u64, std::unique_ptr<Page>> pages_;
  u64 last_page_ = ~u64(0);
  Page* page_ = nullptr;

  Buffer* find(u64 address, u32 size);
  bool is_constant(u64 address, u32 size) const;
  Byte& known(u64 address);
  void watch(u64 address, Kind kind, const Access& access, bool is_same_value);
};

}  // namespace ptx
