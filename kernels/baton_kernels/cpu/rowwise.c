// Row-wise passes between the matrix products of a decoder layer: RMSNorm, SiLU-and-multiply and
// rotary embedding.
//
// A row is computed by one thread, in the same order whatever else is in the batch: an output is
// bitwise the same in any batch. Everything is computed in float32; results are rounded to bfloat16
// where separate operations in that dtype would.

#include <math.h>
#include <stdint.h>

#include "bfloat16.h"

#define INLINE static inline __attribute__((always_inline))
#define MIN_NUMBERS 16384  // of a call, for more than one thread

// The arguments of calls, in the order of the structures in rowwise.py. Strides are in numbers.

typedef struct {
  const void* x;       // [num_rows, num_heads, width], of which heads are adjacent
  const void* weight;  // [width]
  void* out;           // as x, which it may be
  int64_t num_rows, num_heads, width, stride, out_stride, num_threads;
  float eps;
} Norm;

typedef struct {
  const void* gate_up;  // [num_rows, 2 * width], the gate first
  void* out;            // [num_rows, width]
  int64_t num_rows, width, num_threads;
} Activation;

typedef struct {
  void* heads;               // [num_rows, num_heads, dim], to rotate in place
  const int64_t* positions;  // [num_rows]
  const void* table;         // [max_len, dim / 2, 2], cosine and sine of each pair by position
  int64_t num_rows, num_heads, dim, stride, num_threads;
  int64_t is_adjacent;  // numbers 2i and 2i + 1 of a head are a pair, else i and i + dim / 2
} Turn;

// The result of e ** x for x <= 0; 0 below -87.
INLINE float exponential(float x) {
  float clamped = x > -87.0f ? x : -87.0f;
  float shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2 ** 23: rounds to an integer
  float whole = shifted - 12582912.0f;
  float part = clamped - whole * 0.693359375f;  // ln 2 in two parts, the first with few digits
  part = part + whole * 2.12194440e-4f;
  float y = 1.9875691500e-4f;
  y = y * part + 1.3981999507e-3f;
  y = y * part + 8.3334519073e-3f;
  y = y * part + 4.1665795894e-2f;
  y = y * part + 1.6666665459e-1f;
  y = y * part + 5.0000001201e-1f;
  y = y * part * part + part + 1.0f;
  int32_t bits, exponent;
  memcpy(&bits, &y, 4);
  memcpy(&exponent, &shifted, 4);
  bits += (uint32_t)exponent << 23;
  memcpy(&y, &bits, 4);
  return x > -87.0f ? y : 0.0f;
}

INLINE float silu(float x) {
  float e = exponential(-fabsf(x));
  return x * ((x < 0.0f ? e : 1.0f) / (1.0f + e));
}

#define NUMBER float
#define NAMED(name) name##_float32
#define READ(number) (number)
#define MADE(number) (number)
#include "rowwise_of_dtype.h"

#define NUMBER BFloat16
#define NAMED(name) name##_bfloat16
#define READ(number) number_of_bfloat16(number)
#define MADE(number) bfloat16_of(number)
#include "rowwise_of_dtype.h"
