// C interface of the machine, for `emulator.py`.
#include <algorithm>
#include <cstdio>

#include "thread_block.h"

namespace {

using namespace ptx;

void write(const std::string& text, char* to, int size) { snprintf(to, size, "%s", text.c_str()); }

// Executes all blocks of a grid in the order that the seed gives; returns instructions of warps.
u64 run(const Launch& launch, GlobalMemory& global, Reports& reports) {
  std::vector<u32> order(u64(launch.grid[0]) * launch.grid[1] * launch.grid[2]);
  for (size_t i = 0; i < order.size(); i++) order[i] = u32(i);
  std::mt19937 random(launch.seed);
  if (launch.seed) std::shuffle(order.begin(), order.end(), random);
  u64 total = 0;
  for (u32 id : order) total += ThreadBlock(launch, id, global, reports).run();
  return total;
}

}  // namespace

extern "C" {

struct PtxParameter {
  int offset, size;
};

struct PtxLaunch {
  u32 grid[3];
  int num_warps;
  u32 shared_bytes, seed;
  int is_watched, copies_are_late, is_dependent;
  int num_buffers;
  u64 most_instructions, num_instructions;
  const u8* parameters;
  Buffer* buffers;
};

// Returns a program, or null with a sentence in `error`. It is never freed: a process has few.
Program* ptx_load(const char* text, char* error, int size) {
  try {
    return parse(text).release();
  } catch (const std::exception& failure) {
    write(failure.what(), error, size);
    return nullptr;
  }
}

int ptx_num_parameters(const Program* program) { return int(program->parameters.size()); }
int ptx_parameter_bytes(const Program* program) { return program->parameter_bytes; }

PtxParameter ptx_parameter(const Program* program, int index) {
  const Parameter& found = program->parameters[index];
  return {found.offset, found.size};
}

// Returns 0 if all is well; else `reports` has one sentence a line.
int ptx_run(const Program* program, PtxLaunch* launch, char* text, int size) {
  Reports reports;
  GlobalMemory global(
      launch->buffers, launch->num_buffers, *program, launch->is_watched, reports);
  const Launch made{*program, {launch->grid[0], launch->grid[1], launch->grid[2]},
                    launch->num_warps, launch->shared_bytes, launch->parameters, launch->seed,
                    bool(launch->is_watched), bool(launch->copies_are_late),
                    bool(launch->is_dependent), launch->most_instructions};
  std::string found;
  try {
    launch->num_instructions = run(made, global, reports);
  } catch (const std::exception& failure) {
    found = failure.what();
  }
  for (auto& sentence : reports.sentences()) found += (found.empty() ? "" : "\n") + sentence;
  write(found, text, size);
  return found.empty() ? 0 : 1;
}

}
