/* What a pass is given, and the vectors and tiles it is computed with. `amx.py` has the same structures. */
#pragma once
#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

typedef struct {
    const void *tiles;
    const float *scales; /* of its outputs where it is in bytes, else NULL; all of a model's are of one kind */
} Matrix;

typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *inner_norm, *q_norm, *k_norm; /* all but the inner one may be NULL */
    const float *beside_norm;                               /* where attention reads `beside` too, else NULL */
    const float *qkv_bias, *out_bias;                       /* may be NULL */
    int64_t rope;                                           /* which table, -1 for none */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocabulary;
    const Layer *layer;
    const float *norm; /* may be NULL */
    Matrix head;
    double eps, scale;
} Model;

typedef struct {
    int64_t rows, segments, wanted, slots, threads;
    bf16 *x;                         /* [rows, hidden] embeddings; hidden states at the end */
    const bf16 *beside;              /* [rows, hidden] what attention reads beside them, or NULL */
    const float *cosine, *sine;      /* [tables][rows][head_dim / 2] */
    bf16 *cache;                     /* [layers][slots][2][kv_heads][head_dim] */
    const int64_t *row_slots;        /* [rows] where keys and values go */
    const int64_t *first_row;        /* [segments + 1] */
    const int64_t *first_key;        /* [segments + 1] in `keys` */
    const int64_t *keys;             /* slots of a segment's keys, its own rows last */
    const int32_t *prefix;           /* [rows] so many keys of the segment are seen, from the first on, */
    const int32_t *tail_start;       /* [rows + 1] and then these, in the order of their positions: */
    const int32_t *tail;             /* places among the segment's keys */
    const int64_t *wanted_rows;      /* [wanted] */
    const uint8_t *active;           /* [layers] 0 skips a layer */
    bf16 *const *features;           /* [layers + 1] where to copy the hidden states before a layer, or NULL */
    bf16 *logits;                    /* [wanted, vocabulary] */
    float *peaks;                    /* [wanted, vocabulary / 32] the largest logit of each 32 tokens */
    float *highest;                  /* [threads][wanted] the largest logit of a thread's share, NaN if one is, */
    int64_t *likeliest;              /* [threads][wanted] and the first token that has it; behind a whole pass the first
                                        row has those of all, -1 where there is none */
    bf16 *normed, *queries, *mixed, *act; /* scratch, rows rounded up to 32 */
    float *qkv;                      /* [rows, (heads + 2 kv_heads) head_dim] */
    float *scores;                   /* [threads][score_size] */
    int64_t score_size;
    float *row_scales;               /* [rows] where weights are in bytes */
    bf16 *packed;                    /* scratch: values of all keys, or NULL */
} Pass;

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

static inline __m256i narrow(__m512 v) { return (__m256i)_mm512_cvtneps_pbh(v); }

static inline void store(bf16 *p, __m512 v) { _mm256_storeu_si256((void *)p, narrow(v)); }

/* e^x to about 1e-7, 0 below -87. */
static inline __m512 exponential(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-104.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

/* Where 16 or 32 entries of a row lie in tiles, from the aligned entry `i` on. */
static inline bf16 *tiled(bf16 *tiles, int64_t row, int64_t i, int64_t size) {
    return tiles + ((row / 16) * (size / 32) + i / 32) * 512 + (row % 16) * 32 + i % 32;
}
