// The functions of rowwise.c: included once for each dtype.
//
// NUMBER is the type of the numbers in memory, READ makes a float of one, MADE one of a float, and
// NAMED gives functions the name of the dtype. Strides are in numbers.

void NAMED(baton_rms_norm)(const Norm* call) {
  int64_t num_heads = call->num_heads, width = call->width, num_all = call->num_rows * num_heads;
  float eps = call->eps;
#pragma omp parallel for num_threads(call->num_threads) if (num_all * width > MIN_NUMBERS)
  for (int64_t i = 0; i < num_all; i++) {
    int64_t head = i % num_heads * width;
    const NUMBER *row = (const NUMBER*)call->x + i / num_heads * call->stride + head;
    const NUMBER* weight = call->weight;
    NUMBER* out = (NUMBER*)call->out + i / num_heads * call->out_stride + head;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t j = 0; j < width; j++) sum += READ(row[j]) * READ(row[j]);
    float factor = 1.0f / sqrtf(sum / width + eps);
#pragma omp simd
    for (int64_t j = 0; j < width; j++)
      out[j] = MADE(READ(row[j]) * factor * READ(weight[j]));
  }
}

void NAMED(baton_silu_and_multiply)(const Activation* call) {
  int64_t width = call->width;
#pragma omp parallel for num_threads(call->num_threads) if (call->num_rows * width > MIN_NUMBERS)
  for (int64_t i = 0; i < call->num_rows; i++) {
    const NUMBER *gate = (const NUMBER*)call->gate_up + i * 2 * width, *up = gate + width;
    NUMBER* out = (NUMBER*)call->out + i * width;
#pragma omp simd
    for (int64_t j = 0; j < width; j++)
      out[j] = MADE(READ(MADE(silu(READ(gate[j])))) * READ(up[j]));
  }
}

INLINE void NAMED(turn)(NUMBER* x, int64_t apart, const NUMBER* angle) {
  float first = READ(x[0]), second = READ(x[apart]), cos = READ(angle[0]), sin = READ(angle[1]);
  x[0] = MADE(READ(MADE(first * cos)) - READ(MADE(second * sin)));
  x[apart] = MADE(READ(MADE(second * cos)) + READ(MADE(first * sin)));
}

void NAMED(baton_rotate)(const Turn* call) {
  int64_t num_heads = call->num_heads, dim = call->dim, half = dim / 2;
  int64_t num_all = call->num_rows * num_heads;
#pragma omp parallel for num_threads(call->num_threads) if (num_all * dim > MIN_NUMBERS)
  for (int64_t i = 0; i < num_all; i++) {
    NUMBER* head = (NUMBER*)call->heads + i / num_heads * call->stride + i % num_heads * dim;
    const NUMBER* angles = (const NUMBER*)call->table + call->positions[i / num_heads] * dim;
    if (call->is_adjacent)
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
