// Inputs of recorded decode steps in one call: what numpy does in some fifty operations.
//
// `DecodeInputs` of baton_kernels.decode_inputs is its twin in numpy, by which tests check it.

#include <stdint.h>

#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

// A kind of layer, in the order of `_Kind` in decode_inputs.py. Places are in numbers, from the
// beginning of the inputs.
typedef struct {
  int64_t num_items, num_shared_items, members, positions, first_slots, items;  // places
  int64_t max_items, max_members;
  int64_t split_tokens, tile_keys;
  int64_t window;  // 0: none
} Kind;

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

// Packs the plan of decodes that share no prefix. Returns its end, or -1 beyond the capacity.
static int64_t pack_plan(const Kind* kind, const int64_t* batch_slots, const int64_t* starts,
                         int64_t num_decodes, int32_t* inputs) {
  int32_t *members = inputs + kind->members, *positions = inputs + kind->positions;
  int32_t* first_slots = inputs + kind->first_slots;
  SplitItem* items = (SplitItem*)(inputs + kind->items);
  const int64_t split = kind->split_tokens;
  int64_t count = 0;
  if (num_decodes > kind->max_members) return -1;
  for (int64_t i = 0; i < num_decodes; i++) {
    const int64_t end = starts[i] + 1;
    const int64_t seen_begin = kind->window ? end - kind->window : 0;
    const int64_t begin = MAX(seen_begin, 0) / kind->tile_keys * kind->tile_keys;
    const int64_t first = MAX(seen_begin, 0) / split, num_splits = starts[i] / split + 1 - first;
    if (count + num_splits > kind->max_items) return -1;
    members[i] = i;
    positions[i] = starts[i];
    first_slots[i] = count;
    for (int64_t slot = 0; slot < num_splits; slot++) {
      const int64_t edge = (first + slot) * split;
      items[count++] = (SplitItem){i, 1, batch_slots[i], MAX(edge, begin), MIN(end, edge + split),
                                   seen_begin, end, slot};
    }
  }
  for (int64_t i = num_decodes; i < kind->max_members; i++) members[i] = i;
  for (int64_t i = num_decodes; i <= kind->max_members; i++) first_slots[i] = count;
  inputs[kind->num_items] = count;
  inputs[kind->num_shared_items] = 0;
  return kind->items + count * (int64_t)(sizeof(SplitItem) / sizeof(int32_t));
}

// Writes the inputs of decodes; rows from their number to `num_rows` become padding. Returns the
// end of what is read, or -1 if a plan exceeds its capacity.
int64_t baton_write_decode_inputs(const Layout* layout, int32_t* inputs,
                                  const int64_t* batch_slots, const int64_t* starts,
                                  int64_t num_decodes, int64_t num_rows) {
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
    end = pack_plan(&layout->kinds[i], batch_slots, starts, num_decodes, inputs);
  return end;
}
