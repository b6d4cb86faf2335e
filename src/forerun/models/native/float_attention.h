/* Attention over the paged cache in float32: a few rows look at one key after the other, each in the order of its own
 * positions. What they all see is near while they look at it. */
#pragma once
#include <math.h>
#include <string.h>

#include "stream.h"
#include "vectors.h"

#define ROWS_TOGETHER 8
#define MOST_SHARE 16  /* queries of a row that ask one key head */
#define TILE 32        /* keys that stay near */
#define KEYS_AT_ONCE 4 /* whose scores are added up together, */
#define QUERIES_AT_ONCE (LANES / KEYS_AT_ONCE) /* with those of so many queries: they fill a vector */
#define MIXED_AT_ONCE (LANES == 8 ? 3 : 4)     /* queries whose sums of values stay in registers, */
#define WIDE 4                                 /* of so many vectors each */

/* What some rows of a segment ask of one key head. */
typedef struct {
    const float *keys, *values;        /* of slot 0 and this head */
    const int64_t *slots;              /* of the segment's keys */
    int64_t stride, size, share, room; /* between slots; of a head; queries of a row; between the scores of queries */
    int64_t common;                    /* keys that all of the rows see, from the first on */
} Look;

/* One row of them: it sees the segment's keys up to `prefix`, and then its tail. */
typedef struct {
    const float *queries;
    float *scores, *out; /* [share][room], [share][size] */
    const int32_t *tail;
    int64_t prefix, count;
} Row;

/* The keys or values of up to a tile of the places that all rows see. */
static inline int64_t find(const Look *look, const float *from, int64_t first, const float **found) {
    int64_t count = look->common - first < TILE ? look->common - first : TILE;
    for (int64_t i = 0; i < count; i++) found[i] = from + look->slots[first + i] * look->stride;
    return count;
}

/* They come from memory. */
static inline void ask_for(const Look *look, const float *from, int64_t first) {
    for (int64_t i = first; i < look->common && i < first + TILE; i++)
        for (int64_t d = 0; d < look->size; d += LINE / 4)
            __builtin_prefetch(from + look->slots[i] * look->stride + d, 0, 2);
}

/* The same for a row's own places, behind those that all see. */
static inline void find_own(const Look *look, const Row *row, const float *from, int64_t first, int64_t count,
                            const float **found) {
    for (int64_t i = first; i < first + count; i++)
        *found++ = from + look->slots[i < row->prefix ? i : row->tail[i - row->prefix]] * look->stride;
}

/* Queries, and where each one's scores go. */
typedef struct {
    int64_t count;
    const float *asked[ROWS_TOGETHER * MOST_SHARE];
    float *scores[ROWS_TOGETHER * MOST_SHARE];
} Queries;

static inline void add_row(Queries *queries, const Look *look, const Row *row) {
    for (int64_t q = 0; q < look->share; q++) {
        queries->asked[queries->count] = row->queries + q * look->size;
        queries->scores[queries->count++] = row->scores + q * look->room;
    }
}

/* The scores of queries and `count` keys, which are those from `place` on. Four are made at once: behind the last there may
 * be some that mean nothing. */
static __attribute__((noinline)) void score(const Queries *queries, int64_t size, const float *const *keys, int64_t count,
                                            int64_t place) {
    for (int64_t query = 0; query < queries->count; query += QUERIES_AT_ONCE) {
        const float *asked[QUERIES_AT_ONCE];
        int64_t left = queries->count - query;
#pragma GCC unroll 4
        for (int q = 0; q < QUERIES_AT_ONCE; q++) asked[q] = queries->asked[query + (q < left ? q : left - 1)];
        for (int64_t key = 0; key < count; key += KEYS_AT_ONCE) {
            const float *own[KEYS_AT_ONCE];
            Vector sums[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) sums[i] = all(0);
#pragma GCC unroll 4
            for (int i = 0; i < KEYS_AT_ONCE; i++) own[i] = keys[key + i < count ? key + i : count - 1];
            for (int64_t d = 0; d < size; d += LANES) {
                Vector numbers[KEYS_AT_ONCE];
#pragma GCC unroll 4
                for (int i = 0; i < KEYS_AT_ONCE; i++) numbers[i] = *(const Loose *)(own[i] + d);
#pragma GCC unroll 4
                for (int q = 0; q < QUERIES_AT_ONCE; q++) {
                    Vector theirs = *(const Loose *)(asked[q] + d);
                    READ_ONCE(theirs);
#pragma GCC unroll 4
                    for (int i = 0; i < KEYS_AT_ONCE; i++)
                        sums[KEYS_AT_ONCE * q + i] = fused(numbers[i], theirs, sums[KEYS_AT_ONCE * q + i]);
                }
            }
            union { Vector whole; Quad quads[QUERIES_AT_ONCE]; } found = {totals_of(sums)};
            for (int q = 0; q < QUERIES_AT_ONCE && q < left; q++)
                *(LooseQuad *)(queries->scores[query + q] + place + key) = found.quads[q];
        }
    }
}

/* Scores of a query become weights; one over their sum. */
static inline float weigh(float *scores, int64_t count, float scale) {
    Vector highest = all(-INFINITY), sum = {0};
    for (int64_t i = count; i % LANES; i++) scores[i] = -INFINITY;
    for (int64_t i = 0; i < count; i += LANES) highest = larger(*(const Loose *)(scores + i), highest);
    float top = highest[0];
    for (int i = 1; i < LANES; i++) top = highest[i] > top ? highest[i] : top;
    for (int64_t i = 0; i < count; i += LANES) {
        Vector weight = exponential((*(const Loose *)(scores + i) - all(top)) * all(scale));
        *(Loose *)(scores + i) = weight;
        sum += weight;
    }
    return 1.0f / total(sum);
}

/* Adds `wide` vectors from d on of some values to the sums of `queries`, as these weigh them; both are constant where this
 * is called. */
static inline __attribute__((always_inline)) void mix(const Look *look, const float *const *values, int64_t count,
                                                      const float *weights, float *out, int64_t d, const int queries,
                                                      const int wide) {
    Vector sums[MIXED_AT_ONCE][WIDE];
#pragma GCC unroll 4
    for (int q = 0; q < queries; q++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) sums[q][v] = *(const Loose *)(out + q * look->size + d + v * LANES);
    for (int64_t i = 0; i < count; i++) {
        Vector theirs[MIXED_AT_ONCE];
#pragma GCC unroll 4
        for (int q = 0; q < queries; q++) theirs[q] = all(weights[q * look->room + i]);
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) {
            Vector own = *(const Loose *)(values[i] + d + v * LANES);
            READ_ONCE(own);
#pragma GCC unroll 4
            for (int q = 0; q < queries; q++) sums[q][v] = fused(theirs[q], own, sums[q][v]);
        }
    }
#pragma GCC unroll 4
    for (int q = 0; q < queries; q++)
#pragma GCC unroll 4
        for (int v = 0; v < wide; v++) *(Loose *)(out + q * look->size + d + v * LANES) = sums[q][v];
}

static inline __attribute__((always_inline)) void mix_whole(const Look *look, const float *const *values, int64_t count,
                                                            const float *weights, float *out, const int queries) {
    int64_t d = 0;
    for (; d + WIDE * LANES <= look->size; d += WIDE * LANES) mix(look, values, count, weights, out, d, queries, WIDE);
    for (; d < look->size; d += LANES) mix(look, values, count, weights, out, d, queries, 1);
}

/* Adds values to what a row gets, which are those from `place` on. */
static void mix_row(const Look *look, const Row *row, const float *const *values, int64_t count, int64_t place) {
    for (int64_t query = 0; query < look->share; query += MIXED_AT_ONCE) {
        const float *weights = row->scores + query * look->room + place;
        float *out = row->out + query * look->size;
        int64_t left = look->share - query;
        if (left >= MIXED_AT_ONCE) mix_whole(look, values, count, weights, out, MIXED_AT_ONCE);
        else if (left == 1) mix_whole(look, values, count, weights, out, 1);
        else if (left == 2) mix_whole(look, values, count, weights, out, 2);
        else mix_whole(look, values, count, weights, out, MIXED_AT_ONCE - 1);
    }
}

static void attend(const Look *look, const Row *rows, int64_t count, float scale) {
    const float *found[TILE];
    Queries queries;
    queries.count = 0;
    for (int64_t r = 0; r < count; r++) add_row(&queries, look, rows + r);
    ask_for(look, look->keys, 0);
    for (int64_t key = 0; key < look->common; key += TILE) {
        int64_t here = find(look, look->keys, key, found);
        ask_for(look, look->keys, key + TILE);
        ask_for(look, look->values, key);
        score(&queries, look->size, found, here, key);
    }
    for (int64_t r = 0; r < count; r++) {
        const Row *row = rows + r;
        queries.count = 0;
        add_row(&queries, look, row);
        for (int64_t key = look->common; key < row->count; key += TILE) {
            int64_t here = row->count - key < TILE ? row->count - key : TILE;
            find_own(look, row, look->keys, key, here, found);
            score(&queries, look->size, found, here, key);
        }
        for (int64_t q = 0; q < look->share; q++) {
            float *weights = row->scores + q * look->room, factor = weigh(weights, row->count, scale);
            for (int64_t i = 0; i < row->count; i++) weights[i] *= factor;
        }
        memset(row->out, 0, sizeof(float) * (size_t)(look->share * look->size));
    }
    for (int64_t key = 0; key < look->common; key += TILE) {
        int64_t here = find(look, look->values, key, found);
        for (int64_t r = 0; r < count; r++) mix_row(look, rows + r, found, here, key);
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t key = look->common; key < rows[r].count; key += TILE) {
            int64_t here = rows[r].count - key < TILE ? rows[r].count - key : TILE;
            find_own(look, rows + r, look->values, key, here, found);
            mix_row(look, rows + r, found, here, key);
        }
}

/* How many rows of a segment look together: fewer where threads would have nothing to do. */
static inline int64_t rows_together(int64_t rows, int64_t heads, int64_t threads) {
    int64_t groups = (rows + ROWS_TOGETHER - 1) / ROWS_TOGETHER;
    while (groups < rows && groups * heads < 4 * threads && groups * heads % threads) groups++;
    return (rows + groups - 1) / groups;
}

static void attend_all(const Model *m, const Pass *p, const number *cache, const Stream *stream) {
    int64_t d = m->head_dim, kv = m->kv_heads, share = m->heads / kv, task = 0;
    float *scores = p->scores + stream->thread * p->score_size;
    for (int64_t s = 0; s < p->segments; s++) {
        int64_t last = p->first_row[s + 1], most = rows_together(last - p->first_row[s], kv, stream->threads);
        for (int64_t first = p->first_row[s]; first < last; first += most)
            for (int64_t head = 0; head < kv; head++, task++) {
                if (task % stream->threads != stream->thread) continue;
                int64_t count = last - first < most ? last - first : most;
                int64_t keys = p->first_key[s + 1] - p->first_key[s], room = (keys / LANES + 2) * LANES;
                Look look = {cache + head * d, cache + (kv + head) * d, p->keys + p->first_key[s], 2 * kv * d, d, share,
                             room, p->prefix[first]};
                Row rows[ROWS_TOGETHER];
                for (int64_t r = 0; r < count; r++) {
                    int64_t row = first + r, place = (row * m->heads + head * share) * d, prefix = p->prefix[row];
                    rows[r] = (Row){p->queries + place, scores + r * share * room, p->mixed + place,
                                    p->tail + p->tail_start[row], prefix,
                                    prefix + p->tail_start[row + 1] - p->tail_start[row]};
                    look.common = prefix < look.common ? prefix : look.common;
                }
                attend(&look, rows, count, (float)m->scale);
            }
    }
}
