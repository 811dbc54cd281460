// Linear layers on a CPU: products of rows with a packed weight, which is read once a call.
//
// A weight, [out_features, in_features], is packed in panels of PANEL outputs. A panel is an array of
// units, [num_units][PANEL], where a unit is what 32 bits hold of the inputs of one output: a float,
// or two consecutive numbers of bfloat16. Outputs are the lanes of vectors: a panel is read in the
// order of memory, the units of rows are broadcast, and no sum goes across lanes.
//
// Rows are computed in groups, whose sums fit into registers, and units in parts, of which a part of
// a panel fits into the first-level cache. A sum begins anew with each part and is added to that of
// those before. So an output is summed in the same order however many rows there are: it is bitwise
// the same in any batch.

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#define GROUP 12     // rows
#define MAX_DIRECT 8  // rows of a group that are read where they lie
#else
#define LANES 8
#define GROUP 6
#define MAX_DIRECT 5
#endif

#define VECTORS 2
#define PANEL (VECTORS * LANES)
#define PART 128                // units
#define BLOCK_ROWS (16 * GROUP)  // whose sums stay in the first-level cache
#define MANY 65536              // units of rows, for more than one thread to arrange them
#define AHEAD 2048              // bytes of a panel that are fetched before they are read

#define INLINE static inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 16")

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t BitVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t Unit;

// The arguments of a call, in the order of `_Call` in linear.py.
typedef struct {
  const void* rows;       // [num_rows, in_features]
  const Unit* weight;     // [num_panels, num_units, PANEL]
  const void* bias;       // [out_features]; NULL: none
  const void* residual;   // [num_rows, out_features], to add; NULL: none
  void* out;              // [num_rows, out_features]
  void* arranged;         // memory for `baton_linear_arranged_rows` rows
  int64_t num_rows, row_stride, num_units, out_features, num_threads;
} Call;

INLINE Vector load(const void* source) { return *(const Vector*)source; }

// Keeps a vector in a register: each product with it would read it from memory again.
INLINE Vector held(Vector x) {
#if defined(__AVX2__)
  __asm__("" : "+v"(x));
#endif
  return x;
}

INLINE Vector all(float number) { return number - (Vector){0}; }

INLINE float number_of(Unit unit) {
  float number;
  memcpy(&number, &unit, 4);
  return number;
}

// The first or second number of bfloat16 in each unit.
INLINE Vector first_of(BitVector units) { return (Vector)(units << 16); }
INLINE Vector second_of(BitVector units) { return (Vector)(units & 0xffff0000u); }

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows that are arranged by groups, and zeros that fill the last one: of a few rows more, there are
// pointers to each.
int64_t baton_linear_arranged_rows(int64_t num_rows) {
  int64_t left = num_rows % GROUP;
  return num_rows - left + (left > MAX_DIRECT ? GROUP : 0);
}

// Each defines a function `baton_linear_<name>`. ADD_PRODUCTS adds to the sums of rows, which are
// `step` numbers apart, the products of a unit of each of them with that of each output of a panel.

#define NAMED(name) name##_float32
#define NUMBER float
#define NUMBERS_PER_UNIT 1
#define READ(number) (number)
#define MADE(number) (number)
#define ADD_PRODUCTS(sums, rows, step, num_rows, units)                                           \
  do {                                                                                      \
    Vector of_panel[VECTORS];                                                               \
    UNROLLED for (int v = 0; v < VECTORS; v++) of_panel[v] = held(load(units + v * LANES)); \
    UNROLLED for (int r = 0; r < num_rows; r++) {                                           \
      Vector of_row = all(rows[r * step]);                                                        \
      UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] += of_row * of_panel[v];        \
    }                                                                                       \
  } while (0)
#include "linear_of_format.h"

#define NAMED(name) name##_bfloat16_weight
#define NUMBER float
#define NUMBERS_PER_UNIT 2
#define READ(number) (number)
#define MADE(number) (number)
#define ADD_PRODUCTS(sums, rows, step, num_rows, units)                                            \
  do {                                                                                       \
    Vector of_panel[VECTORS];                                                                \
    UNROLLED for (int v = 0; v < VECTORS; v++)                                               \
      of_panel[v] = held(first_of(*(const BitVector*)(units + v * LANES)));                  \
    UNROLLED for (int r = 0; r < num_rows; r++) {                                            \
      Vector of_row = all(rows[r * step]);                                                       \
      UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] += of_row * of_panel[v];         \
    }                                                                                        \
    UNROLLED for (int v = 0; v < VECTORS; v++)                                               \
      of_panel[v] = held(second_of(*(const BitVector*)(units + v * LANES)));                 \
    UNROLLED for (int r = 0; r < num_rows; r++) {                                            \
      Vector of_row = all(rows[r * step + 1]);                                                       \
      UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] += of_row * of_panel[v];         \
    }                                                                                        \
  } while (0)
#include "linear_of_format.h"

#if defined(__AVX512BF16__)
#define NAMED(name) name##_bfloat16
#define NUMBER BFloat16
#define NUMBERS_PER_UNIT 2
#define READ(number) number_of_bfloat16(number)
#define MADE(number) bfloat16_of(number)
#define ADD_PRODUCTS(sums, rows, step, num_rows, units)                                           \
  do {                                                                                      \
    Vector of_panel[VECTORS];                                                               \
    UNROLLED for (int v = 0; v < VECTORS; v++) of_panel[v] = held(load(units + v * LANES)); \
    UNROLLED for (int r = 0; r < num_rows; r++) {                                           \
      Unit of_row;                                                                          \
      memcpy(&of_row, rows + r * step, sizeof of_row);                                              \
      __m512bh pair = (__m512bh)_mm512_set1_epi32(of_row);                                  \
      UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] = (Vector)_mm512_dpbf16_ps(     \
          (__m512)sums[r][v], (__m512bh)of_panel[v], pair);                                 \
    }                                                                                       \
  } while (0)
#include "linear_of_format.h"
#endif

int64_t baton_linear_panel(void) { return PANEL; }

int baton_linear_multiplies_bfloat16(void) {
#if defined(__AVX512BF16__)
  return 1;
#else
  return 0;
#endif
}
