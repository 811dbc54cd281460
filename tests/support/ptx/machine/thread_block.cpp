#include "thread_block.h"

namespace ptx {

std::string Access::where() const {
  return block.name() + ", warp " + std::to_string(warp.index) + ", lane " + std::to_string(lane) +
         ", line " + std::to_string(instruction.line) + ": " + instruction.text.substr(0, 120);
}

ThreadBlock::ThreadBlock(const Launch& launch, u32 id, GlobalMemory& global, Reports& reports)
    : shared(launch.shared_bytes, launch.num_warps, launch.is_watched, reports), global(global),
      launch_(launch), id_(id), reports_(reports), random_(launch.seed + id),
      copy_clocks_(MOST_MBARRIERS, 1) {
  const u32* grid = launch.grid;
  place_[0] = id % grid[0];
  place_[1] = id / grid[0] % grid[1];
  place_[2] = id / grid[0] / grid[1];
  for (int i = 0; i < launch.num_warps; i++) {
    warps_.emplace_back(i, launch.program, launch.num_warps + MOST_MBARRIERS);
    warps_.back().waited_for_launch = !launch.is_dependent;
    fill_special_registers(warps_.back());
    by_index_.push_back(&warps_.back());
  }
}

void ThreadBlock::fill_special_registers(Warp& warp) {
  const u32* grid = launch_.grid;
  for (int lane = 0; lane < LANES; lane++) {
    const u64 thread = warp.index * LANES + lane, count = u64(launch_.num_warps) * LANES;
    // In the order of `SPECIAL`.
    const u64 values[] = {thread,  0,       0,       place_[0], place_[1], place_[2],
                          grid[0], grid[1], grid[2], count,     u64(lane), u64(warp.index)};
    for (size_t i = 0; i < SPECIAL.size(); i++) warp.row(int(i))[lane] = values[i];
  }
}

std::string ThreadBlock::name() const {
  return "program " + std::to_string(place_[0]) + "," + std::to_string(place_[1]) + "," +
         std::to_string(place_[2]);
}

u64 ThreadBlock::run() {
  while (true) {
    std::vector<Warp*> ready;
    const Warp* waiting = nullptr;
    for (auto& warp : warps_)
      if (warp.live) (warp.is_at_barrier ? waiting = &warp : (ready.push_back(&warp), waiting));
    if (const int due = due_copy(ready); due >= 0) {
      land(due);
    } else if (!ready.empty()) {
      run_for_a_while(*ready[random_() % ready.size()]);
    } else if (waiting) {
      fail_as_deadlock(*waiting);
    } else {
      break;
    }
  }
  report_what_is_unfinished();
  return num_instructions_;
}

// Returns the tensor copy that lands now, or -1. Late ones land when a warp waits for them alone.
int ThreadBlock::due_copy(const std::vector<Warp*>& ready) {
  if (copies_.empty()) return -1;
  const int any = int(random_() % copies_.size());
  if (ready.empty()) return any;
  if (!launch_.copies_are_late) return random_() % 3 ? -1 : any;
  for (auto warp : ready) if (warp->num_spins > LATE_SPINS) return copy_of(warp->waits_for);
  return -1;
}

int ThreadBlock::copy_of(u32 mbarrier) const {
  for (size_t i = 0; i < copies_.size(); i++) if (copies_[i].mbarrier == mbarrier) return int(i);
  return -1;
}

// A random number of steps, or until the warp waits.
void ThreadBlock::run_for_a_while(Warp& warp) {
  for (u32 steps = 1 + random_() % 400; steps && warp.live && !warp.is_at_barrier; steps--) {
    const int spins = warp.num_spins;
    step(warp);
    if (warp.num_spins > MOST_SPINS) fail_as_deadlock(warp);
    if (warp.num_spins > spins) return;
  }
}

void ThreadBlock::step(Warp& warp) {
  Mask here;
  const int place = warp.next(here);
  const Instruction& instruction = launch_.program.code[place];
  if (++num_instructions_ > launch_.most_instructions)
    throw Error("a program does not end after " + std::to_string(num_instructions_) +
                " instructions, at line " + std::to_string(instruction.line));
  Mask mask = here;
  if (instruction.guard >= 0) {
    const Lanes& guard = warp.row(instruction.guard);
    mask = 0;
    each_lane(here, [&](int lane) {
      mask |= Mask((guard[lane] & 1) != u64(instruction.is_guard_negated)) << lane;
    });
  }
  warp.go(here, place + 1);
  if (mask) instruction.execute(*this, warp, instruction, mask);
}

void ThreadBlock::wait_at_barrier(Warp& warp, u64 barrier, int num_warps) {
  auto& here = at_barrier_[barrier];
  here.push_back(&warp);
  warp.is_at_barrier = true;
  warp.barrier = barrier;
  if (int(here.size()) < num_warps) return;
  Clock clock = warp.clock, fence = warp.fence;
  for (auto each : here) {
    clock.join(each->clock);
    fence.join(each->fence);
  }
  for (auto each : here) {
    each->clock = clock;
    each->fence = fence;
    each->clock.tick(each->index);
    each->is_at_barrier = false;
  }
  here.clear();
}

void ThreadBlock::fail_as_deadlock(const Warp& warp) const {
  Warp copy = warp;
  Mask here;
  const Instruction& instruction = launch_.program.code[copy.next(here)];
  const std::string what =
      warp.is_at_barrier ? "at barrier " + std::to_string(warp.barrier) : "for an mbarrier";
  throw Error("deadlock: " + name() + ", warp " + std::to_string(warp.index) + " waits " + what +
              ", before line " + std::to_string(instruction.line) + ": " + instruction.text);
}

void ThreadBlock::report_what_is_unfinished() {
  if (!copies_.empty())
    reports_.add("tensor copies", name() + " ended before its tensor copies had landed");
  for (auto& warp : warps_) {
    if (!warp.copies.open.empty() || !warp.copies.is_waited_for())
      reports_.add("copies", name() + " ended before its cp.async were waited for");
    if (!warp.products.open.empty() || !warp.products.is_waited_for())
      reports_.add("products", name() + " ended before its wgmma were waited for");
  }
}

}  // namespace ptx
