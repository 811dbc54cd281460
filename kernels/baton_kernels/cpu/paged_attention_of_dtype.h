// The part of paged_attention.c that reads and writes tensors: included once for each dtype.
//
// NUMBER is the type of the numbers in memory, READ makes a float of one, MADE one of a float, LOAD
// a vector of several, and NAMED gives functions the name of the dtype. UNIT is what prompts multiply
// at once: a float, or PER_UNIT consecutive numbers. PLUS_PRODUCT adds to the lanes of `sum` the
// products of units, or of the numbers in two units.

// Writes K and V of the task's tokens to the cache.
static void NAMED(write)(const Task* task) {
  const Call* call = task->call;
  for (int64_t i = 0; i < task->num_queries; i++) {
    int64_t token = task->first_token + i, position = task->first_position + i;
    memcpy((NUMBER*)call->keys + key_place(task, position, call->key_strides),
           (const NUMBER*)call->new_keys + token * call->new_key_strides[0] +
               task->kv_head * call->new_key_strides[1],
           call->key_dim * sizeof(NUMBER));
    memcpy((NUMBER*)call->values + key_place(task, position, call->value_strides),
           (const NUMBER*)call->new_values + token * call->new_value_strides[0] +
               task->kv_head * call->new_value_strides[1],
           call->value_dim * sizeof(NUMBER));
  }
}

static void NAMED(find)(const Task* task, int64_t begin, int64_t end, const NUMBER** keys,
                        const NUMBER** values) {
  for (int64_t key = begin; key < end; key++) {
    *keys++ = (const NUMBER*)task->call->keys + key_place(task, key, task->call->key_strides);
    *values++ = (const NUMBER*)task->call->values + key_place(task, key, task->call->value_strides);
  }
}

static void NAMED(load_strip)(const Task* task, const Strip* strip) {
  const Call* call = task->call;
  memset(strip->q, 0, strip_size(call) * sizeof(float));
  for (int64_t row = 0; row < STRIP; row++) {
    // Lanes without a row see as much as the last one that has: their weights are finite.
    int64_t seen = row < strip->num_rows ? row : strip->num_rows - 1;
    strip->positions[row] = (int32_t)position_of(task, strip->first_row + seen);
    strip->maxima[row] = NO_MAXIMUM;
  }
  for (int64_t row = 0; row < strip->num_rows; row++) {
    const NUMBER* query = (const NUMBER*)call->query +
                          row_place(task, strip->first_row + row, call->query_strides);
#if PER_UNIT == 1
    for (int64_t d = 0; d < call->key_dim; d++) ((UNIT*)strip->q)[d * STRIP + row] = READ(query[d]);
#else
    for (int64_t d = 0; d < call->key_dim; d++)
      ((NUMBER*)strip->q)[(d / PER_UNIT * STRIP + row) * PER_UNIT + d % PER_UNIT] = query[d];
#endif
  }
}

static void NAMED(store_strip)(const Task* task, const Strip* strip) {
  const Call* call = task->call;
  for (int64_t row = 0; row < strip->num_rows; row++) {
    NUMBER* out = (NUMBER*)call->out + row_place(task, strip->first_row + row, call->out_strides);
    for (int64_t d = 0; d < call->value_dim; d++)
      out[d] = MADE(strip->o[d * STRIP + row] / strip->sums[row]);
  }
}

// Copies the keys of a tile, once for all strips: [key][key_dim / PER_UNIT]. Also from float32: rows
// of one head may lie a power of 2 apart, where few of them fit into a cache at once.
static void NAMED(copy_keys)(const NUMBER* const* rows, int num_keys, int64_t dim, UNIT* target) {
  int64_t num_units = NUM_UNITS(dim);
  for (int i = 0; i < num_keys; i++, target += num_units) {
#if PER_UNIT == 1
    for (int64_t d = 0; d < dim; d++) target[d] = READ(rows[i][d]);
#else
    target[num_units - 1] = 0;
    memcpy(target, rows[i], dim * sizeof(NUMBER));
#endif
  }
}

// Copies the values of a tile, once for all strips: [key / PER_UNIT][value_dim].
static void NAMED(copy_values)(const NUMBER* const* rows, int num_keys, const Call* call,
                               UNIT* target) {
  int64_t dim = call->value_dim;
#if PER_UNIT == 1
  NAMED(copy_keys)(rows, num_keys, dim, target);
#else
#if HAS_TILES
  if (fills_tiles(call)) return copy_values_by_dim(rows, num_keys, dim, target);
#endif
  for (int i = 0; i < num_keys; i += 2, target += dim) {
    int has_second = i + 1 < num_keys;
    for (int64_t d = 0; d < dim; d++)
      target[d] = rows[i][d] | (has_second ? (UNIT)rows[i + 1][d] << 16 : 0);
  }
#endif
}

INLINE int NAMED(is_finite)(NUMBER number) {
  float wide = READ(number);
  return wide - wide == 0.0f;
}

INLINE int NAMED(are_finite)(const NUMBER* row, int64_t dim) {
  int are = 1;
  for (int64_t d = 0; d < dim; d++) are &= NAMED(is_finite)(row[d]);
  return are;
}

// Replaces values by copies with 0 for what is not finite, since a hidden value is multiplied by a
// weight of 0. Returns whether there are any; `copies`: [TILE][dim].
static int NAMED(clean)(const NUMBER** values, int num_keys, int64_t dim, NUMBER* copies) {
  int has_any = 0;
  for (int key = 0; key < num_keys; key++, copies += dim) {
    if (NAMED(are_finite)(values[key], dim)) continue;
    for (int64_t d = 0; d < dim; d++)
      copies[d] = NAMED(is_finite)(values[key][d]) ? values[key][d] : 0;
    values[key] = copies;
    has_any = 1;
  }
  return has_any;
}

// Adds to the rows that see them the values that `clean` has taken out.
static void NAMED(add_broken)(const Task* task, const Strip* strip, int64_t begin, int num_keys,
                              const NUMBER* const* cleaned) {
  const NUMBER *keys[TILE], *values[TILE];
  NAMED(find)(task, begin, begin + num_keys, keys, values);
  for (int key = 0; key < num_keys; key++)
    for (int64_t row = 0; values[key] != cleaned[key] && row < strip->num_rows; row++) {
      int64_t position = strip->positions[row];
      if (begin + key > position || begin + key < first_key(task, position)) continue;
      for (int64_t d = 0; d < task->call->value_dim; d++)
        if (!NAMED(is_finite)(values[key][d])) strip->o[d * STRIP + row] += READ(values[key][d]);
    }
}

// Adds the products of units of the strip's rows with those of a matrix, of AT_ONCE columns at most.
INLINE void NAMED(add_products)(const UNIT* rows, int64_t num_units, const UNIT* matrix,
                                int64_t unit_stride, int64_t column_stride, int num_columns,
                                Vector sums[AT_ONCE][STRIP_VECTORS]) {
  for (int64_t k = 0; k < num_units; k++) {
    Vector of_rows[STRIP_VECTORS];
    for (int j = 0; j < STRIP_VECTORS; j++)
      of_rows[j] = held(load((const float*)rows + k * STRIP + j * LANES));
    for (int i = 0; i < num_columns; i++) {
      UNIT unit = matrix[k * unit_stride + i * column_stride];
      for (int j = 0; j < STRIP_VECTORS; j++)
        sums[i][j] = PLUS_PRODUCT(sums[i][j], of_rows[j], unit);
    }
  }
}

INLINE void NAMED(multiply_keys)(const UNIT* q, const UNIT* keys, int64_t num_units, float factor,
                                 float* scores) {
  Vector sums[AT_ONCE][STRIP_VECTORS] = {0};
  NAMED(add_products)(q, num_units, keys, 1, num_units, AT_ONCE, sums);
  for (int i = 0; i < AT_ONCE; i++)
    for (int j = 0; j < STRIP_VECTORS; j++) put(scores + i * STRIP + j * LANES, sums[i][j] * factor);
}

INLINE void NAMED(add_values)(const UNIT* weights, const UNIT* values, int64_t dim, int num_units,
                              const float* factors, int num_dims, float* o) {
  Vector sums[AT_ONCE][STRIP_VECTORS];
  for (int i = 0; i < num_dims; i++)
    for (int j = 0; j < STRIP_VECTORS; j++)
      sums[i][j] = load(o + i * STRIP + j * LANES) * load(factors + j * LANES);
  NAMED(add_products)(weights, num_units, values, dim, 1, num_dims, sums);
  for (int i = 0; i < num_dims; i++)
    for (int j = 0; j < STRIP_VECTORS; j++) put(o + i * STRIP + j * LANES, sums[i][j]);
}

static void NAMED(attend_strip)(const Strip* strip, const Call* call, int64_t begin, int num_keys,
                                const UNIT* keys, const UNIT* values, float* scores) {
#if PER_UNIT == 2 && HAS_TILES
  if (fills_tiles(call))
    return attend_strip_by_tiles(strip, call, begin, num_keys, keys, values, scores);
#endif
  int64_t num_units = NUM_UNITS(call->key_dim), value_dim = call->value_dim;
  float factors[STRIP];
  for (int key = 0; key < num_keys; key += AT_ONCE)  // up to TILE; scores past the end are unused
    NAMED(multiply_keys)(strip->q, keys + key * num_units, num_units, call->scale * LOG2_E,
                         scores + key * STRIP);
  hide_keys(strip, begin, num_keys, call->window, scores);
  weigh(strip, num_keys, scores, factors);
#if PER_UNIT == 2
  make_pairs(scores, num_keys);
#endif
  const UNIT* weights = (const UNIT*)scores;
  int64_t d = 0, num_weights = NUM_UNITS(num_keys);
  for (; d + AT_ONCE <= value_dim; d += AT_ONCE)
    NAMED(add_values)(weights, values + d, value_dim, num_weights, factors, AT_ONCE,
                      strip->o + d * STRIP);
  for (; d < value_dim; d++)
    NAMED(add_values)(weights, values + d, value_dim, num_weights, factors, 1, strip->o + d * STRIP);
}

static void NAMED(attend_many)(const Task* task) {
  const Call* call = task->call;
  int64_t num_strips = (task->num_queries * call->rows_per_query + STRIP - 1) / STRIP;
  int64_t num_numbers = num_strips * strip_size(call) + TILE * STRIP;
  float* memory = scratch(num_numbers + TILE * (call->key_dim + 2 * call->value_dim));
  float* scores = memory + num_strips * strip_size(call);
  UNIT *keys = (UNIT*)(memory + num_numbers), *values = keys + TILE * call->key_dim;
  NUMBER* copies = (NUMBER*)(values + TILE * call->value_dim);
  for (int64_t i = 0; i < num_strips; i++) {
    Strip strip = strip_of(task, i, memory);
    NAMED(load_strip)(task, &strip);
  }
#if PER_UNIT == 2 && HAS_TILES
  if (fills_tiles(call)) begin_tiles();
#endif
  const NUMBER *found_keys[TILE], *found_values[TILE];
  int64_t stop = task->first_position + task->num_queries, end;
  int64_t first = first_key(task, task->first_position);
  // Numbers that are added together are the same ones wherever a window begins.
  if (PER_UNIT == 2) first -= first % ADDED_TOGETHER;
  for (int64_t begin = first; begin < stop; begin = end) {
    end = (begin / TILE + 1) * TILE;
    if (end > stop) end = stop;
    NAMED(find)(task, begin, end, found_keys, found_values);
    int is_broken =
        hides_any(begin, end - begin, task->first_position, stop - 1, call->window) &&
        NAMED(clean)(found_values, end - begin, call->value_dim, copies);
    NAMED(copy_keys)(found_keys, end - begin, call->key_dim, keys);
    NAMED(copy_values)(found_values, end - begin, call, values);
    for (int64_t i = 0; i < num_strips; i++) {
      Strip strip = strip_of(task, i, memory);
      int64_t seen_end = end <= strip.last_position ? end : strip.last_position + 1;
      if (seen_end <= begin || end <= first_key(task, strip.first_position)) continue;
      NAMED(attend_strip)(&strip, call, begin, seen_end - begin, keys, values, scores);
      if (is_broken) NAMED(add_broken)(task, &strip, begin, seen_end - begin, found_values);
    }
  }
  for (int64_t i = 0; i < num_strips; i++) {
    Strip strip = strip_of(task, i, memory);
    NAMED(store_strip)(task, &strip);
  }
#if PER_UNIT == 2 && HAS_TILES
  if (fills_tiles(call)) _tile_release();
#endif
}

// Reads of the cache are bound by latency: what is read soon is fetched during other work.
INLINE void NAMED(prefetch)(const NUMBER* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += 64 / sizeof(NUMBER)) __builtin_prefetch(row + d, 0, 2);
}

// A tile of keys and their values; the last key is repeated to a multiple of 4.
typedef struct {
  const NUMBER *keys[TILE + 3], *values[TILE];
  int64_t begin, end;
} NAMED(Tile);

static void NAMED(find_tile)(const Task* task, int64_t begin, int64_t stop, NAMED(Tile) * tile) {
  int64_t end = (begin / TILE + 1) * TILE;
  tile->begin = begin;
  tile->end = end < stop ? end : stop;
  if (begin == stop) return;
  NAMED(find)(task, begin, tile->end, tile->keys, tile->values);
  for (int i = 0; i < 3; i++) tile->keys[tile->end - begin + i] = tile->keys[tile->end - begin - 1];
}

INLINE void NAMED(multiply_few)(const float* q, const NUMBER* const* keys, int num_rows,
                                int64_t dim, float* scores) {
  Vector sums[ROWS_AT_ONCE][4] = {0};
  for (int64_t d = 0; d < dim; d += LANES) {
    Vector numbers[4];
    for (int i = 0; i < 4; i++) numbers[i] = LOAD(keys[i] + d);
    for (int row = 0; row < num_rows; row++)
      for (int i = 0; i < 4; i++) sums[row][i] += load(q + row * dim + d) * numbers[i];
  }
  for (int row = 0; row < num_rows; row++)
    *(Vector4*)(scores + row * TILE) = sums_of(sums[row]);
}

// Adds the values of a key to the sums of the rows that see it: all without `seen`.
INLINE void NAMED(add_key)(const float* weights, const NAMED(Tile) * tile, const NAMED(Tile) * next,
                           const Seen* seen, int num_rows, int key, int64_t d, int num_vectors,
                           Vector sums[ROWS_AT_ONCE][4]) {
  Vector numbers[4];
  if (key < next->end - next->begin) NAMED(prefetch)(next->keys[key] + d, num_vectors * LANES);
  for (int j = 0; j < num_vectors; j++) numbers[j] = LOAD(tile->values[key] + d + j * LANES);
  for (int row = 0; row < num_rows; row++)
    if (seen == NULL || (seen[row].begin <= key && key < seen[row].end))
      for (int j = 0; j < num_vectors; j++)
        sums[row][j] += numbers[j] * weights[row * TILE + key];
}

// `seen`: keys of the tile that each row sees.
INLINE void NAMED(add_few)(const float* weights, const NAMED(Tile) * tile, const NAMED(Tile) * next,
                           const Seen* seen, const float* factors, int num_rows, int64_t d,
                           int num_vectors, int64_t dim, float* o) {
  Vector sums[ROWS_AT_ONCE][4];
  for (int row = 0; row < num_rows; row++)
    for (int j = 0; j < num_vectors; j++)
      sums[row][j] = load(o + row * dim + d + j * LANES) * factors[row];
  int num_keys = tile->end - tile->begin, key = 0;
  const Seen* last = seen + num_rows - 1;  // rows begin and end in the order of their positions
  int begin = last->begin < num_keys ? last->begin : num_keys;
  for (; key < begin; key++)
    NAMED(add_key)(weights, tile, next, seen, num_rows, key, d, num_vectors, sums);
  for (; key < seen->end; key++)
    NAMED(add_key)(weights, tile, next, NULL, num_rows, key, d, num_vectors, sums);
  for (; key < num_keys; key++)
    NAMED(add_key)(weights, tile, next, seen, num_rows, key, d, num_vectors, sums);
  for (int row = 0; row < num_rows; row++)
    for (int j = 0; j < num_vectors; j++) put(o + row * dim + d + j * LANES, sums[row][j]);
}

// Attends up to ROWS_AT_ONCE rows over a tile.
INLINE void NAMED(attend_rows)(const Task* task, int64_t first_row, int num_rows,
                               const NAMED(Tile) * tile, const NAMED(Tile) * next, const float* q,
                               float* o, float* maxima, float* sums) {
  const Call* call = task->call;
  int num_keys = tile->end - tile->begin;
  float scores[ROWS_AT_ONCE * TILE], factors[ROWS_AT_ONCE];
  Seen seen[ROWS_AT_ONCE];
  for (int key = 0; key < num_keys; key += 4) {
    for (int i = key; i < key + 4 && i < num_keys; i++)
      NAMED(prefetch)(tile->values[i], call->value_dim);
    NAMED(multiply_few)(q, tile->keys + key, num_rows, call->key_dim, scores + key);
  }
  for (int row = 0; row < num_rows; row++) {
    int64_t position = position_of(task, first_row + row), stop = position + 1 - tile->begin;
    int64_t first = first_key(task, position) - tile->begin;
    seen[row] = (Seen){first > 0 ? first : 0, stop < 0 ? 0 : stop < num_keys ? stop : num_keys};
    factors[row] = weigh_row(scores + row * TILE, seen[row], maxima + row, sums + row);
  }
  int64_t d = 0, dim = call->value_dim;
  for (; d + 4 * LANES <= dim; d += 4 * LANES)
    NAMED(add_few)(scores, tile, next, seen, factors, num_rows, d, 4, dim, o);
  for (; d + 2 * LANES <= dim; d += 2 * LANES)
    NAMED(add_few)(scores, tile, next, seen, factors, num_rows, d, 2, dim, o);
  if (d < dim) NAMED(add_few)(scores, tile, next, seen, factors, num_rows, d, 1, dim, o);
}

// Attends up to ROWS_AT_ONCE of `num_left` rows; their number is a constant of each loop.
INLINE void NAMED(attend_some)(const Task* task, int64_t row, int num_left,
                               const NAMED(Tile) * tile, const NAMED(Tile) * next, const float* q,
                               float* o, float* maxima, float* sums) {
  if (num_left == 1)
    NAMED(attend_rows)(task, row, 1, tile, next, q, o, maxima, sums);
  else if (num_left == 2 || ROWS_AT_ONCE == 2)
    NAMED(attend_rows)(task, row, 2, tile, next, q, o, maxima, sums);
  else if (num_left == 3)
    NAMED(attend_rows)(task, row, 3, tile, next, q, o, maxima, sums);
  else
    NAMED(attend_rows)(task, row, 4, tile, next, q, o, maxima, sums);
}

static void NAMED(attend_few)(const Task* task) {
  const Call* call = task->call;
  int64_t key_dim = call->key_dim, value_dim = call->value_dim;
  int num_rows = task->num_queries * call->rows_per_query;
  float* q = scratch(num_rows * (key_dim + value_dim));
  float* o = q + num_rows * key_dim;
  float maxima[MAX_FEW_ROWS], sums[MAX_FEW_ROWS] = {0};
  for (int row = 0; row < num_rows; row++) {
    const NUMBER* query = (const NUMBER*)call->query + row_place(task, row, call->query_strides);
    for (int64_t d = 0; d < key_dim; d++)
      q[row * key_dim + d] = READ(query[d]) * (call->scale * LOG2_E);
    maxima[row] = NO_MAXIMUM;
  }
  memset(o, 0, num_rows * value_dim * sizeof(float));
  NAMED(Tile) tiles[2];
  int64_t stop = task->first_position + task->num_queries;
  NAMED(find_tile)(task, first_key(task, task->first_position), stop, tiles);
  for (int i = 0; tiles[i].begin < stop; i = !i) {
    const NAMED(Tile) * next = tiles + !i;
    NAMED(find_tile)(task, tiles[i].end, stop, tiles + !i);
    for (int row = 0; row < num_rows; row += ROWS_AT_ONCE)
      NAMED(attend_some)(task, row, num_rows - row, tiles + i, next, q + row * key_dim,
                         o + row * value_dim, maxima + row, sums + row);
  }
  for (int row = 0; row < num_rows; row++) {
    NUMBER* out = (NUMBER*)call->out + row_place(task, row, call->out_strides);
    for (int64_t d = 0; d < value_dim; d++) out[d] = MADE(o[row * value_dim + d] / sums[row]);
  }
}

// Writes K and V of all tokens, then attends: a sequence may continue from another one's blocks.
void NAMED(baton_attend)(const Call* call) {
  int fills_lanes = call->key_dim % LANES == 0 && call->value_dim % LANES == 0;
  int64_t num_tasks = call->work->num_items * call->num_kv_heads;
#pragma omp parallel num_threads(call->num_threads)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < num_tasks; i++) {
      Task task = task_of(call, i);
      NAMED(write)(&task);
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < num_tasks; i++) {
      Task task = task_of(call, i);
      if (fills_lanes && task.num_queries * call->rows_per_query <= MAX_FEW_ROWS)
        NAMED(attend_few)(&task);
      else
        NAMED(attend_many)(&task);
    }
  }
}

#undef NUMBER
#undef UNIT
#undef PER_UNIT
#undef PLUS_PRODUCT
#undef NAMED
#undef LOAD
#undef READ
#undef MADE
