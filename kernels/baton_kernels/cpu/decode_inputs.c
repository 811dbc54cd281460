// Inputs of recorded decode steps in one call: what numpy does in some fifty operations.
//
// `DecodeInputs` of baton_kernels.attention.decode_inputs is its twin in numpy, by which tests check it.

#include <stdint.h>
#include <string.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// A kind of layer, in the order of `_Kind` in decode_inputs.py. Places are in numbers, from the
// beginning of the inputs.
typedef struct {
  int64_t num_items, num_shared_items, members, positions, first_slots, items, shared_items;
  int64_t max_items, max_shared_items, max_members, max_partials;
  int64_t least_split, most_splits;  // as those of `SplitRule`
  int64_t tile_keys;
  int64_t members_per_shared_item;
  int64_t window;  // 0: none
} Kind;

// Prefixes that the layers of a kind attend once, in the order of `_Shared` in decode_inputs.py.
typedef struct {
  int64_t num_prefixes;
  const int64_t* sizes;       // [num_prefixes], members of each
  const int64_t* num_tokens;  // [num_prefixes], multiples of their members' split
  const int64_t* members;     // the decodes of all prefixes, one prefix after the other
} Shared;

// In the order of `_Layout` in decode_inputs.py.
typedef struct {
  int64_t num_groups, num_kinds;
  int64_t row_words;  // numbers of int64 in a row of the header
  int64_t block_size;
  int64_t table_width;
  const int32_t* const* tables;  // [num_groups] of [num_batch_slots, table_width]
  const Kind* kinds;
} Layout;

typedef struct {
  int32_t first_member, num_members, batch_slot, begin, end, seen_begin, seen_end, slot;
} SplitItem;

// Plan that is being packed: how much there is of it so far.
typedef struct {
  int32_t *members, *positions, *first_slots;
  SplitItem *items, *shared_items;
  int64_t num_members, num_partials, num_items, num_shared_items;
} Plan;

// Returns the tokens of a split of what a decode sees.
static int64_t split_of(const Kind* kind, int64_t start) {
  const int64_t seen = kind->window ? MIN(start + 1, kind->window) : start + 1;
  int64_t split = kind->least_split;
  while (split * kind->most_splits < seen) split *= 2;
  return split;
}

// Adds a decode, whose first tokens shared items cover. Returns whether its items fit.
static int add_member(const Kind* kind, Plan* plan, int64_t decode, int64_t batch_slot,
                      int64_t start, int64_t num_shared_tokens) {
  const int64_t split = split_of(kind, start), end = start + 1;
  const int64_t num_covered = num_shared_tokens / split;
  const int64_t seen_begin = kind->window ? end - kind->window : 0;
  const int64_t begin = MAX(seen_begin, 0) / kind->tile_keys * kind->tile_keys;
  const int64_t first = MAX(seen_begin, 0) / split, num_splits = start / split + 1 - first;
  const int64_t member = plan->num_members++;
  if (plan->num_items + num_splits - num_covered > kind->max_items) return 0;
  plan->members[member] = decode;
  plan->positions[member] = start;
  plan->first_slots[member] = plan->num_partials;
  plan->num_partials += num_splits;
  for (int64_t slot = num_covered; slot < num_splits; slot++) {
    const int64_t edge = (first + slot) * split;
    plan->items[plan->num_items++] =
        (SplitItem){member,     1,   batch_slot, MAX(edge, begin), MIN(end, edge + split),
                    seen_begin, end, slot};
  }
  return 1;
}

// Adds the items of a prefix of the next `size` members, with their split. Returns whether they fit.
static int add_prefix(const Kind* kind, Plan* plan, int64_t batch_slot, int64_t size,
                      int64_t num_tokens, int64_t split) {
  const int64_t step = kind->members_per_shared_item, num_splits = num_tokens / split;
  if (plan->num_shared_items + num_splits * ((size + step - 1) / step) > kind->max_shared_items)
    return 0;
  for (int64_t slot = 0; slot < num_splits; slot++) {
    const int64_t begin = slot * split, end = begin + split;
    for (int64_t offset = 0; offset < size; offset += step)
      plan->shared_items[plan->num_shared_items++] =
          (SplitItem){plan->num_members + offset, MIN(size - offset, step), batch_slot, begin, end,
                      begin, end, slot};
  }
  return 1;
}

// Packs the plan of decodes, members of prefixes first. Returns its end, or -1 beyond the capacity.
static int64_t pack_plan(const Kind* kind, const Shared* shared, const int64_t* batch_slots,
                         const int64_t* starts, int64_t num_decodes, int32_t* inputs) {
  Plan plan = {.members = inputs + kind->members,
               .positions = inputs + kind->positions,
               .first_slots = inputs + kind->first_slots,
               .items = (SplitItem*)(inputs + kind->items),
               .shared_items = (SplitItem*)(inputs + kind->shared_items)};
  if (num_decodes > kind->max_members) return -1;
  uint8_t is_added[num_decodes + 1];
  memset(is_added, 0, sizeof is_added);
  const int64_t* member = shared->members;
  for (int64_t i = 0; i < shared->num_prefixes; i++) {
    const int64_t size = shared->sizes[i], num_tokens = shared->num_tokens[i];
    const int64_t split = split_of(kind, starts[*member]);
    if (!add_prefix(kind, &plan, batch_slots[*member], size, num_tokens, split)) return -1;
    for (const int64_t* end = member + size; member < end; member++) {
      const int64_t decode = *member;
      if (!add_member(kind, &plan, decode, batch_slots[decode], starts[decode], num_tokens))
        return -1;
      is_added[decode] = 1;
    }
  }
  for (int64_t i = 0; i < num_decodes; i++)
    if (!is_added[i] && !add_member(kind, &plan, i, batch_slots[i], starts[i], 0)) return -1;
  if (plan.num_partials > kind->max_partials) return -1;
  for (int64_t i = num_decodes; i < kind->max_members; i++) plan.members[i] = i;
  for (int64_t i = num_decodes; i <= kind->max_members; i++) plan.first_slots[i] = plan.num_partials;
  inputs[kind->num_items] = plan.num_items;
  inputs[kind->num_shared_items] = plan.num_shared_items;
  const int64_t words = sizeof(SplitItem) / sizeof(int32_t);
  if (plan.num_shared_items) return kind->shared_items + plan.num_shared_items * words;
  return kind->items + plan.num_items * words;
}

// Writes the inputs of decodes; rows from their number to `num_rows` become padding. `shared` are
// the prefixes of each kind. Returns the end of what is read, or -1 if a plan exceeds its capacity.
int64_t baton_write_decode_inputs(const Layout* layout, int32_t* inputs,
                                  const int64_t* batch_slots, const int64_t* starts,
                                  int64_t num_decodes, int64_t num_rows, const Shared* shared) {
  int64_t* row = (int64_t*)inputs;
  for (int64_t i = 0; i < num_decodes; i++) row[i] = starts[i];
  for (int64_t i = num_decodes; i < num_rows; i++) row[i] = 0;
  for (int64_t group = 0; group < layout->num_groups; group++) {
    const int32_t* table = layout->tables[group];
    row += layout->row_words;
    for (int64_t i = 0; i < num_decodes; i++) {
      const int64_t index = starts[i] / layout->block_size;
      const int64_t block = table[batch_slots[i] * layout->table_width + index];
      row[i] = block * layout->block_size + starts[i] - index * layout->block_size;
    }
    for (int64_t i = num_decodes; i < num_rows; i++) row[i] = 0;
  }
  int64_t end = 2 * layout->row_words * (1 + layout->num_groups);
  for (int64_t i = 0; i < layout->num_kinds && end >= 0; i++)
    end = pack_plan(&layout->kinds[i], &shared[i], batch_slots, starts, num_decodes, inputs);
  return end;
}
