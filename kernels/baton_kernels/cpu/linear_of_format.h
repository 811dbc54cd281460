// The function of linear.c: included once for each format.
//
// NUMBER is the type of the rows' numbers in memory, READ makes a float of one, MADE one of a float;
// NUMBERS_PER_UNIT are those that a unit of the weight is multiplied by. NAMED gives functions the
// name of the format.

// Arranges a part of the rows: in each group, [num_units][group_size][NUMBERS_PER_UNIT].
static void NAMED(arrange)(const Call* call, int64_t first_unit) {
  int64_t end = smaller(first_unit + PART, call->num_units);
  for (int64_t first = 0, size; first < call->num_rows; first += size) {
    size = group_size(call->num_rows, first);
    NUMBER* group = (NUMBER*)call->arranged + first * call->num_units * NUMBERS_PER_UNIT;
    for (int64_t r = 0; r < size; r++) {
      const NUMBER* row = (const NUMBER*)call->rows + (first + r) * call->row_stride;
      for (int64_t unit = first_unit; unit < end; unit++)
        for (int i = 0; i < NUMBERS_PER_UNIT; i++)
          group[(unit * size + r) * NUMBERS_PER_UNIT + i] =
              first + r < call->num_rows ? row[unit * NUMBERS_PER_UNIT + i] : 0;
    }
  }
}

// Adds to `block`, [size][PANEL], the products of a part of a group with that of a panel; with
// `is_first` sets it to them.
INLINE void NAMED(add_group)(const NUMBER* rows, const int size, const Unit* panel,
                             int64_t num_units, int is_first, float* block) {
  Vector sums[GROUP][VECTORS];
  UNROLLED for (int r = 0; r < size; r++)
    UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] = (Vector){0};
  for (int64_t unit = 0; unit < num_units; unit++) {
    UNROLLED for (int v = 0; v < VECTORS; v++)
      __builtin_prefetch((const char*)(panel + v * LANES) + AHEAD);
    ADD_PRODUCTS(sums, rows, size, panel);
    rows += size * NUMBERS_PER_UNIT;
    panel += PANEL;
  }
  UNROLLED for (int r = 0; r < size; r++)
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      Vector* sum = (Vector*)(block + r * PANEL + v * LANES);
      if (!is_first) sums[r][v] += *sum;
      *sum = sums[r][v];
    }
}

static void NAMED(add_part)(const NUMBER* rows, int size, const Unit* panel, int64_t first_unit,
                            int64_t num_units, float* block) {
  rows += first_unit * size * NUMBERS_PER_UNIT;
  panel += first_unit * PANEL;
  num_units = smaller(PART, num_units - first_unit);
  int is_first = first_unit == 0;
  if (size == 1) return NAMED(add_group)(rows, 1, panel, num_units, is_first, block);
  if (size == 2) return NAMED(add_group)(rows, 2, panel, num_units, is_first, block);
  if (size == 4) return NAMED(add_group)(rows, 4, panel, num_units, is_first, block);
#if GROUP > 8
  if (size == 8) return NAMED(add_group)(rows, 8, panel, num_units, is_first, block);
#endif
  NAMED(add_group)(rows, GROUP, panel, num_units, is_first, block);
}

// Rounds the sums of rows of a panel, then adds bias and residual as operations of their own would.
static void NAMED(store)(const Call* call, int64_t first_row, int64_t num_rows, int64_t first_out,
                         const float* block) {
  const NUMBER *bias = call->bias, *residual = call->residual;
  int64_t num_outs = smaller(PANEL, call->out_features - first_out);
  for (int64_t r = 0; r < num_rows; r++, block += PANEL) {
    int64_t place = (first_row + r) * call->out_features + first_out;
    NUMBER* out = (NUMBER*)call->out + place;
    for (int64_t i = 0; i < num_outs; i++) {
      float sum = block[i];
      if (bias) sum += READ(bias[first_out + i]);
      if (residual) sum = READ(MADE(sum)) + READ(residual[place + i]);
      out[i] = MADE(sum);
    }
  }
}

static void NAMED(multiply)(const Call* call, const NUMBER* rows, int64_t number) {
  const Unit* panel = call->weight + number * call->num_units * PANEL;
  float block[BLOCK_ROWS * PANEL] __attribute__((aligned(64)));
  for (int64_t first = 0; first < call->num_rows; first += BLOCK_ROWS) {
    int64_t num_rows = smaller(BLOCK_ROWS, call->num_rows - first);
    for (int64_t unit = 0; unit < call->num_units; unit += PART)
      for (int64_t r = 0, size; r < num_rows; r += size) {
        size = group_size(call->num_rows, first + r);
        const NUMBER* group = rows + (first + r) * call->num_units * NUMBERS_PER_UNIT;
        NAMED(add_part)(group, size, panel, unit, call->num_units, block + r * PANEL);
      }
    NAMED(store)(call, first, num_rows, number * PANEL, block);
  }
}

void NAMED(baton_linear)(const Call* call) {
  int64_t num_panels = (call->out_features + PANEL - 1) / PANEL;
  const NUMBER* rows = call->arranged ? call->arranged : call->rows;
#pragma omp parallel num_threads(call->num_threads)
  {
    if (call->arranged) {
#pragma omp for schedule(static)
      for (int64_t unit = 0; unit < call->num_units; unit += PART) NAMED(arrange)(call, unit);
    }
#pragma omp for schedule(static)
    for (int64_t p = 0; p < num_panels; p++) NAMED(multiply)(call, rows, p);
  }
}

#undef NAMED
#undef NUMBER
#undef NUMBERS_PER_UNIT
#undef READ
#undef MADE
#undef ADD_PRODUCTS
