// Products that matrix instructions have in common: 16 rows of A by columns of B, 16 deep. Sums are
// of doubles, rounded once: tensor cores keep fewer bits, and no document says how many.
#pragma once
#include "warp.h"

namespace ptx {

constexpr int DEPTH = 16;
using Left = float[16][DEPTH];

// Fills A from the four registers of each lane, which `get(part, lane)` returns.
template <class T, class F>
void read_left(Left& left, F get) {
  for (int lane = 0; lane < LANES; lane++)
    for (int part = 0; part < 4; part++) {
      const u64 pair = get(part, lane);
      const int row = lane / 4 + part % 2 * 8, depth = lane % 4 * 2 + part / 2 * 8;
      left[row][depth] = float(from_bits<T>(pair));
      left[row][depth + 1] = float(from_bits<T>(pair >> 16));
    }
}

inline double dot(const float* row, const float* column) {
  double sum = 0;
  for (int i = 0; i < DEPTH; i++) sum += double(row[i]) * column[i];
  return sum;
}

}  // namespace ptx
