/* Rows times matrices, with weights in bfloat16 or in bytes.
 *
 * Bytes have one scale for each output. The rows they are multiplied with are bytes too, two for each number: with the
 * row's scale s a number is s (high + low / 254). So it is the weights that are rounded, and hardly the rows.
 *
 * Matrices lie as AMX reads them, 32 outputs after the other, a tile of 16 outputs being 16 pairs or fours of inputs:
 * [out / 32][in / 32][2][16][16][2] in bfloat16, [out / 32][in / 64][2][16][16][4] in bytes.
 * So do the rows: [rows / 16][in / 32][16][32], which in bytes is [rows / 16][in / 64][high, low][16][64].
 */
#pragma once
#include <math.h>
#include <omp.h>

#include "stream.h"
#include "tiles.h"

/* Tiles 0 to 5 of so many rows, which is how long multiplying takes. */
static inline void load_tiles(int64_t rows) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = i < 6 ? (uint8_t)rows : 16;
    }
    WRITTEN();
    _tile_loadconfig(&shapes);
}

/* The first of the 32 logits from `token` on that is larger than all before them. NaN stays. */
static inline void remember(__m512 a, __m512 b, int64_t token, float *peak, float *highest, int64_t *likeliest) {
    float best = *peak = _mm512_reduce_max_ps(_mm512_max_ps(a, b));
    if (_mm512_cmp_ps_mask(a, b, _CMP_UNORD_Q)) *highest = NAN;
    if (!(best > *highest)) return;
    __mmask16 left = _mm512_cmpeq_ps_mask(a, _mm512_set1_ps(best));
    __mmask16 right = _mm512_cmpeq_ps_mask(b, _mm512_set1_ps(best));
    *highest = best;
    *likeliest = token + (left ? __builtin_ctz(left) : 16 + __builtin_ctz(right));
}

/* What becomes of 32 sums of one row. */
static inline void use(const Task *t, const float *left, const float *right, int64_t row, int64_t pair) {
    __m512 a = _mm512_load_ps(left), b = _mm512_load_ps(right);
    if (t->bias) {
        a = _mm512_add_ps(a, _mm512_loadu_ps(t->bias + 32 * pair));
        b = _mm512_add_ps(b, _mm512_loadu_ps(t->bias + 32 * pair + 16));
    }
    if (t->how == KEEP) {
        float *place = (float *)t->out + row * t->width + 32 * pair;
        _mm512_storeu_ps(place, a);
        _mm512_storeu_ps(place + 16, b);
    } else if (t->how == ADD) {
        bf16 *place = (bf16 *)t->out + row * t->width + 32 * pair;
        store(place, _mm512_add_ps(wide(place), a));
        store(place + 16, _mm512_add_ps(wide(place + 16), b));
    } else if (t->how == GATE) {
        __m512 one = _mm512_set1_ps(1.0f), negative = _mm512_sub_ps(_mm512_setzero_ps(), a);
        __m512 silu = _mm512_div_ps(a, _mm512_add_ps(one, exponential(negative)));
        store(tiled(t->out, row, 16 * pair, t->width), _mm512_mul_ps(silu, b));
    } else {
        const Pass *pass = t->out;
        bf16 *place = pass->logits + row * t->width + 32 * pair;
        store(place, a);
        store(place + 16, b);
        int64_t mine = omp_get_thread_num() * pass->wanted + row;
        float *peak = pass->peaks + (row * t->width + 32 * pair) / 32;
        remember(wide(place), wide(place + 16), 32 * pair, peak, pass->highest + mine, pass->likeliest + mine);
    }
}

#define GROUP 8 /* blocks of 32 rows that go by a part of 32 outputs while it is near */
#define PART 12 /* steps of 32 inputs: what the first cache keeps of 32 outputs while rows go by */

/* 32 outputs of some rows, and how many of them were used. */
typedef struct {
    float sums[GROUP][4][256] __attribute__((aligned(64))); /* of 32 rows: upper left, upper right, lower left and right */
    int64_t row, rows, pair, used;
} Group;

static inline void use_next(const Task *t, Group *g, int64_t count) {
    for (; count > 0 && g->used < g->rows; count--, g->used++) {
        const float *left = g->sums[g->used / 32][g->used / 16 % 2 * 2] + 16 * (g->used % 16);
        use(t, left, left + 256, g->row + g->used, g->pair);
    }
}

/* What goes on beside a product, at each of its steps: lines are fetched, and rows of the group before are used. */
typedef struct {
    Stream *stream;
    int64_t lines, rows;
    Group *before;
} Beside;

/* A block's products with the inputs of steps `from` to `to`, added to its sums unless they are the first. */
static inline void multiply(const Task *t, const bf16 *w, float (*sums)[256], int64_t row, int more, int64_t from,
                            int64_t to, const Beside *beside) {
    const bf16 *upper = t->x + row * t->in, *lower = upper + 16 * t->in;
    if (from) {
        _tile_loadd(0, sums[0], 64);
        _tile_loadd(1, sums[1], 64);
        _tile_loadd(2, sums[2], 64);
        _tile_loadd(3, sums[3], 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    _tile_loadd(4, upper + 512 * from, 64);
    _tile_loadd(6, w + 1024 * from, 64);
    if (more) _tile_loadd(5, lower + 512 * from, 64);
    _tile_loadd(7, w + 1024 * from + 512, 64);
    for (int64_t k = from; k < to; k++) {
        int64_t next = k + 1 < to ? k + 1 : k;
        fetch(beside->stream, beside->lines);
        _tile_dpbf16ps(0, 4, 6);
        if (more) {
            _tile_dpbf16ps(2, 5, 6);
            _tile_loadd(6, w + 1024 * next, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(4, upper + 512 * next, 64);
            _tile_dpbf16ps(3, 5, 7);
            _tile_loadd(5, lower + 512 * next, 64);
        } else {
            _tile_loadd(6, w + 1024 * next, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(4, upper + 512 * next, 64);
        }
        _tile_loadd(7, w + 1024 * next + 512, 64);
        use_next(t, beside->before, beside->rows);
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    if (more) {
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
    }
    WRITTEN();
}

/* The pairs of tiles from `pair` to `last`. */
static void in_bfloat16(const Task *t, const bf16 *matrix, int64_t pair, int64_t last, Stream *s, int64_t lines) {
    Group groups[2], *now = groups, *before = groups + 1;
    int64_t steps = t->in / 32;
    before->rows = before->used = 0;
    for (; pair < last; pair++) {
        for (int64_t row = 0; row < t->rows; row += 32 * GROUP) {
            int64_t rows = t->rows - row < 32 * GROUP ? t->rows - row : 32 * GROUP, blocks = (rows + 31) / 32;
            int64_t part = blocks > 2 ? PART : steps;
            Beside beside = {s, lines, (32 + steps - 1) / steps, before};
            now->row = row;
            now->rows = rows;
            now->pair = pair;
            now->used = 0;
            for (int64_t from = 0; from < steps; from += part)
                for (int64_t block = 0; block < blocks; block++)
                    multiply(t, matrix + pair * 32 * t->in, now->sums[block], row + 32 * block, rows - 32 * block > 16,
                             from, from + part < steps ? from + part : steps, &beside);
            use_next(t, before, INT64_MAX);
            Group *other = before;
            before = now;
            now = other;
        }
    }
    use_next(t, before, INT64_MAX);
}

/* What the sums of 16 outputs stand for. */
static inline void scaled(const int32_t *high, const int32_t *low, const Task *t, int64_t row, int64_t rows,
                          const float *scales, float *tile) {
    __m512 own = _mm512_loadu_ps(scales), part = _mm512_set1_ps(1.0f / LOW_STEPS);
    for (int64_t r = 0; r < rows; r++) {
        __m512 upper = _mm512_cvtepi32_ps(_mm512_load_si512(high + 16 * r));
        __m512 lower = _mm512_cvtepi32_ps(_mm512_load_si512(low + 16 * r));
        __m512 sum = _mm512_fmadd_ps(lower, part, upper);
        _mm512_store_ps(tile + 16 * r, _mm512_mul_ps(_mm512_mul_ps(sum, own), _mm512_set1_ps(t->row_scales[row + r])));
    }
}

static void pair_in_bytes(const Task *t, const int8_t *w, const float *scales, int64_t pair, Stream *s, int64_t lines) {
    int32_t sums[4][256] __attribute__((aligned(64)));
    float tiles[2][256] __attribute__((aligned(64)));
    int64_t steps = t->in / 64;
    for (int64_t row = 0; row < t->rows; row += 16) {
        const bf16 *x = t->x + row * t->in;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t k = 0; k < steps; k++) {
            fetch(s, lines);
            _tile_loadd(6, w + 2048 * k, 64);
            _tile_loadd(7, w + 2048 * k + 1024, 64);
            _tile_loadd(4, x + 1024 * k, 64);
            _tile_dpbssd(0, 4, 6);
            _tile_dpbssd(1, 4, 7);
            _tile_loadd(5, x + 1024 * k + 512, 64);
            _tile_dpbssd(2, 5, 6);
            _tile_dpbssd(3, 5, 7);
        }
        _tile_stored(0, sums[0], 64);
        _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64);
        _tile_stored(3, sums[3], 64);
        WRITTEN();
        int64_t count = t->rows - row < 16 ? t->rows - row : 16;
        scaled(sums[0], sums[2], t, row, count, scales + 32 * pair, tiles[0]);
        scaled(sums[1], sums[3], t, row, count, scales + 32 * pair + 16, tiles[1]);
        for (int64_t r = 0; r < count; r++) use(t, tiles[0] + 16 * r, tiles[1] + 16 * r, row + r, pair);
    }
}

/* Tiled rows times a matrix; this thread's share of its outputs. While it computes, what comes next is fetched, and `more`
 * bytes of what is not read as a matrix. */
static void product(const Task *t, Matrix matrix, int64_t outputs, Stream *s, int64_t more) {
    if (!t->rows) return;
    int64_t pairs = outputs / 32;
    int64_t first = share_of(pairs, s->thread, s->threads), last = share_of(pairs, s->thread + 1, s->threads);
    int64_t read = bytes_of(matrix, (last - first) * 32 * t->in), tall = matrix.scales ? 16 : 32;
    int64_t steps = read / 2048 * ((t->rows + tall - 1) / tall), wanted = (read + more + DISTANCE - s->ahead) / LINE;
    int64_t lines = wanted > 0 && steps ? (wanted + steps - 1) / steps : 0;
    s->allowed = lines ? wanted : 0;
    int few = matrix.scales && t->rows < 16;
    if (few) load_tiles(t->rows);
    WRITTEN();
    if (matrix.scales)
        for (int64_t pair = first; pair < last; pair++)
            pair_in_bytes(t, (const int8_t *)matrix.weights + pair * 32 * t->in, matrix.scales, pair, s, lines);
    else
        in_bfloat16(t, matrix.weights, first, last, s, lines);
    s->ahead -= read;
    if (few) load_tiles(16);
}

/* A row in tiles of bfloat16 becomes bytes, in the same place; its scale. What is no number makes all of it none. */
static float as_bytes(bf16 *tiles, int64_t row, int64_t width) {
    __m512i most = _mm512_setzero_si512(), size = _mm512_set1_epi16(0x7fff);
    for (int64_t i = 0; i < width; i += 32)
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(tiled(tiles, row, i, width)), size));
    __m512i halves = _mm512_max_epu32(_mm512_srli_epi32(most, 16), _mm512_and_si512(most, _mm512_set1_epi32(0xffff)));
    uint32_t bits = _mm512_reduce_max_epu32(halves) << 16;
    float largest;
    memcpy(&largest, &bits, 4);
    if (!(largest < INFINITY)) return NAN;
    __m512 factor = _mm512_set1_ps(largest > 0 ? HIGH_STEPS / largest : 0.0f), finer = _mm512_set1_ps(LOW_STEPS);
    for (int64_t i = 0; i < width; i += 64) {
        bf16 *left = tiled(tiles, row, i, width), *right = tiled(tiles, row, i + 32, width);
        __m128i high[4], low[4];
        for (int j = 0; j < 4; j++) {
            __m512 value = _mm512_mul_ps(wide((j < 2 ? left : right) + 16 * (j % 2)), factor);
            __m512i whole = _mm512_cvtps_epi32(value);
            __m512 rest = _mm512_mul_ps(_mm512_sub_ps(value, _mm512_cvtepi32_ps(whole)), finer);
            high[j] = _mm512_cvtsepi32_epi8(whole);
            low[j] = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(rest));
        }
        for (int j = 0; j < 4; j++) {
            _mm_storeu_si128((__m128i *)left + j, high[j]);
            _mm_storeu_si128((__m128i *)right + j, low[j]);
        }
    }
    return largest / HIGH_STEPS;
}
