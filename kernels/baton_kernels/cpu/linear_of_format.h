// The function of linear.c: included once for each format.
//
// NUMBER is the type of the rows' numbers in memory; NUMBERS_PER_UNIT are those that a unit of the
// weight is multiplied by; IS_CODED is whether the weight has codes. NAMED gives functions the name
// of the format.

#define READ(number) _Generic((NUMBER){0}, float: same, BFloat16: number_of_bfloat16)(number)
#define MADE(number) _Generic((NUMBER){0}, float: same, BFloat16: bfloat16_of)(number)

// Arranges a part of the units of rows: in each tile, [num_units][TILE][NUMBERS_PER_UNIT].
static void NAMED(arrange)(const Call* call, int64_t num_arranged, int64_t first_unit) {
  int64_t end = smaller(first_unit + PART, call->num_units);
  for (int64_t r = 0; r < num_arranged; r++) {
    const NUMBER* row = (const NUMBER*)call->rows + r * call->row_stride;
    NUMBER* place = (NUMBER*)call->arranged +
                    (r / TILE * TILE * call->num_units + r % TILE) * NUMBERS_PER_UNIT;
    for (int64_t unit = first_unit; unit < end; unit++)
      for (int i = 0; i < NUMBERS_PER_UNIT; i++)
        place[unit * TILE * NUMBERS_PER_UNIT + i] =
            r < call->num_rows ? row[unit * NUMBERS_PER_UNIT + i] : 0;
  }
}

// Sums the numbers of each group of a row.
static void NAMED(sum_groups)(const Call* call, int64_t row) {
  int64_t num_groups = call->num_units / call->group_units;
  int64_t size = call->group_units * NUMBERS_PER_UNIT;
  const NUMBER* numbers = (const NUMBER*)call->rows + row * call->row_stride;
  for (int64_t group = 0; group < num_groups; group++, numbers += size) {
    float sum = 0;
    for (int64_t i = 0; i < size; i++) sum += READ(numbers[i]);
    call->group_sums[row * num_groups + group] = sum;
  }
}

// Where the units of a tile of rows are: the number of a row's unit is `rows[r * step]` or one of
// those behind it, that of its next one `unit_step` further.
typedef struct {
  const NUMBER* rows;
  int64_t step, unit_step;
} NAMED(Tile);

// Adds to `totals`, [num_rows][PANEL], the products of a part of the rows' units with that of a
// panel.
INLINE void NAMED(add_tile)(const Call* call, NAMED(Tile) tile, const int num_rows, int64_t number,
                            int64_t first_unit, float* totals) {
  int64_t end = smaller(first_unit + PART, call->num_units);
  const Unit* panel = call->weight + (number * call->num_units + first_unit) * PANEL;
  const NUMBER* rows = tile.rows + first_unit * tile.unit_step;
  int64_t group_units = IS_CODED ? call->group_units : end - first_unit;
  for (int64_t unit = first_unit; unit < end; unit += group_units) {
    Vector sums[TILE][VECTORS];
    UNROLLED for (int r = 0; r < num_rows; r++)
      UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] = (Vector){0};
    for (int64_t u = 0; u < group_units; u++, rows += tile.unit_step, panel += PANEL)
      NAMED(add_products)(sums, rows, tile.step, num_rows, panel, call->codebook);
    const float* scales = NULL;
    if (IS_CODED)
      scales = call->scales + (number * call->num_units + unit) / group_units * PANEL;
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      Vector scale = IS_CODED ? held(load(scales + v * LANES)) : (Vector)all(1);
      UNROLLED for (int r = 0; r < num_rows; r++) {
        Vector* total = (Vector*)(totals + r * PANEL + v * LANES);
        *total = multiplied_and_added(scale, sums[r][v], *total);
      }
    }
  }
}

// The same for a tile that begins with `row`.
static void NAMED(add_rows)(const Call* call, int64_t row, int64_t number, int64_t first_unit,
                            float* totals) {
  if (row < baton_linear_arranged_rows(call->num_rows)) {
    const NUMBER* rows =
        (const NUMBER*)call->arranged + row * call->num_units * NUMBERS_PER_UNIT;
    NAMED(Tile) tile = {rows, NUMBERS_PER_UNIT, TILE * NUMBERS_PER_UNIT};
    return NAMED(add_tile)(call, tile, TILE, number, first_unit, totals);
  }
  const NUMBER* rows = (const NUMBER*)call->rows + row * call->row_stride;
  NAMED(Tile) tile = {rows, call->row_stride, NUMBERS_PER_UNIT};
  switch (call->num_rows - row) {
#define DIRECT(num_rows) \
  case num_rows:         \
    return NAMED(add_tile)(call, tile, num_rows, number, first_unit, totals);
    DIRECT(1) DIRECT(2) DIRECT(3) DIRECT(4) DIRECT(5)
#if MAX_DIRECT == 8
    DIRECT(6) DIRECT(7) DIRECT(8)
#endif
#undef DIRECT
  }
}

// Writes outputs of rows: their totals and the bias, rounded, to which the residual is added as by an
// operation of its own.
static void NAMED(store)(const Call* call, int64_t first_row, int64_t num_rows, int64_t first_out,
                         const float* totals) {
  const NUMBER *bias = call->bias, *residual = call->residual;
  int64_t num_outs = smaller(PANEL, call->out_features - first_out);
  for (int64_t r = 0; r < num_rows; r++, totals += PANEL) {
    int64_t place = (first_row + r) * call->out_features + first_out;
    NUMBER* out = (NUMBER*)call->out + (first_row + r) * call->out_stride + first_out;
    for (int64_t i = 0; i < num_outs; i++) {
      float sum = totals[i];
      if (bias) sum += READ(bias[first_out + i]);
      if (residual) sum = READ(MADE(sum)) + READ(residual[place + i]);
      out[i] = MADE(sum);
    }
  }
}

static void NAMED(multiply)(const Call* call, int64_t number) {
  float totals[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
  for (int64_t first = 0; first < call->num_rows; first += ROWS_AT_ONCE) {
    int64_t num_rows = smaller(ROWS_AT_ONCE, call->num_rows - first);
    begin_totals(call, number, first, num_rows, totals);
    for (int64_t unit = 0; unit < call->num_units; unit += PART)
      for (int64_t r = 0; r < num_rows; r += TILE)
        NAMED(add_rows)(call, first + r, number, unit, totals + r * PANEL);
    NAMED(store)(call, first, num_rows, number * PANEL, totals);
  }
}

void NAMED(baton_linear)(const Call* call) {
  int64_t num_panels = (call->out_features + PANEL - 1) / PANEL;
  int64_t num_arranged = baton_linear_arranged_rows(call->num_rows);
#pragma omp parallel for num_threads(call->num_threads) if (num_arranged * call->num_units > MANY)
  for (int64_t unit = 0; unit < call->num_units; unit += PART)
    NAMED(arrange)(call, num_arranged, unit);
  if (call->group_sums)
    for (int64_t row = 0; row < call->num_rows; row++) NAMED(sum_groups)(call, row);
#pragma omp parallel for num_threads(call->num_threads) schedule(static)
  for (int64_t p = 0; p < num_panels; p++) NAMED(multiply)(call, p);
}

#undef NAMED
#undef NUMBER
#undef NUMBERS_PER_UNIT
#undef IS_CODED
#undef READ
#undef MADE
