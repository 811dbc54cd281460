// Warp: registers of 32 lanes, which of them are at which instruction, and its vector clocks.
#pragma once
#include <deque>
#include <vector>

#include "clock.h"
#include "program.h"

namespace ptx {

// Calls `f(lane)` for each lane of a mask.
template <class F>
inline void each_lane(Mask mask, F f) {
  if (mask == ~Mask(0)) {
    for (int lane = 0; lane < LANES; lane++) f(lane);
  } else {
    for (; mask; mask &= mask - 1) f(__builtin_ctz(mask));
  }
}

// cp.async of one lane, which lands when its group is waited for.
struct AsyncCopy {
  u32 target;
  u64 source;
  int size, source_size;
  const Instruction* instruction;
};

// wgmma of one warp, which is computed when its group is waited for.
struct WarpgroupProduct {
  const Instruction* instruction;
  std::vector<u64> left_registers;         // those of all lanes, if A is in registers
  std::vector<u32> left, right;            // shared addresses of A [16, 16] and of B [columns, 16]
  bool accumulates;
};

// Groups of asynchronous operations: open until committed, then waited for in order.
template <class T>
struct Groups {
  std::vector<T> open;
  std::deque<std::vector<T>> committed;

  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  template <class F>
  void wait(size_t allowed, F finish) {
    for (; committed.size() > allowed; committed.pop_front())
      for (auto& each : committed.front()) finish(each);
  }
  bool is_waited_for() const {
    for (auto& group : committed) if (!group.empty()) return false;
    return true;
  }
};

class Warp {
 public:
  Warp(int index, const Program& program, int num_clocks)
      : index(index), clock(num_clocks), fence(num_clocks), registers_(program.num_registers) {
    for (auto& row : registers_) row.fill(0xdeadbeefdeadbeef);
    for (auto& [value, place] : program.literals) registers_[place].fill(value);
    clock.tick(index);
  }

  const int index;
  Mask live = ~Mask(0);
  Clock clock;   // of all warps and copies: up to where their accesses are ordered before ours
  Clock fence;   // the same, up to the last fence between the proxies of shared memory
  Groups<AsyncCopy> copies;
  Groups<WarpgroupProduct> products;
  bool is_at_barrier = false;
  u64 barrier = 0;
  int num_spins = 0;          // failed waits for an mbarrier since the last that succeeded
  u32 waits_for = 0;          // the mbarrier of these
  bool waited_for_launch = true;  // before this one; see `griddepcontrol.wait`

  Lanes& row(const Operand& operand) { return registers_[operand.index]; }
  Lanes& row(int index) { return registers_[index]; }
  u64 get(const Operand& operand, int lane) const { return registers_[operand.index][lane]; }
  u64 address(const Operand& operand, int lane) const { return get(operand, lane) + operand.offset; }
  u32 shared_address(const Operand& operand, int lane) const { return u32(address(operand, lane)); }

  // The next instruction, and the lanes that are there: those furthest behind go first, so that
  // lanes which took different branches meet again.
  int next(Mask& here) {
    if (!is_diverged_) { here = live; return place_; }
    int least = INT32_MAX;
    each_lane(live, [&](int lane) { least = std::min(least, places_[lane]); });
    here = 0;
    each_lane(live, [&](int lane) { here |= Mask(places_[lane] == least) << lane; });
    if (here == live) { is_diverged_ = false; place_ = least; }
    return least;
  }

  void go(Mask lanes, int place) {
    if (lanes == live) { is_diverged_ = false; place_ = place; return; }
    if (!is_diverged_) { places_.fill(place_); is_diverged_ = true; }
    each_lane(lanes, [&](int lane) { places_[lane] = place; });
  }

 private:
  std::vector<Lanes> registers_;
  int place_ = 0;
  bool is_diverged_ = false;
  std::array<int, LANES> places_;
};

}  // namespace ptx
