// Thread block (a program of Triton's): its warps, shared memory, barriers and copies in flight.
#pragma once
#include <list>
#include <map>
#include <random>

#include "global_memory.h"
#include "tensor_map.h"

namespace ptx {

// Launch of a program over a grid of blocks.
struct Launch {
  const Program& program;
  u32 grid[3];
  int num_warps;
  u32 shared_bytes;
  const u8* parameters;
  u32 seed;                 // of the order of blocks, of warps and of copies
  bool is_watched;          // for races and reads of what was not written
  bool copies_are_late;     // tensor copies land when every warp waits
  bool is_dependent;        // begins before the launch before has ended
  u64 most_instructions;
};

// mbarrier: a phase ends when all have arrived and all bytes that were announced have landed.
struct Mbarrier {
  bool is_valid = false;
  int expected = 0, pending = 0;
  i64 bytes = 0;
  u64 phase = 0;
  int clock_index = 0;     // of the copies that complete on it
  Clock clock, fence;      // of those that arrived in the last phase
  Clock next_clock, next_fence;  // in this one
};

// Tensor copy (TMA) that has not landed.
struct TensorCopy {
  const Instruction* instruction;
  int warp;
  TensorMap map;
  std::vector<i64> coordinates;
  u32 target, mbarrier;
};

class ThreadBlock {
 public:
  ThreadBlock(const Launch& launch, u32 id, GlobalMemory& global, Reports& reports);

  // Executes all warps to their end; returns the number of instructions.
  u64 run();

  u32 id() const { return id_; }
  std::string name() const;
  int num_warps() const { return launch_.num_warps; }
  const Launch& launch() const { return launch_; }
  Reports& reports() { return reports_; }

  SharedMemory shared;
  GlobalMemory& global;

  // Stops the warp at a named barrier until `num_warps` are there.
  void wait_at_barrier(Warp& warp, u64 barrier, int num_warps);

  // mbarriers, by shared address.
  void initialize(u32 address, int expected);
  Mbarrier& mbarrier(u32 address, const Access& access);
  void arrive(Mbarrier& barrier, Warp& warp, i64 bytes);
  void begin(TensorCopy copy) { copies_.push_back(std::move(copy)); }
  void land(AsyncCopy& copy, const Warp& warp);

 private:
  static constexpr int MOST_MBARRIERS = 24;
  static constexpr int MOST_SPINS = 100000;
  static constexpr int LATE_SPINS = 20;

  const Launch& launch_;
  const u32 id_;
  u32 place_[3];
  Reports& reports_;
  std::mt19937 random_;
  std::list<Warp> warps_;
  std::vector<Warp*> by_index_;
  std::map<u64, std::vector<Warp*>> at_barrier_;
  std::map<u32, Mbarrier> mbarriers_;
  std::vector<u32> copy_clocks_;
  std::vector<TensorCopy> copies_;
  u64 num_instructions_ = 0;

  void fill_special_registers(Warp& warp);
  int due_copy(const std::vector<Warp*>& ready);
  int copy_of(u32 mbarrier) const;
  void land(int index);
  void end_phase(Mbarrier& barrier);
  void run_for_a_while(Warp& warp);
  void step(Warp& warp);
  void report_what_is_unfinished();
  [[noreturn]] void fail_as_deadlock(const Warp& warp) const;
};

}  // namespace ptx
