// Vectors of float32 as wide as this CPU has them.

#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif

#define INLINE static inline __attribute__((always_inline))

typedef float Vector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint32_t BitVector __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

INLINE Vector load(const float* source) { return *(const Vector*)source; }

// Keeps a vector in a register: each product with it would read it from memory again.
INLINE Vector held(Vector x) {
#if defined(__AVX2__)
  __asm__("" : "+v"(x));
#endif
  return x;
}

INLINE Vector all(float number) { return number - (Vector){0}; }

// Returns a * b + c, which is rounded once where this CPU can: left to the compiler, it may be rounded
// once in one loop and twice in another.
INLINE Vector multiplied_and_added(Vector a, Vector b, Vector c) {
#if defined(__AVX512F__)
  return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
