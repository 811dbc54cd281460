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
#include "vectors.h"

#if LANES == 16
#define GROUP 12      // rows
#define MAX_DIRECT 8  // rows of a group that are read where they lie
#else
#define GROUP 6
#define MAX_DIRECT 5
#endif

#define VECTORS 2
#define PANEL (VECTORS * LANES)
#define PART 128                // units
#define ROWS_AT_ONCE (16 * GROUP)  // whose sums stay in the first-level cache
#define MANY 65536              // units of rows, for more than one thread to arrange them
#define AHEAD 2048              // bytes that are fetched early where two products share a unit

#define UNROLLED _Pragma("GCC unroll 16")

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

INLINE BitVector units_at(const Unit* source) { return *(const BitVector*)source; }

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

INLINE void add_products_of_row(Vector* sums, Vector of_row, const Vector* of_panel) {
  UNROLLED for (int v = 0; v < VECTORS; v++) sums[v] += of_row * of_panel[v];
}

// For each format `add_products` adds to the sums of rows, which are `step` numbers apart, the
// products of a unit of each of them with that of each output of a panel.

INLINE void add_products_float32(Vector sums[][VECTORS], const float* rows, int64_t step,
                                 const int num_rows, const Unit* panel) {
  Vector units[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++) units[v] = held((Vector)units_at(panel + v * LANES));
  UNROLLED for (int r = 0; r < num_rows; r++)
    add_products_of_row(sums[r], all(rows[r * step]), units);
}

#define NAMED(name) name##_float32
#define NUMBER float
#define NUMBERS_PER_UNIT 1
#define READ(number) (number)
#define MADE(number) (number)
#include "linear_of_format.h"

INLINE void add_products_bfloat16_weight(Vector sums[][VECTORS], const float* rows, int64_t step,
                                         const int num_rows, const Unit* panel) {
  Vector numbers[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++) {
    __builtin_prefetch((const char*)(panel + v * LANES) + AHEAD);
    numbers[v] = held(first_of(units_at(panel + v * LANES)));
  }
  UNROLLED for (int r = 0; r < num_rows; r++)
    add_products_of_row(sums[r], all(rows[r * step]), numbers);
  UNROLLED for (int v = 0; v < VECTORS; v++)
    numbers[v] = held(second_of(units_at(panel + v * LANES)));
  UNROLLED for (int r = 0; r < num_rows; r++)
    add_products_of_row(sums[r], all(rows[r * step + 1]), numbers);
}

#define NAMED(name) name##_bfloat16_weight
#define NUMBER float
#define NUMBERS_PER_UNIT 2
#define READ(number) (number)
#define MADE(number) (number)
#include "linear_of_format.h"

#if defined(__AVX512BF16__)
INLINE void add_products_bfloat16(Vector sums[][VECTORS], const BFloat16* rows, int64_t step,
                                  const int num_rows, const Unit* panel) {
  __m512bh pairs[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++)
    pairs[v] = (__m512bh)held((Vector)units_at(panel + v * LANES));
  UNROLLED for (int r = 0; r < num_rows; r++) {
    Unit unit;
    memcpy(&unit, rows + r * step, sizeof unit);
    __m512bh of_row = (__m512bh)_mm512_set1_epi32(unit);
    UNROLLED for (int v = 0; v < VECTORS; v++)
      sums[r][v] = (Vector)_mm512_dpbf16_ps((__m512)sums[r][v], pairs[v], of_row);
  }
}

#define NAMED(name) name##_bfloat16
#define NUMBER BFloat16
#define NUMBERS_PER_UNIT 2
#define READ(number) number_of_bfloat16(number)
#define MADE(number) bfloat16_of(number)
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
