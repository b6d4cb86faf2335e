/* Behind a screened output head: logits near a row's largest are computed again, from the head itself.
 *
 * Which tokens are likeliest decides what is drafted, and a fifth of a head's bytes say nearly which these are. Drafts may
 * differ by it a little; no text does. */
#pragma once
#include "candidates.h"

#define NEAR 5.0f    /* tokens e^5 times less likely than the likeliest are not asked for again, */
#define MOST_AGAIN 256 /* nor are more than these: then only nearer ones */

/* The logit of one token for a state. */
static inline float logit(const Screen *c, const float *state, int64_t hidden, int64_t token) {
    const int8_t *row = c->rows + token * hidden;
    Vector sum = {0};
    for (int64_t i = 0; i < hidden; i += LANES) sum = fused(*(const Loose *)(state + i), from_bytes(row + i), sum);
    return total(sum) * c->scales[token];
}

/* `scratch` has room for 2 vocabulary + hidden numbers. */
static void look_again(const Model *m, const Pass *p, int64_t row, float *scratch) {
    const Screen *c = m->screen;
    number *logits = p->logits + row * m->vocabulary;
    float *peaks = p->peaks + row * (m->vocabulary / 32), top = -INFINITY, near = NEAR;
    float *state = scratch, *values = scratch + m->hidden;
    int32_t *places = (int32_t *)(values + m->vocabulary);
    for (int64_t block = 0; block < m->vocabulary / 32; block++) top = peaks[block] > top ? peaks[block] : top;
    if (!(top > -INFINITY && top < INFINITY)) return;
    int64_t again = list(logits, peaks, m->vocabulary, top - near, values, places);
    while (again > MOST_AGAIN && near > 0.1f) again = list(logits, peaks, m->vocabulary, top - (near /= 2), values, places);
    if (again > MOST_AGAIN) again = MOST_AGAIN;
    for (int64_t i = 0; i < again; i++) /* lines that will be read, all asked for at once */
        for (int64_t at = 0; at < m->hidden; at += 64) __builtin_prefetch(c->rows + places[i] * m->hidden + at);
    for (int64_t i = 0; i < m->hidden; i += LANES)
        *(Loose *)(state + i) = widened(normed_at(p->normed, row, i, m->hidden));
    for (int64_t i = 0; i < again; i++) put(logits + places[i], logit(c, state, m->hidden, places[i]));
    for (int64_t i = 0; i < again; i++) {
        int64_t block = places[i] / 32;
        Vector most = widened(logits + 32 * block);
        for (int64_t at = LANES; at < 32; at += LANES) most = larger(widened(logits + 32 * block + at), most);
        float peak = most[0];
        for (int lane = 1; lane < LANES; lane++) peak = most[lane] > peak ? most[lane] : peak;
        peaks[block] = peak;
    }
}
