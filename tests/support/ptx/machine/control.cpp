// Instructions of control flow, barriers, fences, and those by which lanes of a warp exchange.
#include "arithmetic.h"
#include "thread_block.h"

namespace ptx {
namespace {

void branch(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  warp.go(mask, in.target);
}

void leave(ThreadBlock&, Warp& warp, const Instruction&, Mask mask) { warp.live &= ~mask; }

void nothing(ThreadBlock&, Warp&, const Instruction&, Mask) {}

void trap(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  throw Error("trap: " + Access{block, warp, in, __builtin_ctz(mask)}.where());
}

void barrier(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  const int lane = __builtin_ctz(mask);
  const bool is_partial = in.operands.size() > 1;
  const int warps = is_partial ? int(warp.get(in.operands[1], lane)) / LANES : block.num_warps();
  block.wait_at_barrier(warp, warp.get(in.operands[0], lane), warps);
}

void fence_proxy(ThreadBlock&, Warp& warp, const Instruction&, Mask) { warp.fence.join(warp.clock); }

void wait_for_launch(ThreadBlock&, Warp& warp, const Instruction&, Mask) {
  warp.waited_for_launch = true;
}

void shuffle(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  const Lanes values = warp.row(in.operands[1]);
  const Lanes amounts = warp.row(in.operands[2]), limits = warp.row(in.operands[3]);
  each_lane(mask, [&](int lane) {
    const int segment = int(limits[lane] >> 8) & 31, clamp = int(limits[lane]) & 31;
    const int least = lane & segment, most = least | (clamp & ~segment);
    const int amount = int(amounts[lane]) & 31;
    int other = lane;
    bool is_inside = false;
    if (in.has("bfly")) { other = lane ^ amount; is_inside = other <= most; }
    if (in.has("idx")) { other = least | (amount & ~segment); is_inside = other <= most; }
    if (in.has("up")) { other = lane - amount; is_inside = other >= most; }
    if (in.has("down")) { other = lane + amount; is_inside = other <= most; }
    if (!is_inside) other = lane;
    warp.row(in.operands[0])[lane] = u32(values[other]);
    if (in.operands[0].second) warp.row(in.operands[0].second)[lane] = is_inside;
  });
}

void vote(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  Mask ballot = 0;
  each_lane(mask, [&](int lane) { ballot |= Mask(warp.get(in.operands[1], lane) & 1) << lane; });
  const u64 result = in.has("ballot") ? ballot
                     : in.has("any")  ? ballot != 0
                     : in.has("all")  ? ballot == mask
                                      : ballot == 0 || ballot == mask;
  each_lane(mask, [&](int lane) { warp.row(in.operands[0])[lane] = result; });
}

void active_mask(ThreadBlock&, Warp& warp, const Instruction& in, Mask mask) {
  each_lane(mask, [&](int lane) { warp.row(in.operands[0])[lane] = mask; });
}

void elect(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  const int leader = __builtin_ctz(mask);
  each_lane(mask, [&](int lane) {
    warp.row(in.operands[0])[lane] = leader;
    if (in.operands[0].second) warp.row(in.operands[0].second)[lane] = lane == leader;
  });
}

template <class Operation, class T>
void reduce(ThreadBlock& block, Warp& warp, const Instruction& in, Mask mask) {
  require_all(block, warp, in, mask);
  const Lanes values = warp.row(in.operands[1]);
  T total = from_bits<T>(values[__builtin_ctz(mask)]);
  each_lane(mask & (mask - 1), [&](int lane) {
    total = Operation::apply(total, from_bits<T>(values[lane]));
  });
  each_lane(mask, [&](int lane) { warp.row(in.operands[0])[lane] = to_bits(total); });
}

struct And { static u32 apply(u32 a, u32 b) { return a & b; } };
struct Or { static u32 apply(u32 a, u32 b) { return a | b; } };
struct Xor { static u32 apply(u32 a, u32 b) { return a ^ b; } };

Handler reduction(const Instruction& in) {
  const bool is_signed_type = in.type == Type::S32;
  if (in.has("add")) return reduce<Add, u32>;
  if (in.has("min")) return is_signed_type ? reduce<Min, i32> : reduce<Min, u32>;
  if (in.has("max")) return is_signed_type ? reduce<Max, i32> : reduce<Max, u32>;
  return in.has("and") ? reduce<And, u32> : in.has("or") ? reduce<Or, u32> : reduce<Xor, u32>;
}

}  // namespace

void require_all(const ThreadBlock& block, const Warp& warp, const Instruction& in, Mask mask) {
  if (mask != warp.live)
    throw Error("not all lanes of the warp are here: " + Access{block, warp, in, 0}.where());
}

void decode_control(Instruction& in) {
  static const std::map<std::string, Handler> HANDLERS = {
      {"bra", branch},   {"ret", leave},   {"exit", leave},         {"trap", trap},
      {"shfl", shuffle}, {"vote", vote},   {"activemask", active_mask},
      {"elect", elect},  {"membar", nothing}, {"nanosleep", nothing}, {"prefetch", nothing}};
  const std::string& name = in.words[0];
  if (auto found = HANDLERS.find(name); found != HANDLERS.end()) in.execute = found->second;
  if (name == "redux") in.execute = reduction(in);
  if (name == "fence") in.execute = in.begins_with("fence", "proxy") ? fence_proxy : nothing;
  if (name == "bar" || name == "barrier") {
    if (in.has("warp")) in.execute = nothing;  // lanes of a warp run in step
    else if (in.has("sync") && !in.has("cluster")) in.execute = barrier;
  }
  if (in.begins_with("griddepcontrol", "wait")) in.execute = wait_for_launch;
  if (in.begins_with("griddepcontrol", "launch_dependents")) in.execute = nothing;
}

}  // namespace ptx
