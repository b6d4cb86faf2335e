/* Vectors of float32, as wide as the processor has them.
 *
 * Each product and sum is rounded once, on some processors each by itself: compilers, which would choose in every block
 * anew, are not asked.
 */
#pragma once
#include <stdint.h>
#include <string.h>

#if defined(__aarch64__)
#include <arm_neon.h>
#elif defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float Vector __attribute__((vector_size(4 * LANES)));
typedef int32_t Whole __attribute__((vector_size(4 * LANES)));
typedef float Loose __attribute__((vector_size(4 * LANES), aligned(4), may_alias)); /* wherever it lies */

/* What was read stays in its register: compilers would read it again for every product. */
#if LANES == 8
#define READ_ONCE(vector) __asm__("" : "+x"(vector))
#else
#define READ_ONCE(vector)
#endif

/* sums + a b */
static inline Vector fused(Vector a, Vector b, Vector sums) {
#if defined(__aarch64__)
    return (Vector)vfmaq_f32((float32x4_t)sums, (float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
    return (Vector)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)sums);
#elif defined(__FMA__)
    return (Vector)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)sums);
#else
    return a * b + sums;
#endif
}

/* The same number in all lanes. */
static inline Vector all(float number) {
#if defined(__aarch64__)
    return (Vector)vdupq_n_f32(number);
#elif defined(__AVX512F__)
    return (Vector)_mm512_set1_ps(number);
#elif defined(__AVX__)
    return (Vector)_mm256_set1_ps(number);
#else
    return (Vector){number, number, number, number};
#endif
}

typedef float Quad __attribute__((vector_size(16)));
typedef float LooseQuad __attribute__((vector_size(16), aligned(4), may_alias));

/* Lanes i, i + 4, i + 8, … added up, the halves first. */
static inline Quad fold(Vector v) {
    union { Vector whole; Quad parts[LANES / 4]; } u = {v};
    for (int half = LANES / 8; half; half /= 2)
        for (int i = 0; i < half; i++) u.parts[i] += u.parts[i + half];
    return u.parts[0];
}

/* All lanes added up: (0 + 2) + (1 + 3) of the four that `fold` leaves. */
static inline float total(Vector v) {
    Quad four = fold(v);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

/* Lanes of a and then of b, counted through; so many as are named. */
#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t QuadPlaces __attribute__((vector_size(16)));
#define PICK(a, b, ...) \
    __builtin_shuffle(a, b, (__typeof__(__builtin_choose_expr(sizeof(a) == 16, (QuadPlaces){0}, (Whole){0}))){__VA_ARGS__})
#endif

#if LANES == 16
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#elif LANES == 8
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14
#define ODD 1, 3, 5, 7, 9, 11, 13, 15
#else
#define EVEN 0, 2, 4, 6
#define ODD 1, 3, 5, 7
#endif

#if LANES == 8
/* Neighbours added up, in each half of a and b. */
static inline Vector pairs(Vector a, Vector b) {
    return (Vector)_mm256_shuffle_ps((__m256)a, (__m256)b, 0x88) + (Vector)_mm256_shuffle_ps((__m256)a, (__m256)b, 0xdd);
}
#endif

/* What each of so many vectors adds up to, neighbours first: one a lane. They are changed. */
static inline Vector totals_of(Vector v[LANES]) {
#if LANES == 8 /* the halves of vectors by themselves, which is cheap, and then together */
    __m256 a = (__m256)pairs(pairs(v[0], v[1]), pairs(v[2], v[3])), b = (__m256)pairs(pairs(v[4], v[5]), pairs(v[6], v[7]));
    return (Vector)_mm256_permute2f128_ps(a, b, 0x20) + (Vector)_mm256_permute2f128_ps(a, b, 0x31);
#else
#pragma GCC unroll 4
    for (int left = LANES / 2; left; left /= 2)
#pragma GCC unroll 16
        for (int i = 0; i < left; i++) v[i] = PICK(v[2 * i], v[2 * i + 1], EVEN) + PICK(v[2 * i], v[2 * i + 1], ODD);
    return v[0];
#endif
}

/* a where the comparison holds, and b elsewhere. */
static inline Vector either(Whole holds, Vector a, Vector b) {
    return (Vector)(((Whole)a & holds) | ((Whole)b & ~holds));
}

static inline Vector larger(Vector a, Vector b) { return either(a > b, a, b); }

/* e^x to about 1e-7, 0 below -87. */
static inline Vector exponential(Vector x) {
#if defined(__AVX512F__)
    __m512 bounded = _mm512_max_ps((__m512)x, _mm512_set1_ps(-104.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(1.44269504f)), 8);
    Vector r = fused((Vector)n, all(2.12194440e-4f), fused((Vector)n, all(-0.693359375f), (Vector)bounded));
#else
    const Vector lowest = all(-87.0f), shift = all(12582912.0f), zero = {0}; /* 1.5 · 2^23 added rounds to whole numbers */
    Vector bounded = either(x > all(88.0f), all(88.0f), either(x < lowest, lowest, x));
    Vector n = fused(bounded, all(1.44269504f), shift) - shift;
    Vector r = fused(n, all(2.12194440e-4f), fused(n, all(-0.693359375f), bounded));
#endif
    Vector p = all(1.9875691500e-4f);
    p = fused(p, r, all(1.3981999507e-3f));
    p = fused(p, r, all(8.3334519073e-3f));
    p = fused(p, r, all(4.1665795894e-2f));
    p = fused(p, r, all(1.6666665459e-1f));
    p = fused(p, r, all(5.0000001201e-1f));
    p = fused(p, r * r, r + all(1.0f));
#if defined(__AVX512F__)
    return (Vector)_mm512_scalef_ps((__m512)p, n);
#else
    return either(x < lowest, zero, p * (Vector)((__builtin_convertvector(n, Whole) + 127) << 23));
#endif
}
