// Calls of the library that were recorded, made again by one call.

#include <stdint.h>

// In the order of `_Recorded` in recording.py.
typedef struct {
  void (*function)(const void*);
  const void* arguments;
} Recorded;

void baton_repeat(const Recorded* calls, int64_t num_calls) {
  for (int64_t i = 0; i < num_calls; i++) calls[i].function(calls[i].arguments);
}
