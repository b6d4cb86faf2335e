/* What may follow the rows of a head: the best of a vocabulary, with the logarithms of their shares. */
#pragma once
#include <float.h>
#include <math.h>
#include <string.h>

#include "tiles.h"

typedef void (*Noise)(uint64_t key, const int64_t *ids, int64_t count, float *noise);

#define MOST_WIDTH 64
#define FAR_BEHIND 12.0f /* tokens e^12 times less likely than the likeliest, at temperature 1 or more, do not race */

typedef struct {
    int64_t width;             /* so many are wanted */
    const int64_t *ids;        /* [vocabulary] the tokens of columns */
    int64_t raced;             /* whether they are the first of a race with noise, by the shares of (q/E)^(1/tau); */
                               /* else the likeliest, by those of q^(1/tau) */
    double temperature, tau;
    Noise noise;
    float *scratch;            /* [threads][5 vocabulary] */
    float *shares;             /* [width, width] of each row, the best first, */
    int64_t *places;           /* [width, width] and their columns; -1 behind the last */
} Choice;

typedef struct {
    int64_t count, room;
    float scores[MOST_WIDTH];
    int64_t places[MOST_WIDTH];
} Best;

/* Keep the best of those seen so far, the best first; of equals the first seen. */
static inline void consider(Best *b, float score, int64_t place) {
    if (b->count == b->room && !(score > b->scores[b->room - 1])) return;
    int64_t at = b->count < b->room ? b->count++ : b->room - 1;
    for (; at > 0 && score > b->scores[at - 1]; at--) {
        b->scores[at] = b->scores[at - 1];
        b->places[at] = b->places[at - 1];
    }
    b->scores[at] = score;
    b->places[at] = place;
}

/* The worst that is kept; anything is better while there is room. */
static inline float bar(const Best *b) { return b->count < b->room ? -INFINITY : b->scores[b->room - 1]; }

static inline float as_float(bf16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The likeliest of a row; the sum of all e^((logit - top) sharp). What is no number does not count. */
static float likeliest(const bf16 *logits, const float *peaks, int64_t size, float top, float sharp, Best *best) {
    __m512 sum = _mm512_setzero_ps(), highest = _mm512_set1_ps(top), by = _mm512_set1_ps(sharp);
    for (int64_t i = 0; i < size; i += 16) {
        __m512 v = wide(logits + i);
        __mmask16 numbers = _mm512_cmp_ps_mask(v, v, _CMP_ORD_Q);
        sum = _mm512_mask_add_ps(sum, numbers, sum, exponential(_mm512_mul_ps(_mm512_sub_ps(v, highest), by)));
    }
    for (int64_t block = 0; block < size / 32; block++) {
        if (!(peaks[block] > bar(best))) continue;
        for (int64_t i = 32 * block; i < 32 * block + 32; i++) {
            float value = as_float(logits[i]);
            if (value > -INFINITY) consider(best, value, i);
        }
    }
    return _mm512_reduce_add_ps(sum);
}

/* The first of a race of all that are likely enough; the sum of e^((score - largest) / tau), and `largest`. */
static float first_arrivals(const Choice *c, const bf16 *logits, const float *peaks, int64_t size, float top,
                            uint64_t key, float *scratch, Best *best, float *largest) {
    int64_t *names = (int64_t *)scratch, listed = 0, end;
    int32_t *list = (int32_t *)(names + size);
    float *values = (float *)list + size, *noise = values + size;
    float heat = 1 / c->temperature < FLT_MAX ? (float)(1 / c->temperature) : FLT_MAX;
    float least = top - FAR_BEHIND * (c->temperature > 1 ? (float)c->temperature : 1.0f);
    __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t i = 0; i < size; i += 16) {
        if (!(peaks[i / 32] >= least)) continue;
        __m512 v = wide(logits + i);
        __mmask16 may = _mm512_cmp_ps_mask(v, _mm512_set1_ps(least), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(values + listed, may, v);
        _mm512_mask_compressstoreu_epi32(list + listed, may, _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)i)));
        listed += __builtin_popcount(may);
    }
    for (int64_t i = 0; i < listed; i++) names[i] = c->ids[list[i]];
    c->noise(key, names, listed, noise);
    end = (listed + 15) / 16 * 16;
    for (int64_t i = listed; i < end; i++) values[i] = -INFINITY, noise[i] = 0;
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), sharp = _mm512_set1_ps((float)(1 / c->tau));
    for (int64_t i = 0; i < end; i += 16) {
        __m512 below = _mm512_sub_ps(_mm512_loadu_ps(values + i), _mm512_set1_ps(top));
        __m512 score = _mm512_fmadd_ps(below, _mm512_set1_ps(heat), _mm512_loadu_ps(noise + i));
        _mm512_storeu_ps(noise + i, score);
        most = _mm512_max_ps(most, score);
    }
    *largest = _mm512_reduce_max_ps(most);
    for (int64_t i = 0; i < end; i += 16) {
        __m512 score = _mm512_loadu_ps(noise + i);
        sum = _mm512_add_ps(sum, exponential(_mm512_mul_ps(_mm512_sub_ps(score, _mm512_set1_ps(*largest)), sharp)));
        uint32_t better = _mm512_cmp_ps_mask(score, _mm512_set1_ps(bar(best)), _CMP_GT_OQ);
        for (; better; better &= better - 1) {
            int64_t at = i + __builtin_ctz(better);
            consider(best, noise[at], list[at]);
        }
    }
    return _mm512_reduce_add_ps(sum);
}

/* What may follow one of the wanted rows. */
static void follow_row(const Choice *c, const Pass *p, int64_t row, int64_t size, uint64_t key, float *scratch) {
    const bf16 *logits = p->logits + row * size;
    const float *peaks = p->peaks + row * (size / 32);
    float *shares = c->shares + row * c->width, top = -INFINITY;
    int64_t *places = c->places + row * c->width;
    Best best = {.room = c->width};
    for (int64_t i = 0; i < c->width; i++) shares[i] = -INFINITY, places[i] = -1;
    for (int64_t block = 0; block < size / 32; block++) top = peaks[block] > top ? peaks[block] : top;
    if (!(top > -INFINITY && top < INFINITY)) return;
    float largest = top, sharp = (float)(1 / c->tau), sum;
    if (c->raced)
        sum = first_arrivals(c, logits, peaks, size, top, key, scratch, &best, &largest);
    else
        sum = likeliest(logits, peaks, size, top, sharp, &best);
    for (int64_t i = 0; i < best.count; i++) {
        shares[i] = (best.scores[i] - largest) * sharp - logf(sum);
        places[i] = best.places[i];
    }
}
