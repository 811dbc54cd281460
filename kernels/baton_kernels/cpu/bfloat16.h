// Numbers of bfloat16 as float32 and back.

#include <stdint.h>
#include <string.h>

typedef uint16_t BFloat16;

static inline __attribute__((always_inline)) float number_of_bfloat16(BFloat16 bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float number;
  memcpy(&number, &wide, 4);
  return number;
}

// To the nearest, ties to even.
static inline __attribute__((always_inline)) BFloat16 bfloat16_of(float number) {
  uint32_t bits;
  memcpy(&bits, &number, 4);
  uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return number == number ? rounded : 0x7fc0;
}
