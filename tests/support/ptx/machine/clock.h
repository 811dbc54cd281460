// Vector clock: one counter for each warp of a block, then one for each mbarrier's copies.
#pragma once
#include <algorithm>
#include <vector>

#include "numbers.h"

namespace ptx {

class Clock {
 public:
  explicit Clock(int size = 0) : counters_(size, 0) {}
  u32 operator[](int index) const { return counters_[index]; }
  void tick(int index) { counters_[index]++; }
  void reach(int index, u32 value) { counters_[index] = std::max(counters_[index], value); }
  void join(const Clock& other) {
    for (size_t i = 0; i < counters_.size(); i++) reach(int(i), other.counters_[i]);
  }

 private:
  std::vector<u32> counters_;
};

}  // namespace ptx
