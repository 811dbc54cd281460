// Products that matrix instructions have in common: 16 rows of A by columns of B, 16 deep. Sums are
// of doubles, rounded once: tensor cores keep fewer bits, and no document says how many.
#pragma once
#include "warp.h"

namespace ptx {

constexpr int ROWS = 16, DEPTH = 16;
using Left = double[ROWS][DEPTH];

// Fills A from the four registers of each lane, which `get(part, lane)` returns.
template <class T, class F>
void read_left(Left& left, F get) {
  for (int lane = 0; lane < LANES; lane++)
    for (int part = 0; part < 4; part++) {
      const u64 pair = get(part, lane);
      const int row = lane / 4 + part % 2 * 8, depth = lane % 4 * 2 + part / 2 * 8;
      left[row][depth] = from_bits<T>(pair);
      left[row][depth + 1] = from_bits<T>(pair >> 16);
    }
}

// Returns A B, [16, columns], of B [16, columns].
inline std::vector<double> product(const Left& left, const std::vector<double>& right, int columns) {
  std::vector<double> sums(size_t(ROWS) * columns);
  for (int row = 0; row < ROWS; row++)
    for (int depth = 0; depth < DEPTH; depth++)
      for (int column = 0; column < columns; column++)
        sums[row * columns + column] += left[row][depth] * right[depth * columns + column];
  return sums;
}

}  // namespace ptx
