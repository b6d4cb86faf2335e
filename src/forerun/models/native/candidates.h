/* What may follow the rows of a head: the best of a vocabulary, with the logarithms of their shares. */
#pragma once
#include <float.h>
#include <math.h>
#include <string.h>

#include "model.h"
#include "vectors.h"

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

/* The likeliest of a row; the sum of all e^((logit - top) sharp). What is no number does not count. */
static float likeliest(const number *logits, const float *peaks, int64_t size, float top, float sharp, Best *best) {
    Vector sum = {0}, zero = {0};
    for (int64_t i = 0; i < size; i += LANES) {
        Vector v = widened(logits + i);
        sum += either(v == v, exponential((v - all(top)) * all(sharp)), zero);
    }
    for (int64_t block = 0; block < size; block += 32) {
        if (!(peaks[block / 32] > bar(best))) continue;
        for (int64_t i = block; i < block + 32; i += LANES) {
            Vector v = widened(logits + i);
            for (int lane = 0; lane < LANES; lane++)
                if (v[lane] > -INFINITY) consider(best, v[lane], i + lane);
        }
    }
    return total(sum);
}

/* The logits of at least `least` and where they are; how many. */
static int64_t list(const number *logits, const float *peaks, int64_t size, float least, float *values, int32_t *places) {
    int64_t listed = 0;
    for (int64_t i = 0; i < size; i += LANES) {
        if (!(peaks[i / 32] >= least)) continue;
        Vector v = widened(logits + i);
#if defined(__AVX512F__)
        __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        __mmask16 may = _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(least), _CMP_GE_OQ);
        _mm512_mask_compressstoreu_ps(values + listed, may, (__m512)v);
        _mm512_mask_compressstoreu_epi32(places + listed, may, _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)i)));
        listed += __builtin_popcount(may);
#else
        for (int lane = 0; lane < LANES; lane++) {
            values[listed] = v[lane];
            places[listed] = (int32_t)i + lane;
            listed += v[lane] >= least;
        }
#endif
    }
    return listed;
}

/* The first of a race of all that are likely enough; the sum of e^((score - largest) / tau), and `largest`. */
static float first_arrivals(const Choice *c, const number *logits, const float *peaks, int64_t size, float top,
                            uint64_t key, float *scratch, Best *best, float *largest) {
    int64_t *names = (int64_t *)scratch;
    int32_t *places = (int32_t *)(names + size);
    float *values = (float *)places + size, *noise = values + size;
    float heat = 1 / c->temperature < FLT_MAX ? (float)(1 / c->temperature) : FLT_MAX, sharp = (float)(1 / c->tau);
    float least = top - FAR_BEHIND * (c->temperature > 1 ? (float)c->temperature : 1.0f);
    int64_t listed = list(logits, peaks, size, least, values, places), end = (listed + LANES - 1) / LANES * LANES;
    for (int64_t i = 0; i < listed; i++) names[i] = c->ids[places[i]];
    c->noise(key, names, listed, noise);
    for (int64_t i = listed; i < end; i++) values[i] = -INFINITY, noise[i] = 0;
    Vector most = all(-INFINITY), sum = {0};
    for (int64_t i = 0; i < end; i += LANES) {
        Vector score = fused(*(const Loose *)(values + i) - all(top), all(heat), *(const Loose *)(noise + i));
        *(Loose *)(noise + i) = score;
        most = larger(score, most);
    }
    *largest = most[0];
    for (int lane = 1; lane < LANES; lane++) *largest = most[lane] > *largest ? most[lane] : *largest;
    for (int64_t i = 0; i < end; i += LANES) sum += exponential((*(const Loose *)(noise + i) - all(*largest)) * all(sharp));
    for (int64_t i = 0; i < listed; i++)
        if (noise[i] > bar(best)) consider(best, noise[i], places[i]);
    return total(sum);
}

/* What may follow one of the wanted rows. */
static void follow_row(const Choice *c, const Pass *p, int64_t row, int64_t size, uint64_t key, float *scratch) {
    const number *logits = p->logits + row * size;
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
