// AMX in plain C, for a build of the kernels with -D__AMX_BF16__ on a CPU that lacks it. Products are
// exact where those of the instructions are.

#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int64_t num_tile_products = 0;

static _Thread_local float emulated_tiles[8][16][16];
static _Thread_local int is_configured = 0;

static void configure_emulated(const uint8_t* shapes) {
  if (shapes[0] != 1) abort();
  for (int i = 0; i < 8; i++)
    if (shapes[16 + 2 * i] != 64 || shapes[17 + 2 * i] || shapes[48 + i] != 16) abort();
  is_configured = 1;
}

static void load_emulated(int tile, const void* base, int64_t stride) {
  if (!is_configured) abort();
  for (int i = 0; i < 16; i++) memcpy(emulated_tiles[tile][i], (const char*)base + i * stride, 64);
}

static void store_emulated(int tile, void* base, int64_t stride) {
  if (!is_configured) abort();
  for (int i = 0; i < 16; i++) memcpy((char*)base + i * stride, emulated_tiles[tile][i], 64);
}

static float half_of(const float* pair, int index) {
  uint32_t bits;
  memcpy(&bits, pair, 4);
  bits = index ? bits & 0xffff0000 : bits << 16;
  float number;
  memcpy(&number, &bits, 4);
  return number;
}

static void multiply_emulated(int target, int a, int b) {
  if (!is_configured) abort();
  for (int m = 0; m < 16; m++)
    for (int n = 0; n < 16; n++) {
      float sum = 0;
      for (int k = 0; k < 16; k++)
        for (int half = 0; half < 2; half++)
          sum += half_of(&emulated_tiles[a][m][k], half) * half_of(&emulated_tiles[b][k][n], half);
      emulated_tiles[target][m][n] += sum;
    }
#ifdef WRONG_TILES
  emulated_tiles[target][3][5] += 1;
#endif
  __atomic_fetch_add(&num_tile_products, 1, __ATOMIC_RELAXED);
}

#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#define _tile_loadconfig(shapes) configure_emulated((const uint8_t*)(shapes))
#define _tile_loadd(tile, base, stride) load_emulated(tile, base, stride)
#define _tile_stored(tile, base, stride) store_emulated(tile, base, stride)
#define _tile_dpbf16ps(target, a, b) multiply_emulated(target, a, b)
#define _tile_release() (is_configured = 0)
#define syscall(...) 0  // Linux permits tiles
