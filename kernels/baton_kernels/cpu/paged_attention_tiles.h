// Prompts of bfloat16 in the tiles of AMX: 16 rows of 64 bytes each.
//
// A product adds to sums [column][row] those of pairs: columns are keys, or dimensions of values. The
// pairs of the rows lie as `attend_strip` has them, which is how AMX wants its second factor.

#include <sys/syscall.h>
#include <unistd.h>

#define TILE_SIDE 16  // columns, rows or pairs

_Static_assert(STRIP == 3 * TILE_SIDE, "a strip is three tiles");

static int tiles_work = 0;

INLINE void begin_tiles(void) {
  struct {
    uint8_t palette, first_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t num_rows[16];
  } shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.num_rows[i] = TILE_SIDE;
  __asm__ volatile("" ::"r"(&shapes) : "memory");  // all of it is read
  _tile_loadconfig(&shapes);
}

// Sums [num_columns][STRIP], columns [num_columns][column_stride], rows [num_pairs][STRIP].
static void add_products_by_tiles(const Pair* rows, int64_t num_pairs, const Pair* columns,
                                  int64_t column_stride, int64_t num_columns, float* sums) {
  const int64_t row_bytes = STRIP * sizeof(float);
  __asm__ volatile("" ::: "memory");  // the loads of tiles do not say what they read
  for (int64_t c = 0; c < num_columns; c += TILE_SIDE) {
    float* of_columns = sums + c * STRIP;
    _tile_loadd(0, of_columns, row_bytes);
    _tile_loadd(1, of_columns + TILE_SIDE, row_bytes);
    _tile_loadd(2, of_columns + 2 * TILE_SIDE, row_bytes);
    for (int64_t k = 0; k < num_pairs; k += TILE_SIDE) {
      _tile_loadd(3, columns + c * column_stride + k, column_stride * sizeof(Pair));
      _tile_loadd(4, rows + k * STRIP, row_bytes);
      _tile_loadd(5, rows + k * STRIP + TILE_SIDE, row_bytes);
      _tile_loadd(6, rows + k * STRIP + 2 * TILE_SIDE, row_bytes);
      _tile_dpbf16ps(0, 3, 4);
      _tile_dpbf16ps(1, 3, 5);
      _tile_dpbf16ps(2, 3, 6);
    }
    _tile_stored(0, of_columns, row_bytes);
    _tile_stored(1, of_columns + TILE_SIDE, row_bytes);
    _tile_stored(2, of_columns + 2 * TILE_SIDE, row_bytes);
  }
}

// Asks Linux for tiles (XFEATURE_XTILEDATA of ARCH_REQ_XCOMP_PERM), and multiplies small integers in
// them, whose sums are exact: a CPU or an emulator that gets them wrong computes without tiles.
__attribute__((constructor)) static void try_tiles(void) {
  if (syscall(SYS_arch_prctl, 0x1023, 18)) return;
  Pair rows[TILE_SIDE * STRIP], columns[TILE_SIDE * TILE_SIDE];
  float sums[TILE_SIDE * STRIP];
#define PAIR_OF(a, b) (bfloat16_of(a) | (Pair)bfloat16_of(b) << 16)
  for (int i = 0; i < TILE_SIDE * STRIP; i++) rows[i] = PAIR_OF(i % 7, i % 11 - 5);
  for (int i = 0; i < TILE_SIDE * TILE_SIDE; i++) columns[i] = PAIR_OF(i % 13, i % 5 - 9);
  for (int i = 0; i < TILE_SIDE * STRIP; i++) sums[i] = i;
#undef PAIR_OF
  begin_tiles();
  add_products_by_tiles(rows, TILE_SIDE, columns, TILE_SIDE, TILE_SIDE, sums);
  _tile_release();
  for (int c = 0; c < TILE_SIDE; c++)
    for (int row = 0; row < STRIP; row++) {
      int expected = c * STRIP + row;
      for (int k = 0; k < TILE_SIDE; k++) {
        int i = k * STRIP + row, j = c * TILE_SIDE + k;
        expected += i % 7 * (j % 13) + (i % 11 - 5) * (j % 5 - 9);
      }
      if (sums[c * STRIP + row] != expected) return;
    }
  tiles_work = 1;
}

INLINE int fills_tiles(const Call* call) {
  return tiles_work && call->key_dim % (2 * TILE_SIDE) == 0 && call->value_dim % TILE_SIDE == 0;
}

// Transposes 16 vectors: each round moves the highest bit of a number's row to its lane, and of its
// lane to its row.
INLINE void transpose(BitVector* x) {
  for (int round = 0; round < 4; round++) {
    BitVector y[TILE_SIDE];
    for (int i = 0; i < 8; i++) {
      y[2 * i] = __builtin_shufflevector(x[i], x[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21,
                                         6, 22, 7, 23);
      y[2 * i + 1] = __builtin_shufflevector(x[i], x[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28,
                                             13, 29, 14, 30, 15, 31);
    }
    memcpy(x, y, sizeof(y));
  }
}

INLINE BitVector bits_of(const BFloat16* source) {
  return __builtin_convertvector(*(const HalfBits*)source, BitVector);
}

// Copies the values of a tile of keys as [value_dim][TILE / 2], 0 where there is no key.
static void copy_values_by_dim(const BFloat16* const* rows, int num_keys, int64_t dim,
                               Pair* target) {
  for (int key = 0; key < TILE; key += 2 * TILE_SIDE)
    for (int64_t d = 0; d < dim; d += TILE_SIDE) {
      BitVector pairs[TILE_SIDE] = {0};
      for (int i = 0; i < TILE_SIDE; i++) {
        int first = key + 2 * i;
        if (first < num_keys) pairs[i] = bits_of(rows[first] + d);
        if (first + 1 < num_keys) pairs[i] |= bits_of(rows[first + 1] + d) << 16;
      }
      transpose(pairs);
      for (int i = 0; i < TILE_SIDE; i++)
        *(BitVector*)(target + (d + i) * (TILE / 2) + key / 2) = pairs[i];
    }
}

// As `attend_strip`; values [value_dim][TILE / 2].
static void attend_strip_by_tiles(const Strip* strip, const Call* call, int64_t begin, int num_keys,
                                  const Pair* keys, const Pair* values, float* scores) {
  int64_t num_pairs = call->key_dim / 2, num_outputs = call->value_dim * STRIP;
  int num_scores = TILE * STRIP, num_seen = num_keys * STRIP;
  float factors[STRIP];
  memset(scores, 0, num_scores * sizeof(float));
  add_products_by_tiles(strip->q, num_pairs, keys, num_pairs, TILE, scores);
  for (int i = 0; i < num_seen; i++) scores[i] *= call->scale * LOG2_E;
  hide_keys(strip, begin, num_keys, call->window, scores);
  weigh(strip, num_keys, scores, factors);
  memset(scores + num_seen, 0, (num_scores - num_seen) * sizeof(float));
  make_pairs(scores, TILE);
  for (int64_t i = 0; i < num_outputs; i += STRIP)
    for (int j = 0; j < STRIP; j += LANES)
      put(strip->o + i + j, load(strip->o + i + j) * load(factors + j));
  add_products_by_tiles((const Pair*)scores, TILE / 2, values, TILE / 2, call->value_dim, strip->o);
}
