// Paged attention on a CPU that reads K and V in place, block by block.
//
// A work item is a range of the queries of one sequence; with each KV head it is a task of one
// thread. The query heads of a KV head are rows of it. Two kernels compute tasks:
//
// `attend_many`, for prompts: rows are the lanes of vectors. Scores are S[key][row] and outputs
// O[dim][row], so K and V are read as single numbers, as they are, and no maximum and no sum goes
// across lanes. Rows are computed in strips of a few vectors, whose queries, scores and outputs fit
// into the first-level cache.
//
// `attend_few`, for decodes: dimensions are the lanes, since there are too few rows to fill them.
//
// Both go through the keys in tiles at fixed positions (multiples of TILE) and compute a row in the
// same order whatever else is in the batch: an output is bitwise the same in any batch and with any
// chunks. Everything is computed in float32; bfloat16 is converted when it is read. CPUs that multiply
// pairs of bfloat16 do that for prompts, with weights that are rounded to bfloat16 and sums in float32,
// and those with AMX do it in its tiles.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"
#include "vectors.h"

#define TILE 64          // keys
#define ADDED_TOGETHER 32  // at most, of bfloat16, before their sum is added to that of those before
#define STRIP_VECTORS 3
#define STRIP (STRIP_VECTORS * LANES)
#define AT_ONCE (LANES == 16 ? 8 : 4)  // keys or dimensions; their accumulators fill registers
#define MAX_FEW_ROWS 8
#define ROWS_AT_ONCE (LANES == 16 ? 4 : 2)  // of few; as many as there are registers for

#define NUM_UNITS(num_numbers) (((num_numbers) + PER_UNIT - 1) / PER_UNIT)

static const float LOG2_E = 1.4426950408889634f;
static const float HIDDEN = -__builtin_inff();
static const float NO_MAXIMUM = -1e30f;  // finite: its difference to itself is a number

typedef int32_t IntVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t HalfBits __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef float Vector4 __attribute__((vector_size(16), aligned(4), may_alias));

// What the layers of a step have in common, in the order of `_Work` in paged_attention.py.
typedef struct {
  const int32_t* table;  // [num_sequences, table_width], blocks of each sequence
  const int64_t* items;  // [num_items, 4]: sequence, first token, its position, number of tokens
  int64_t table_width, num_items;
} Work;

// The arguments of a call, in the order of `_Call` in paged_attention.py. Strides are in numbers.
typedef struct {
  const void* query;  // [num_tokens, num_heads, key_dim]
  void* out;          // [num_tokens, num_heads, value_dim]
  const void* new_keys;  // [num_tokens, num_kv_heads, key_dim], to write
  const void* new_values;
  void* keys;  // [num_blocks, num_kv_heads, block_size, key_dim]
  void* values;
  const Work* work;
  int64_t query_strides[2], out_strides[2], new_key_strides[2], new_value_strides[2];
  int64_t key_strides[3], value_strides[3];
  int64_t num_kv_heads, rows_per_query, key_dim, value_dim, block_size;
  int64_t window;  // keys that a query sees, its own included; 0: all up to its own
  int64_t num_threads;
  float scale;
} Call;

typedef struct {
  const Call* call;
  int64_t kv_head, first_token, first_position, num_queries;
  const int32_t* blocks;
} Task;

static Task task_of(const Call* call, int64_t number) {
  const Work* work = call->work;
  const int64_t* item = work->items + number / call->num_kv_heads * 4;
  const int32_t* blocks = work->table + item[0] * work->table_width;
  return (Task){call, number % call->num_kv_heads, item[1], item[2], item[3], blocks};
}

INLINE int64_t position_of(const Task* task, int64_t row) {
  return task->first_position + row / task->call->rows_per_query;
}

INLINE int64_t first_key(const Task* task, int64_t position) {
  int64_t first = task->call->window ? position - task->call->window + 1 : 0;
  return first > 0 ? first : 0;
}

INLINE int64_t row_place(const Task* task, int64_t row, const int64_t* strides) {
  int64_t group = task->call->rows_per_query;
  int64_t token = task->first_token + row / group, head = task->kv_head * group + row % group;
  return token * strides[0] + head * strides[1];
}

INLINE int64_t key_place(const Task* task, int64_t key, const int64_t* strides) {
  int64_t block = task->blocks[key / task->call->block_size];
  int64_t offset = key % task->call->block_size;
  return block * strides[0] + task->kv_head * strides[1] + offset * strides[2];
}

// Memory of one thread, kept between calls.
static float* scratch(int64_t size) {
  static _Thread_local float* memory = NULL;
  static _Thread_local int64_t capacity = 0;
  if (size > capacity) {
    free(memory);
    memory = aligned_alloc(64, (size * sizeof(float) + 63) / 64 * 64);
    if (memory == NULL) abort();
    capacity = size;
  }
  return memory;
}

INLINE Vector load_bfloat16(const BFloat16* source) {
  return (Vector)(__builtin_convertvector(*(const HalfBits*)source, BitVector) << 16);
}

INLINE void put(float* target, Vector x) { *(Vector*)target = x; }

INLINE Vector chosen(IntVector mask, Vector a, Vector b) {
  return (Vector)((mask & (IntVector)a) | (~mask & (IntVector)b));
}

// The larger one of each lane; b where one is no number.
INLINE Vector larger(Vector a, Vector b) {
#if defined(__AVX512F__)
  return (Vector)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vector)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return chosen(a > b, a, b);
#endif
}

// 2 ** x for x <= 0; 0 below -126, and so where a key is hidden; NaN for NaN of any payload.
INLINE Vector power_of_2(Vector x) {
  Vector shifted = larger(all(-126.0f), x) + 12582912.0f;  // 1.5 * 2 ** 23: rounds to an integer
  IntVector exponent = (IntVector)shifted << 23;
  Vector part = larger(all(-126.0f), x) - (shifted - 12582912.0f);
  Vector y = all(1.5403530393e-4f);
  y = y * part + 1.3333558146e-3f;
  y = y * part + 9.6181291076e-3f;
  y = y * part + 5.5504108665e-2f;
  y = y * part + 2.4022650696e-1f;
  y = y * part + 6.9314718056e-1f;
  y = y * part + 1.0f;
  return chosen(x == x, (Vector)(((IntVector)y + exponent) & ~(x < -126.0f)), x);
}

#if defined(__AVX512BF16__)
typedef uint32_t Pair;  // of bfloat16, the first in the low bits

INLINE Vector plus_product_of_pairs(Vector sum, Vector rows, Pair pair) {
  return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)rows, (__m512bh)_mm512_set1_epi32(pair));
}

// Makes pairs, [key / 2][STRIP], of weights, [key][STRIP], in place.
static void make_pairs(float* weights, int num_keys) {
  if (num_keys % 2) memset(weights + num_keys * STRIP, 0, STRIP * sizeof(float));
  for (int key = 0; key < num_keys; key += 2)
    for (int j = 0; j < STRIP; j += LANES) {
      const float* from = weights + key * STRIP + j;
      __m256i low = (__m256i)_mm512_cvtneps_pbh((__m512)load(from));
      __m256i high = (__m256i)_mm512_cvtneps_pbh((__m512)load(from + STRIP));
      __m512i pairs = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
      put(weights + key / 2 * STRIP + j, (Vector)(pairs | _mm512_cvtepu16_epi32(low)));
    }
}
#endif

// Many rows: lanes are rows.

// Strip of up to STRIP rows: q, units [key_dim / PER_UNIT][STRIP], o [value_dim][STRIP], and of each
// row the position of its query, and maximum and sum of its exponents.
typedef struct {
  void* q;
  float *o, *maxima, *sums;
  int32_t* positions;
  int64_t first_row, num_rows, first_position, last_position;
} Strip;

INLINE int64_t strip_size(const Call* call) {
  return STRIP * (call->key_dim + call->value_dim + 3);
}

INLINE Strip strip_of(const Task* task, int64_t number, float* memory) {
  float* q = memory + number * strip_size(task->call);
  float* o = q + STRIP * task->call->key_dim;
  float* maxima = o + STRIP * task->call->value_dim;
  int64_t first_row = number * STRIP;
  int64_t num_rows = task->num_queries * task->call->rows_per_query - first_row;
  if (num_rows > STRIP) num_rows = STRIP;
  return (Strip){q, o, maxima, maxima + STRIP, (int32_t*)(maxima + 2 * STRIP), first_row, num_rows,
                 position_of(task, first_row), position_of(task, first_row + num_rows - 1)};
}

// Whether a query at one of these positions does not see one of the keys.
INLINE int hides_any(int64_t begin, int num_keys, int64_t first_position, int64_t last_position,
                     int64_t window) {
  int is_causal = begin + num_keys - 1 > first_position;
  int is_windowed = window && begin <= last_position - window;
  return is_causal || is_windowed;
}

static void hide_keys(const Strip* strip, int64_t begin, int num_keys, int64_t window,
                      float* scores) {
  if (!hides_any(begin, num_keys, strip->first_position, strip->last_position, window)) return;
  for (int j = 0; j < STRIP; j += LANES) {
    IntVector last = *(const IntVector*)(strip->positions + j);
    IntVector first = window ? last - (int32_t)(window - 1) : last - last;
    for (int key = 0; key < num_keys; key++) {
      IntVector position = (int32_t)(begin + key) - (IntVector){0};
      float* score = scores + key * STRIP + j;
      put(score, chosen((position <= last) & (position >= first), load(score), all(HIDDEN)));
    }
  }
}

// Makes weights of scores. `factors`: of what was summed before, since the maxima may have grown.
static void weigh(const Strip* strip, int num_keys, float* scores, float* factors) {
  for (int j = 0; j < STRIP; j += LANES) {
    Vector before = load(strip->maxima + j), maximum = before, sum = {0};
    for (int key = 0; key < num_keys; key++)
      maximum = larger(load(scores + key * STRIP + j), maximum);
    for (int key = 0; key < num_keys; key++) {
      Vector weight = power_of_2(load(scores + key * STRIP + j) - maximum);
      put(scores + key * STRIP + j, weight);
      sum += weight;
    }
    Vector factor = power_of_2(before - maximum);
    put(factors + j, factor);
    put(strip->maxima + j, maximum);
    put(strip->sums + j, load(strip->sums + j) * factor + sum);
  }
}

#if defined(__AVX512BF16__) && defined(__AMX_BF16__)
#define HAS_TILES 1
#include "paged_attention_tiles.h"
#endif

// Few rows: lanes are dimensions.

INLINE Vector4 folded(Vector x) {
#if LANES == 16
  typedef float Vector8 __attribute__((vector_size(32)));
  Vector8 y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
  Vector y = x;
#endif
  return __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
}

// The sums over the lanes of four vectors.
INLINE Vector4 sums_of(const Vector* x) {
  Vector4 a = folded(x[0]), b = folded(x[1]), c = folded(x[2]), d = folded(x[3]);
  Vector4 ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  Vector4 cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// Keys of a tile that a row sees: [begin, end), of which `begin` may lie after the tile.
typedef struct {
  int64_t begin, end;
} Seen;

// Makes weights of the TILE scores of one row, but for those that it does not see. Returns the
// factor of what was summed before.
static float weigh_row(float* scores, Seen seen, float* maximum, float* sum) {
  for (int64_t key = 0; key < seen.begin && key < TILE; key++) scores[key] = HIDDEN;
  for (int64_t key = seen.end; key < TILE; key++) scores[key] = HIDDEN;
  Vector maxima = all(*maximum), weights = {0};
  for (int key = 0; key < TILE; key += LANES) maxima = larger(load(scores + key), maxima);
  float highest = maxima[0];
  for (int i = 1; i < LANES; i++) highest = maxima[i] > highest ? maxima[i] : highest;
  for (int key = 0; key < TILE; key += LANES) {
    Vector weight = power_of_2(load(scores + key) - highest);
    put(scores + key, weight);
    weights += weight;
  }
  float factor = power_of_2(all(*maximum - highest))[0];
  Vector4 total = folded(weights);
  *sum = *sum * factor + ((total[0] + total[2]) + (total[1] + total[3]));
  *maximum = highest;
  return factor;
}

#define NUMBER float
#define UNIT float
#define PER_UNIT 1
#define PLUS_PRODUCT(sum, rows, unit) ((sum) + (rows) * (unit))
#define NAMED(name) name##_float32
#define LOAD(source) load(source)
#define READ(number) (number)
#define MADE(number) (number)
#include "paged_attention_of_dtype.h"

#define NUMBER BFloat16
#if defined(__AVX512BF16__)
#define UNIT Pair
#define PER_UNIT 2
#define PLUS_PRODUCT(sum, rows, unit) plus_product_of_pairs(sum, rows, unit)
#else
#define UNIT float
#define PER_UNIT 1
#define PLUS_PRODUCT(sum, rows, unit) ((sum) + (rows) * (unit))
#endif
#define NAMED(name) name##_bfloat16
#define LOAD(source) load_bfloat16(source)
#define READ(number) number_of_bfloat16(number)
#define MADE(number) bfloat16_of(number)
#include "paged_attention_of_dtype.h"

// The arithmetic of bfloat16 prompts on this CPU.
const char* baton_bfloat16_arithmetic(void) {
#if HAS_TILES
  if (tiles_work) return "AMX tiles";
#endif
#if defined(__AVX512BF16__)
  return "bfloat16 pairs";
#else
  return "float32";
#endif
}
