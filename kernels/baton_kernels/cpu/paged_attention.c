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
// chunks. Everything is computed in float32; bfloat16 is converted when it is read.

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "bfloat16.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define TILE 64          // keys
#define STRIP_VECTORS 3
#define STRIP (STRIP_VECTORS * LANES)
#define AT_ONCE (LANES == 16 ? 8 : 4)  // keys or dimensions; their accumulators fill registers
#define MAX_FEW_ROWS 8
#define ROWS_AT_ONCE (LANES == 16 ? 4 : 2)  // of few; as many as there are registers for

#define INLINE static inline __attribute__((always_inline))

static const float LOG2_E = 1.4426950408889634f;
static const float HIDDEN = -__builtin_inff();
static const float NO_MAXIMUM = -1e30f;  // finite: its difference to itself is a number

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t IntVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t BitVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t HalfBits __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef float Vector4 __attribute__((vector_size(16), aligned(4), may_alias));

// The arguments of a call, in the order of `_Call` in paged_attention.py. Strides are in numbers.
typedef struct {
  const void* query;  // [num_tokens, num_heads, key_dim]
  void* out;          // [num_tokens, num_heads, value_dim]
  const void* new_keys;  // [num_tokens, num_kv_heads, key_dim], to write
  const void* new_values;
  void* keys;  // [num_blocks, num_kv_heads, block_size, key_dim]
  void* values;
  const int32_t* table;  // [num_sequences, table_width], blocks of each sequence
  const int64_t* items;  // [num_items, 4]: sequence, first token, its position, number of tokens
  int64_t query_strides[2], out_strides[2], new_key_strides[2], new_value_strides[2];
  int64_t key_strides[3], value_strides[3];
  int64_t table_width, num_items;
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
  const int64_t* item = call->items + number / call->num_kv_heads * 4;
  const int32_t* blocks = call->table + item[0] * call->table_width;
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

INLINE Vector load(const float* source) { return *(const Vector*)source; }

INLINE Vector load_bfloat16(const BFloat16* source) {
  return (Vector)(__builtin_convertvector(*(const HalfBits*)source, BitVector) << 16);
}

INLINE void put(float* target, Vector x) { *(Vector*)target = x; }

// Keeps a vector in a register: each product with it would read it from memory again.
INLINE Vector held(Vector x) {
#if defined(__AVX2__)
  __asm__("" : "+v"(x));
#endif
  return x;
}

INLINE Vector all(float number) { return number - (Vector){0}; }

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

// 2 ** x for x <= 0; 0 below -126, and so where a key is hidden.
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
  return (Vector)(((IntVector)y + exponent) & ~(x < -126.0f));
}

// Many rows: lanes are rows.

// Strip of up to STRIP rows: q [key_dim][STRIP], o [value_dim][STRIP], and of each row the position
// of its query, and maximum and sum of its exponents.
typedef struct {
  float *q, *o, *maxima, *sums;
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

INLINE void multiply_keys(const float* q, const float* keys, int64_t dim, float* scores) {
  Vector sums[AT_ONCE][STRIP_VECTORS] = {0};
  for (int64_t d = 0; d < dim; d++) {
    Vector rows[STRIP_VECTORS];
    for (int j = 0; j < STRIP_VECTORS; j++) rows[j] = held(load(q + d * STRIP + j * LANES));
    for (int i = 0; i < AT_ONCE; i++)
      for (int j = 0; j < STRIP_VECTORS; j++) sums[i][j] += rows[j] * keys[i * dim + d];
  }
  for (int i = 0; i < AT_ONCE; i++)
    for (int j = 0; j < STRIP_VECTORS; j++) put(scores + i * STRIP + j * LANES, sums[i][j]);
}

INLINE void add_values(const float* weights, const float* values, int64_t dim, int num_keys,
                       const float* factors, int64_t d, int num_dims, float* o) {
  Vector sums[AT_ONCE][STRIP_VECTORS];
  for (int i = 0; i < num_dims; i++)
    for (int j = 0; j < STRIP_VECTORS; j++)
      sums[i][j] = load(o + (d + i) * STRIP + j * LANES) * load(factors + j * LANES);
  for (int key = 0; key < num_keys; key++) {
    Vector rows[STRIP_VECTORS];
    for (int j = 0; j < STRIP_VECTORS; j++) rows[j] = held(load(weights + key * STRIP + j * LANES));
    for (int i = 0; i < num_dims; i++)
      for (int j = 0; j < STRIP_VECTORS; j++) sums[i][j] += rows[j] * values[key * dim + d + i];
  }
  for (int i = 0; i < num_dims; i++)
    for (int j = 0; j < STRIP_VECTORS; j++) put(o + (d + i) * STRIP + j * LANES, sums[i][j]);
}

static void hide_keys(const Strip* strip, int64_t begin, int num_keys, int64_t window,
                      float* scores) {
  int is_causal = begin + num_keys - 1 > strip->first_position;
  int is_windowed = window && begin <= strip->last_position - window;
  if (!is_causal && !is_windowed) return;
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

static void attend_strip(const Strip* strip, const Call* call, int64_t begin, int num_keys,
                         const float* keys, const float* values, float* scores) {
  int64_t key_dim = call->key_dim, value_dim = call->value_dim;
  float factors[STRIP];
  for (int key = 0; key < num_keys; key += AT_ONCE)  // up to TILE; scores past the end are unused
    multiply_keys(strip->q, keys + key * key_dim, key_dim, scores + key * STRIP);
  hide_keys(strip, begin, num_keys, call->window, scores);
  weigh(strip, num_keys, scores, factors);
  int64_t d = 0;
  for (; d + AT_ONCE <= value_dim; d += AT_ONCE)
    add_values(scores, values, value_dim, num_keys, factors, d, AT_ONCE, strip->o);
  for (; d < value_dim; d++)
    add_values(scores, values, value_dim, num_keys, factors, d, 1, strip->o);
}

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

// Makes weights of the scores of one row, of which those outside [first, stop) are hidden; TILE
// scores are padded. Returns the factor of what was summed before.
static float weigh_row(float* scores, int64_t first, int64_t stop, float* maximum, float* sum) {
  for (int64_t key = 0; key < first && key < TILE; key++) scores[key] = HIDDEN;
  for (int64_t key = stop > 0 ? stop : 0; key < TILE; key++) scores[key] = HIDDEN;
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
#define NAMED(name) name##_float32
#define LOAD(source) load(source)
#define READ(number) (number)
#define MADE(number) (number)
#include "paged_attention_of_dtype.h"

#define NUMBER BFloat16
#define NAMED(name) name##_bfloat16
#define LOAD(source) load_bfloat16(source)
#define READ(number) number_of_bfloat16(number)
#define MADE(number) bfloat16_of(number)
#include "paged_attention_of_dtype.h"
