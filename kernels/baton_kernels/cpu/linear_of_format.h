// The function of linear.c: included once for each format.
//
// NUMBER is the type of the rows' numbers in memory, READ makes a float of one, MADE one of a float;
// NUMBERS_PER_UNIT are those that a unit of the weight is multiplied by. NAMED gives functions the
// name of the format.

// Arranges a part of the units of rows: in each group, [num_units][GROUP][NUMBERS_PER_UNIT].
static void NAMED(arrange)(const Call* call, int64_t num_arranged, int64_t first_unit) {
  int64_t end = smaller(first_unit + PART, call->num_units);
  for (int64_t r = 0; r < num_arranged; r++) {
    const NUMBER* row = (const NUMBER*)call->rows + r * call->row_stride;
    NUMBER* place = (NUMBER*)call->arranged +
                    (r / GROUP * GROUP * call->num_units + r % GROUP) * NUMBERS_PER_UNIT;
    for (int64_t unit = first_unit; unit < end; unit++)
      for (int i = 0; i < NUMBERS_PER_UNIT; i++)
        place[unit * GROUP * NUMBERS_PER_UNIT + i] =
            r < call->num_rows ? row[unit * NUMBERS_PER_UNIT + i] : 0;
  }
}

// Adds to `totals`, [num_rows][PANEL], the products of a part of the rows' units with that of a
// panel; with `is_first` sets it to them. Rows are `step` numbers apart, their units `unit_step`.
INLINE void NAMED(add_group)(const NUMBER* rows, int64_t step, int64_t unit_step, const int num_rows,
                             const Unit* panel, int64_t num_units, int is_first, float* totals) {
  Vector sums[GROUP][VECTORS];
  UNROLLED for (int r = 0; r < num_rows; r++)
    UNROLLED for (int v = 0; v < VECTORS; v++) sums[r][v] = (Vector){0};
  for (int64_t unit = 0; unit < num_units; unit++, rows += unit_step, panel += PANEL)
    NAMED(add_products)(sums, rows, step, num_rows, panel);
  UNROLLED for (int r = 0; r < num_rows; r++)
    UNROLLED for (int v = 0; v < VECTORS; v++) {
      Vector* sum = (Vector*)(totals + r * PANEL + v * LANES);
      if (!is_first) sums[r][v] += *sum;
      *sum = sums[r][v];
    }
}

// The same for a group that begins with `row`.
static void NAMED(add_rows)(const Call* call, int64_t row, const Unit* panel, int64_t first_unit,
                            float* totals) {
  int64_t num_units = smaller(PART, call->num_units - first_unit), step = call->row_stride;
  int is_first = first_unit == 0;
  panel += first_unit * PANEL;
  if (row < baton_linear_arranged_rows(call->num_rows)) {
    const NUMBER* rows = (const NUMBER*)call->arranged +
                         (row * call->num_units + first_unit * GROUP) * NUMBERS_PER_UNIT;
    return NAMED(add_group)(rows, NUMBERS_PER_UNIT, GROUP * NUMBERS_PER_UNIT, GROUP, panel,
                            num_units, is_first, totals);
  }
  const NUMBER* rows = (const NUMBER*)call->rows + row * step + first_unit * NUMBERS_PER_UNIT;
  switch (call->num_rows - row) {
#define DIRECT(num_rows)                                                                        \
  case num_rows:                                                                                \
    return NAMED(add_group)(rows, step, NUMBERS_PER_UNIT, num_rows, panel, num_units, is_first, \
                            totals);
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
    NUMBER* out = (NUMBER*)call->out + place;
    for (int64_t i = 0; i < num_outs; i++) {
      float sum = totals[i];
      if (bias) sum += READ(bias[first_out + i]);
      if (residual) sum = READ(MADE(sum)) + READ(residual[place + i]);
      out[i] = MADE(sum);
    }
  }
}

static void NAMED(multiply)(const Call* call, int64_t number) {
  const Unit* panel = call->weight + number * call->num_units * PANEL;
  float totals[ROWS_AT_ONCE * PANEL] __attribute__((aligned(64)));
  for (int64_t first = 0; first < call->num_rows; first += ROWS_AT_ONCE) {
    int64_t num_rows = smaller(ROWS_AT_ONCE, call->num_rows - first);
    for (int64_t unit = 0; unit < call->num_units; unit += PART)
      for (int64_t r = 0; r < num_rows; r += GROUP)
        NAMED(add_rows)(call, first + r, panel, unit, totals + r * PANEL);
    NAMED(store)(call, first, num_rows, number * PANEL, totals);
  }
}

void NAMED(baton_linear)(const Call* call) {
  int64_t num_panels = (call->out_features + PANEL - 1) / PANEL;
  int64_t num_arranged = baton_linear_arranged_rows(call->num_rows);
#pragma omp parallel for num_threads(call->num_threads) if (num_arranged * call->num_units > MANY)
  for (int64_t unit = 0; unit < call->num_units; unit += PART)
    NAMED(arrange)(call, num_arranged, unit);
#pragma omp parallel for num_threads(call->num_threads) schedule(static)
  for (int64_t p = 0; p < num_panels; p++) NAMED(multiply)(call, p);
}

#undef NAMED
#undef NUMBER
#undef NUMBERS_PER_UNIT
#undef READ
#undef MADE
