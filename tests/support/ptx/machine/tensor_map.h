// Tensor map: the box of a tensor that one copy brings, as `tensor_map.py` encodes it.
#pragma once
#include "numbers.h"

namespace ptx {

struct TensorMap {
  static constexpr u32 MAGIC = 0x7a7a1234;
  static constexpr int MOST_DIMENSIONS = 5;

  u32 magic, rank;
  u64 base;
  u32 element_bytes;
  u32 swizzle;  // 16-byte pieces within 32, 64 or 128 bytes: 1, 2, 3; none: 0
  u64 sizes[MOST_DIMENSIONS];
  u64 strides[MOST_DIMENSIONS - 1];  // in bytes, of all dimensions but the first
  u32 box[MOST_DIMENSIONS];

  u64 num_elements() const {
    u64 product = 1;
    for (u32 i = 0; i < rank; i++) product *= box[i];
    return product;
  }
  u64 bytes() const { return num_elements() * element_bytes; }
};

// Moves 16-byte pieces as hardware does, by bits 7 and up; `bits`: 3 for a pattern of 128 bytes.
inline u32 swizzled(u32 address, int bits) {
  return address ^ (((address >> 7) & ((1u << bits) - 1)) << 4);
}

}  // namespace ptx
