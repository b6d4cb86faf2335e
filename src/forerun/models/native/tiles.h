/* The vectors and tiles that a pass in bfloat16 is computed with. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;
typedef bf16 number;

#include "model.h"
#include "vectors.h"

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileShapes;

/* Numbers of a row as two bytes: so many steps up to the largest, and so many within one. */
#define HIGH_STEPS 127.0f
#define LOW_STEPS 254.0f

/* Compilers do not know that loading a tile reads memory. What was written before this is there after it. */
#define WRITTEN() __asm__ volatile("" ::: "memory")

static inline __m512 wide(const bf16 *p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)), 16));
}

static inline Vector widened(const bf16 *p) { return (Vector)wide(p); }

static inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

static inline void store(bf16 *p, __m512 v) { _mm256_storeu_si256((void *)p, narrow(v)); }

/* Where 16 or 32 entries of a row lie in tiles, from the aligned entry `i` on. */
static inline bf16 *tiled(bf16 *tiles, int64_t row, int64_t i, int64_t size) {
    return tiles + ((row / 16) * (size / 32) + i / 32) * 512 + (row % 16) * 32 + i % 32;
}
