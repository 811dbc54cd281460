// Linear layers on a CPU: products of rows with a packed weight, which is read once a call.
//
// A weight, [out_features, in_features], is packed in panels of PANEL outputs. A panel is an array of
// units, [num_units][PANEL], where a unit is what 32 bits hold of the inputs of one output: a float,
// two consecutive numbers of bfloat16, or codes of four inputs or eight. Outputs are the lanes of
// vectors: a panel is read in the order of memory, the units of rows are broadcast, and no sum goes
// across lanes.
//
// A code of 8 bits stands for a signed integer or is a number of float8 (e4m3), one of 4 bits stands
// for a number of the codebook. A number of the weight is that times the scale of its output and group
// of inputs, plus its minimum. What codes stand for is multiplied by the rows, the sum of a group by
// its scale.
//
// Rows are computed in tiles, whose sums fit into registers, and units in parts, of which a part of
// a panel fits into the first-level cache. A sum begins anew with each part, or group, and is added
// to that of those before. So an output is summed in the same order however many rows there are: it
// is bitwise the same in any batch.

#pragma GCC optimize("O2")  // as fast as O3, and compiled in two thirds of its time

#include <stdint.h>
#include <string.h>

#include "bfloat16.h"
#include "vectors.h"

#if LANES == 16
#define TILE 12       // rows
#define MAX_DIRECT 8  // rows of a tile that are read where they lie
#else
#define TILE 6
#define MAX_DIRECT 5
#endif

#define VECTORS 2
#define PANEL (VECTORS * LANES)
#define PART 128                 // units
#define ROWS_AT_ONCE (16 * TILE)  // whose sums stay in the first-level cache
#define MANY 65536               // units of rows, for more than one thread to arrange them
#define AHEAD 2048               // bytes that are fetched early where two products share a unit
#define CODEBOOK_SIZE 16

#define UNROLLED _Pragma("GCC unroll 16")

typedef uint32_t Unit;

// The arguments of a call, in the order of `_Call` in linear.py.
typedef struct {
  const void* rows;        // [num_rows, in_features]
  const Unit* weight;      // [num_panels, num_units, PANEL]
  const float* codebook;     // [CODEBOOK_SIZE], of codes of 4 bits
  const float* scales;     // [num_panels, num_groups, PANEL], of codes
  const float* minima;     // as the scales; NULL: they are 0
  const void* bias;        // [out_features]; NULL: none
  const void* residual;    // [num_rows, out_features], to add; NULL: none
  void* out;               // [num_rows, out_features]
  void* arranged;          // memory for `baton_linear_arranged_rows` rows
  float* group_sums;       // memory for sums of groups, [num_rows, num_groups]; NULL: no minima
  int64_t num_rows, row_stride, num_units, group_units, out_features, out_stride, num_threads;
} Call;

INLINE BitVector units_at(const Unit* source) { return *(const BitVector*)source; }

// The first or second number of bfloat16 in each unit.
INLINE Vector first_of(BitVector units) { return (Vector)(units << 16); }
INLINE Vector second_of(BitVector units) { return (Vector)(units & 0xffff0000u); }

INLINE float same(float number) { return number; }
INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Rows that are arranged by tiles, and zeros that fill the last one: of a few rows more, there are
// pointers to each.
int64_t baton_linear_arranged_rows(int64_t num_rows) {
  int64_t left = num_rows % TILE;
  return num_rows - left + (left > MAX_DIRECT ? TILE : 0);
}

// Sets the totals of rows, and of those that fill the last tile, to what minima add to them.
static void begin_totals(const Call* call, int64_t number, int64_t first_row, int64_t num_rows,
                         float* totals) {
  memset(totals, 0, (num_rows + TILE - 1) / TILE * TILE * PANEL * sizeof(float));
  if (call->minima == NULL) return;
  int64_t num_groups = call->num_units / call->group_units;
  const float* minima = call->minima + number * num_groups * PANEL;
  for (int64_t r = 0; r < num_rows; r++) {
    const float* sums = call->group_sums + (first_row + r) * num_groups;
    for (int v = 0; v < VECTORS; v++) {
      Vector total = {0};
      for (int64_t group = 0; group < num_groups; group++)
        total = multiplied_and_added(load(minima + group * PANEL + v * LANES), all(sums[group]),
                                     total);
      *(Vector*)(totals + r * PANEL + v * LANES) = total;
    }
  }
}

INLINE void add_products_of_row(Vector* sums, Vector of_row, const Vector* of_panel) {
  UNROLLED for (int v = 0; v < VECTORS; v++) sums[v] += of_row * of_panel[v];
}

#if LANES == 16
typedef Vector Codebook;
INLINE Codebook codebook_at(const float* source) { return load(source); }
INLINE Vector numbers_in(Codebook codebook, BitVector codes) {
  return (Vector)__builtin_shuffle((BitVector)codebook, codes);
}
#else
typedef struct { Vector low, high; } Codebook;
INLINE Codebook codebook_at(const float* source) {
  return (Codebook){load(source), load(source + LANES)};
}
INLINE Vector numbers_in(Codebook codebook, BitVector codes) {
  return (Vector)__builtin_shuffle((BitVector)codebook.low, (BitVector)codebook.high, codes);
}
#endif

// For each format `add_products` adds to the sums of rows, which are `step` numbers apart, the
// products of a unit of each of them with that of each output of a panel.

INLINE void add_products_float32(Vector sums[][VECTORS], const float* rows, int64_t step,
                                 const int num_rows, const Unit* panel, const float* codebook) {
  Vector units[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++) units[v] = held((Vector)units_at(panel + v * LANES));
  UNROLLED for (int r = 0; r < num_rows; r++)
    add_products_of_row(sums[r], all(rows[r * step]), units);
}

#define NAMED(name) name##_float32
#define NUMBER float
#define NUMBERS_PER_UNIT 1
#define IS_CODED 0
#include "linear_of_format.h"

INLINE void add_products_bfloat16_weight(Vector sums[][VECTORS], const float* rows, int64_t step,
                                         const int num_rows, const Unit* panel,
                                         const float* codebook) {
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
#define IS_CODED 0
#include "linear_of_format.h"

// Input `i` of four has the byte `i` of a unit.
typedef Vector NumbersOf(BitVector units, const int i);

INLINE Vector integers_of(BitVector units, const int i) {
  typedef int32_t Integers __attribute__((vector_size(4 * LANES)));
  return __builtin_convertvector((Integers)(units << (24 - 8 * i)) >> 24, Vector);
}

// The exponent of e4m3 is less than that of a float by 120; so numbers below its normal ones are right.
INLINE Vector float8_of(BitVector units, const int i) {
  BitVector first = units << (24 - 8 * i);
  return (Vector)((first & 0x80000000u) | ((first & 0x7f000000u) >> 4)) * all(0x1p120f);
}

INLINE void add_products_of_bytes(NumbersOf* numbers_of, Vector sums[][VECTORS], const float* rows,
                                  int64_t step, const int num_rows, const Unit* panel) {
  UNROLLED for (int i = 0; i < 4; i++) {
    Vector numbers[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++)
      numbers[v] = held(numbers_of(units_at(panel + v * LANES), i));
    UNROLLED for (int r = 0; r < num_rows; r++)
      add_products_of_row(sums[r], all(rows[r * step + i]), numbers);
  }
}

INLINE void add_products_codes8(Vector sums[][VECTORS], const float* rows, int64_t step,
                                const int num_rows, const Unit* panel, const float* codebook) {
  add_products_of_bytes(integers_of, sums, rows, step, num_rows, panel);
}

INLINE void add_products_float8(Vector sums[][VECTORS], const float* rows, int64_t step,
                                const int num_rows, const Unit* panel, const float* codebook) {
  add_products_of_bytes(float8_of, sums, rows, step, num_rows, panel);
}

#define NAMED(name) name##_float8
#define NUMBER float
#define NUMBERS_PER_UNIT 4
#define IS_CODED 1
#include "linear_of_format.h"

#define NAMED(name) name##_codes8
#define NUMBER float
#define NUMBERS_PER_UNIT 4
#define IS_CODED 1
#include "linear_of_format.h"

// Of eight inputs, those of even number have the lower half of a unit, the others the upper one.
INLINE int place_of(const int i) { return 4 * (i / 2) + 16 * (i % 2); }

INLINE void add_products_codes4(Vector sums[][VECTORS], const float* rows, int64_t step,
                                const int num_rows, const Unit* panel, const float* codebook) {
  Codebook numbers_of_codes = codebook_at(codebook);
  UNROLLED for (int i = 0; i < 8; i++) {
    Vector numbers[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++)
      numbers[v] = held(numbers_in(numbers_of_codes, units_at(panel + v * LANES) >> place_of(i)));
    UNROLLED for (int r = 0; r < num_rows; r++)
      add_products_of_row(sums[r], all(rows[r * step + i]), numbers);
  }
}

#define NAMED(name) name##_codes4
#define NUMBER float
#define NUMBERS_PER_UNIT 8
#define IS_CODED 1
#include "linear_of_format.h"

#if defined(__AVX512BF16__)
INLINE __m512bh pair_of_row(const BFloat16* row) {
  Unit unit;
  memcpy(&unit, row, sizeof unit);
  return (__m512bh)_mm512_set1_epi32(unit);
}

INLINE void add_products_of_pair(Vector* sums, __m512bh of_row, const __m512bh* of_panel) {
  UNROLLED for (int v = 0; v < VECTORS; v++)
    sums[v] = (Vector)_mm512_dpbf16_ps((__m512)sums[v], of_panel[v], of_row);
}

INLINE void add_products_bfloat16(Vector sums[][VECTORS], const BFloat16* rows, int64_t step,
                                  const int num_rows, const Unit* panel, const float* codebook) {
  __m512bh pairs[VECTORS];
  UNROLLED for (int v = 0; v < VECTORS; v++)
    pairs[v] = (__m512bh)held((Vector)units_at(panel + v * LANES));
  UNROLLED for (int r = 0; r < num_rows; r++)
    add_products_of_pair(sums[r], pair_of_row(rows + r * step), pairs);
}

#define NAMED(name) name##_bfloat16
#define NUMBER BFloat16
#define NUMBERS_PER_UNIT 2
#define IS_CODED 0
#include "linear_of_format.h"

// Integers of 8 bits, and numbers of float8, are exact in bfloat16.
INLINE __m512bh exact_pair(Vector first, Vector second) {
  return (__m512bh)((BitVector)first >> 16 | ((BitVector)second & 0xffff0000u));
}

INLINE void add_pairs_of_bytes(NumbersOf* numbers_of, Vector sums[][VECTORS], const BFloat16* rows,
                               int64_t step, const int num_rows, const Unit* panel) {
  UNROLLED for (int i = 0; i < 4; i += 2) {
    __m512bh pairs[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      BitVector units = units_at(panel + v * LANES);
      __m512bh pair = exact_pair(numbers_of(units, i), numbers_of(units, i + 1));
      pairs[v] = (__m512bh)held((Vector)pair);
    }
    UNROLLED for (int r = 0; r < num_rows; r++)
      add_products_of_pair(sums[r], pair_of_row(rows + r * step + i), pairs);
  }
}

INLINE void add_products_codes8_bfloat16(Vector sums[][VECTORS], const BFloat16* rows, int64_t step,
                                         const int num_rows, const Unit* panel,
                                         const float* codebook) {
  add_pairs_of_bytes(integers_of, sums, rows, step, num_rows, panel);
}

INLINE void add_products_float8_bfloat16(Vector sums[][VECTORS], const BFloat16* rows, int64_t step,
                                         const int num_rows, const Unit* panel,
                                         const float* codebook) {
  add_pairs_of_bytes(float8_of, sums, rows, step, num_rows, panel);
}

#define NAMED(name) name##_float8_bfloat16
#define NUMBER BFloat16
#define NUMBERS_PER_UNIT 4
#define IS_CODED 1
#include "linear_of_format.h"

#define NAMED(name) name##_codes8_bfloat16
#define NUMBER BFloat16
#define NUMBERS_PER_UNIT 4
#define IS_CODED 1
#include "linear_of_format.h"

// The codebook, rounded, twice: five bits choose a number of it, the highest of which may be any.
INLINE __m512i codebook_of_bfloat16(const float* codebook) {
  __m256i half = (__m256i)_mm512_cvtneps_pbh((__m512)load(codebook));
  return _mm512_broadcast_i64x4(half);
}

INLINE void add_products_codes4_bfloat16(Vector sums[][VECTORS], const BFloat16* rows, int64_t step,
                                         const int num_rows, const Unit* panel,
                                         const float* codebook) {
  __m512i numbers_of_codes = codebook_of_bfloat16(codebook);
  UNROLLED for (int i = 0; i < 8; i += 2) {
    __m512bh pairs[VECTORS];
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      __m512i codes = (__m512i)(units_at(panel + v * LANES) >> place_of(i));
      pairs[v] = (__m512bh)held((Vector)_mm512_permutexvar_epi16(codes, numbers_of_codes));
    }
    UNROLLED for (int r = 0; r < num_rows; r++)
      add_products_of_pair(sums[r], pair_of_row(rows + r * step + i), pairs);
  }
}

#define NAMED(name) name##_codes4_bfloat16
#define NUMBER BFloat16
#define NUMBERS_PER_UNIT 8
#define IS_CODED 1
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
