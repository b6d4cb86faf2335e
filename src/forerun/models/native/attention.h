/* Attention over the paged cache, with up to 16 queries that share a key head side by side in the lanes of a vector. */
#pragma once
#include <math.h>
#include <string.h>

#include "stream.h"
#include "tiles.h"

/* 16 rows of 16 words: columns become rows. */
static void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* What a few rows of a segment ask of one key head: at most 16 queries, one per lane. */
typedef struct {
    const bf16 *keys, *values; /* of slot 0 and this head */
    const int64_t *slots;      /* of the segment's keys */
    int64_t count, stride;     /* of keys, and between slots */
    const bf16 *packed;        /* values of 32 keys each as tiles, or NULL, */
    int64_t packed_stride;     /* so far apart */
    int fetched;               /* whether keys have to be fetched */
    int64_t first, rows, share;
} Look;

static inline int one_run(const int64_t *slots, int64_t count) {
    int64_t gaps = 0;
    for (int64_t i = 1; i < count; i++) gaps |= slots[i] - slots[0] - i;
    return !gaps;
}

#define KEYS_AT_ONCE 64

/* scores[key][lane] for the first `count` keys. */
static void score(const Look *look, const bf16 *asked, int64_t count, int64_t d, int64_t all_slots, float *scores) {
    bf16 copied[KEYS_AT_ONCE * 256] __attribute__((aligned(64)));
    for (int64_t key = 0; key < count; key += KEYS_AT_ONCE) {
        const bf16 *from[4];
        int64_t strides[4], tiles = count - key < KEYS_AT_ONCE ? (count - key + 15) / 16 : 4;
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t *slots = look->slots + key + 16 * t;
            int64_t there = look->count - key - 16 * t < 16 ? look->count - key - 16 * t : 16;
            from[t] = look->keys + slots[0] * look->stride;
            strides[t] = 2 * look->stride;
            if (slots[0] + 16 > all_slots || !one_run(slots, there)) {
                from[t] = copied + 16 * t * d;
                strides[t] = 2 * d;
                for (int64_t i = 0; i < there; i++)
                    memcpy(copied + (16 * t + i) * d, look->keys + slots[i] * look->stride, sizeof(bf16) * d);
            }
        }
        WRITTEN();
        for (int64_t i = 0; look->fetched && key + KEYS_AT_ONCE < count && i < KEYS_AT_ONCE; i++)
            for (int64_t line = 0; line < d; line += 32)
                _mm_prefetch((const char *)(look->keys + (look->slots[key] + KEYS_AT_ONCE + i) * look->stride + line),
                             _MM_HINT_T0);
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < d / 32; k++) {
            _tile_loadd(6, asked + 512 * k, 64);
            _tile_loadd(4, from[0] + 32 * k, strides[0]);
            _tile_dpbf16ps(0, 4, 6);
            if (tiles < 2) continue;
            _tile_loadd(5, from[1] + 32 * k, strides[1]);
            _tile_dpbf16ps(1, 5, 6);
            if (tiles < 3) continue;
            _tile_loadd(4, from[2] + 32 * k, strides[2]);
            _tile_dpbf16ps(2, 4, 6);
            if (tiles < 4) continue;
            _tile_loadd(5, from[3] + 32 * k, strides[3]);
            _tile_dpbf16ps(3, 5, 6);
        }
        _tile_stored(0, scores + 16 * key, 64);
        if (tiles > 1) _tile_stored(1, scores + 16 * (key + 16), 64);
        if (tiles > 2) _tile_stored(2, scores + 16 * (key + 32), 64);
        if (tiles > 3) _tile_stored(3, scores + 16 * (key + 48), 64);
    }
    WRITTEN();
}

/* The first `count` of 32 weights of each lane as a tile of 16 rows; `lanes` says which rows are not zero. */
static inline void weigh(const float *weights, int64_t count, uint32_t lanes, bf16 *tile) {
    __m512i rows[16];
    for (int i = 0; i < 16; i++) {
        __mmask16 first = 2 * i < count ? (__mmask16)lanes : 0, second = 2 * i + 1 < count ? (__mmask16)lanes : 0;
        __m512i even = _mm512_cvtepu16_epi32(narrow(_mm512_maskz_loadu_ps(first, weights + 32 * i)));
        __m512i odd = _mm512_cvtepu16_epi32(narrow(_mm512_maskz_loadu_ps(second, weights + 32 * i + 16)));
        rows[i] = _mm512_or_epi32(even, _mm512_slli_epi32(odd, 16));
    }
    transpose(rows);
    for (int i = 0; i < 16; i++) _mm512_storeu_si512(tile + 32 * i, rows[i]);
}

/* 64 dimensions of 32 keys' values as four tiles. */
static void pack(const bf16 *const *values, bf16 *tiles) {
    for (int i = 0; i < 16; i++) {
        for (int c = 0; c < 4; c++) {
            __m512i even = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(values[2 * i] + 16 * c)));
            __m512i odd = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)(values[2 * i + 1] + 16 * c)));
            _mm512_store_si512(tiles + 512 * c + 32 * i, _mm512_or_epi32(even, _mm512_slli_epi32(odd, 16)));
        }
    }
}

/* Adds values in tiles, weighted, to 64 dimensions in tiles 0 to 3. */
static inline void mix(const bf16 *weights, const bf16 *values) {
    _tile_loadd(4, weights, 64);
    _tile_loadd(5, values, 64);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, values + 512, 64);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, values + 1024, 64);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, values + 1536, 64);
    _tile_dpbf16ps(3, 4, 5);
}

static void mix_unpacked(const bf16 *weights, const bf16 *const *values) {
    bf16 tiles[4 * 512] __attribute__((aligned(64)));
    pack(values, tiles);
    WRITTEN();
    mix(weights, tiles);
    WRITTEN(); /* and what is written after it was not there before */
}

/* Keys of up to 32 positions, of which rows share the first and have each their own behind them. */
typedef struct {
    int64_t shared, key[32]; /* keys by their place in a tile: among the segment's */
    int64_t next[2];         /* the next place that is free, of 16 even and 16 odd ones */
    uint32_t lanes;          /* of the rows that are in it */
    int64_t entries;
    struct {
        int8_t row, position, place;
    } entry[16 * 32]; /* where rows have their own keys */
} Fork;

/* A row's own keys, the first of which stands at `position`; 0 if there is no room. A tile adds up its even and its odd
 * places apart, each in their order: a key keeps its parity and the order of its row, and what others have between counts
 * nothing. Rows share what is the same of their paths, which is how they begin. */
static int enter_row(Fork *f, int64_t row, const int32_t *own, int64_t position, int64_t end) {
    int64_t next[2] = {f->next[0], f->next[1]}, entries = f->entries;
    int64_t after[2] = {(f->shared + 1) / 2, f->shared / 2}; /* the row's key before */
    for (; position < end; position++, own++) {
        int64_t odd = position % 2, place = after[odd];
        while (place < next[odd] && f->key[2 * place + odd] != *own) place++;
        if (place == 16) return 0;
        if (place == next[odd]) f->key[2 * next[odd]++ + odd] = *own;
        after[odd] = place + 1;
        f->entry[entries].row = (int8_t)row;
        f->entry[entries].position = (int8_t)position;
        f->entry[entries++].place = (int8_t)(2 * place + odd);
    }
    f->next[0] = next[0];
    f->next[1] = next[1];
    f->entries = entries;
    return 1;
}

/* Adds the values of positions `key` to `key` + 32, from `common` on each row's own; rows together as far as they fit. */
static void mix_forked(const Pass *p, const Look *look, const float *scores, int64_t key, int64_t common,
                       const int32_t *ends, int64_t half) {
    static const bf16 nothing[64];
    bf16 weights[512] __attribute__((aligned(64))), tiles[4 * 512] __attribute__((aligned(64))), narrowed[32][16];
    const bf16 *values[32];
    int64_t row = 0, share = look->share;
    for (int64_t i = 0; i < 32; i++) _mm256_storeu_si256((void *)narrowed[i], narrow(_mm512_loadu_ps(scores + 16 * i)));
    while (row < look->rows) {
        Fork fork = {.shared = common > key ? common - key : 0};
        int64_t start = fork.shared;
        fork.next[0] = (start + 1) / 2;
        fork.next[1] = start / 2;
        for (; row < look->rows; row++) {
            int64_t end = ends[row * share] - key;
            if (end <= 0) continue;
            const int32_t *own = p->tail + p->tail_start[look->first + row] + (key + start - common);
            if (!enter_row(&fork, row, own, start, end < 32 ? end : 32)) break;
            fork.lanes |= ((1u << share) - 1) << (row * share);
        }
        if (!fork.lanes) continue;
        for (int64_t i = 0; i < 32; i++) {
            int64_t place = i < start ? key + i : i / 2 < fork.next[i % 2] ? fork.key[i] : -1;
            values[i] = place < 0 ? nothing : look->values + look->slots[place] * look->stride + half;
        }
        pack(values, tiles);
        weigh(scores, start, fork.lanes, weights);
        for (int64_t i = 0; i < fork.entries; i++)
            for (int64_t lane = fork.entry[i].row * share; lane < (fork.entry[i].row + 1) * share; lane++)
                weights[32 * lane + fork.entry[i].place] = narrowed[fork.entry[i].position][lane];
        WRITTEN();
        mix(weights, tiles);
        WRITTEN();
    }
}

static void attend(const Model *m, const Pass *p, const Look *look, int64_t head, float *scores, Stream *s) {
    int64_t d = m->head_dim, share = look->share, lanes = look->rows * share;
    bf16 asked[16 * 256] __attribute__((aligned(64)));
    static const bf16 nothing[64];
    for (int64_t k = 0; k < d / 32; k++) {
        __m512i queries[16];
        for (int64_t lane = 0; lane < 16; lane++) {
            const bf16 *q = p->queries + ((look->first + lane / share) * m->heads + head * share + lane % share) * d;
            queries[lane] = lane < lanes ? _mm512_loadu_si512(q + 32 * k) : _mm512_setzero_si512();
        }
        transpose(queries);
        for (int64_t i = 0; i < 16; i++) _mm512_store_si512(asked + 512 * k + 32 * i, queries[i]);
    }
    /* Keys in the order of positions: those that all see, then each row's own path. */
    int64_t common = 0, longest = 0, own = 0;
    int32_t ends[16] = {0};
    for (int64_t r = 0; r < look->rows; r++) {
        int64_t row = look->first + r, tail = p->tail_start[row + 1] - p->tail_start[row];
        int64_t end = p->prefix[row] + tail;
        if (p->prefix[row] > common) common = p->prefix[row];
        if (end > longest) longest = end;
        own |= tail;
        for (int64_t g = 0; g < share; g++) ends[r * share + g] = (int32_t)end;
    }
    score(look, asked, own ? look->count : common, d, p->slots, scores);
    if (own) {
        float *moved = scores + 16 * (look->count + 32);
        for (int64_t r = 0; r < look->rows; r++) {
            int64_t row = look->first + r;
            const int32_t *tail = p->tail + p->tail_start[row];
            __mmask16 mine = (__mmask16)(((1u << share) - 1) << (r * share));
            for (int64_t t = 0; t < p->tail_start[row + 1] - p->tail_start[row]; t++)
                _mm512_mask_storeu_ps(moved + 16 * t, mine, _mm512_loadu_ps(scores + 16 * tail[t]));
        }
        memcpy(scores + 16 * common, moved, sizeof(float) * 16 * (longest - common));
    }
    __m512i end = _mm512_loadu_si512(ends);
    __m512 highest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps(), scale = _mm512_set1_ps((float)m->scale);
    for (int64_t i = 0; i < longest; i++) {
        __mmask16 seen = _mm512_cmpgt_epi32_mask(end, _mm512_set1_epi32((int)i));
        highest = _mm512_mask_max_ps(highest, seen, highest, _mm512_loadu_ps(scores + 16 * i));
    }
    for (int64_t i = 0; i < longest; i++) {
        __mmask16 seen = _mm512_cmpgt_epi32_mask(end, _mm512_set1_epi32((int)i));
        __m512 below = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + 16 * i), highest), scale);
        __m512 weight = _mm512_maskz_mov_ps(seen, exponential(below));
        sum = _mm512_add_ps(sum, weight);
        _mm512_storeu_ps(scores + 16 * i, weight);
        if (i % 4 == 3) fetch(s, 4);
    }
    memset(scores + 16 * longest, 0, sizeof(float) * 16 * 32);
    float total[16], mixed[16 * 64] __attribute__((aligned(64)));
    _mm512_storeu_ps(total, sum);
    const bf16 *values[32];
    int64_t together = own ? common / 32 * 32 : longest; /* from there on each row goes its own way */
    for (int64_t key = 0; key < together; key += 32) weigh(scores + 16 * key, 32, 0xffff, (bf16 *)(scores + 16 * key));
    WRITTEN();
    for (int64_t half = 0; half < d; half += 64) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        int64_t key = 0;
        for (; look->packed && key + 32 <= together; key += 32)
            mix((const bf16 *)(scores + 16 * key), look->packed + key / 32 * look->packed_stride + 32 * half);
        for (; key < together; key += 32) {
            for (int64_t i = 0; i < 32; i++)
                values[i] = key + i < longest ? look->values + look->slots[key + i] * look->stride + half : nothing;
            mix_unpacked((const bf16 *)(scores + 16 * key), values);
        }
        for (; own && key < longest; key += 32) mix_forked(p, look, scores + 16 * key, key, common, ends, half);
        _tile_stored(0, mixed, 256);
        _tile_stored(1, mixed + 16, 256);
        _tile_stored(2, mixed + 32, 256);
        _tile_stored(3, mixed + 48, 256);
        for (int64_t lane = 0; lane < lanes; lane++) {
            int64_t row = look->first + lane / share, h = head * share + lane % share;
            __m512 factor = _mm512_set1_ps(1.0f / total[lane]);
            for (int64_t i = 0; i < 64; i += 16)
                store(tiled(p->mixed, row, h * d + half + i, m->heads * d),
                      _mm512_mul_ps(_mm512_load_ps(mixed + 64 * lane + i), factor));
        }
    }
}

/* How many rows look together. */
static inline int64_t rows_at_once(const Model *m) { return 16 / (m->heads / m->kv_heads); }

/* Whether a segment's values are looked at so often that packing them once pays. */
static inline int is_packed(const Model *m, const Pass *p, int64_t segment) {
    return p->packed && p->first_row[segment + 1] - p->first_row[segment] > rows_at_once(m);
}

/* Values of segments with many rows as tiles: [32 keys each][kv_heads][head_dim / 16][16][16][2], whole tiles only. */
static void pack_all(const Model *m, const Pass *p, const bf16 *cache, int thread, int threads) {
    int64_t d = m->head_dim, kv = m->kv_heads, place = 0, task = 0;
    const bf16 *values[32];
    for (int64_t s = 0; s < p->segments; s++) {
        if (!is_packed(m, p, s)) continue;
        const int64_t *slots = p->keys + p->first_key[s];
        int64_t count = p->first_key[s + 1] - p->first_key[s];
        for (int64_t key = 0; key + 32 <= count; key += 32, place++) {
            for (int64_t head = 0; head < kv; head++, task++) {
                if (task % threads != thread) continue;
                for (int64_t half = 0; half < d; half += 64) {
                    for (int64_t i = 0; i < 32; i++) values[i] = cache + (slots[key + i] * 2 * kv + kv + head) * d + half;
                    pack(values, p->packed + (place * kv + head) * 32 * d + 32 * half);
                }
            }
        }
    }
#pragma omp barrier
}

static void attend_all(const Model *m, const Pass *p, const bf16 *cache, Stream *stream) {
    int thread = stream->thread, threads = stream->threads;
    int64_t d = m->head_dim, kv = m->kv_heads, most = rows_at_once(m), task = 0, place = 0;
    float *scores = p->scores + thread * p->score_size;
    stream->allowed = stream->ahead < FARTHEST ? (FARTHEST - stream->ahead) / LINE : 0;
    for (int64_t s = 0; s < p->segments; s++) {
        int64_t count = p->first_key[s + 1] - p->first_key[s];
        for (int64_t row = p->first_row[s]; row < p->first_row[s + 1]; row += most) {
            int64_t left = p->first_row[s + 1] - row;
            for (int64_t head = 0; head < kv; head++, task++) {
                if (task % threads != thread) continue;
                Look look = {cache + head * d,
                             cache + (kv + head) * d,
                             p->keys + p->first_key[s],
                             count,
                             2 * kv * d,
                             is_packed(m, p, s) ? p->packed + (place * kv + head) * 32 * d : NULL,
                             kv * 32 * d,
                             bytes_looked_at(m, p) == MOST_KEYS && row - p->first_row[s] < 2 * most,
                             row,
                             left < most ? left : most,
                             m->heads / kv};
                attend(m, p, &look, head, scores, stream);
            }
        }
        if (is_packed(m, p, s)) place += count / 32;
    }
}
