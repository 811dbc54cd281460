// The functions of rowwise.c: included once for each dtype.
//
// NUMBER is the type of the numbers in memory, READ makes a float of one, MADE one of a float, and
// NAMED gives functions the name of the dtype. Strides are in numbers.

// x: [num_rows, num_heads, width], of which rows are `stride` apart and heads adjacent; weight:
// [width]; out: as x, contiguous.
void NAMED(baton_rms_norm)(const NUMBER* x, const NUMBER* weight, NUMBER* out, int64_t num_rows,
                           int64_t num_heads, int64_t width, int64_t stride, float eps,
                           int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * num_heads * width > MIN_NUMBERS)
  for (int64_t i = 0; i < num_rows * num_heads; i++) {
    const NUMBER* row = x + i / num_heads * stride + i % num_heads * width;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; j++) sum += READ(row[j]) * READ(row[j]);
    float factor = 1.0f / sqrtf(sum / width + eps);
#pragma omp simd
    for (int64_t j = 0; j < width; j++)
      out[i * width + j] = MADE(READ(row[j]) * factor * READ(weight[j]));
  }
}

// gate_up: [num_rows, 2 * width], the gate first; out: [num_rows, width].
void NAMED(baton_silu_and_multiply)(const NUMBER* gate_up, NUMBER* out, int64_t num_rows,
                                    int64_t width, int num_threads) {
#pragma omp parallel for num_threads(num_threads) if (num_rows * width > MIN_NUMBERS)
  for (int64_t i = 0; i < num_rows; i++) {
    const NUMBER *gate = gate_up + i * 2 * width, *up = gate + width;
#pragma omp simd
    for (int64_t j = 0; j < width; j++)
      out[i * width + j] = MADE(READ(MADE(silu(READ(gate[j])))) * READ(up[j]));
  }
}

INLINE void NAMED(turn)(NUMBER* x, int64_t apart, const NUMBER* angle) {
  float first = READ(x[0]), second = READ(x[apart]), cos = READ(angle[0]), sin = READ(angle[1]);
  x[0] = MADE(READ(MADE(first * cos)) - READ(MADE(second * sin)));
  x[apart] = MADE(READ(MADE(second * cos)) + READ(MADE(first * sin)));
}

// Rotates in place the first num_heads heads of each row; rows are `stride` apart.
//
// table: [max_len, dim / 2, 2], cosine and sine of each pair by position. Numbers 2i and 2i + 1 of
// a head are a pair if `is_adjacent`, else i and i + dim / 2.
void NAMED(baton_rotate)(NUMBER* heads, const int64_t* positions, const NUMBER* table,
                         int64_t num_rows, int64_t num_heads, int64_t dim, int64_t stride,
                         int is_adjacent, int num_threads) {
  int64_t half = dim / 2;
#pragma omp parallel for num_threads(num_threads) if (num_rows * num_heads * dim > MIN_NUMBERS)
  for (int64_t i = 0; i < num_rows * num_heads; i++) {
    NUMBER* head = heads + i / num_heads * stride + i % num_heads * dim;
    const NUMBER* angles = table + positions[i / num_heads] * dim;
    if (is_adjacent)
#pragma omp simd
      for (int64_t j = 0; j < half; j++) NAMED(turn)(head + 2 * j, 1, angles + 2 * j);
    else
#pragma omp simd
      for (int64_t j = 0; j < half; j++) NAMED(turn)(head + j, half, angles + 2 * j);
  }
}

#undef NUMBER
#undef NAMED
#undef READ
#undef MADE
