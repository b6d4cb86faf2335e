/* One pass of a Llama-like transformer in bfloat16 on a CPU with AMX, all layers in one call.
 *
 * Every sum runs in an order that depends on the row's own text alone: over the width of a matrix from left to right,
 * over keys in the order of their positions. Neither the rows beside it, nor the shape of a tree, nor the number of
 * threads changes a single bit of what a row gives.
 *
 * Matrices lie as AMX reads them: [out / 32][in / 32][2][16][16][2], a tile of 16 outputs being 16 pairs of inputs.
 * So do the rows they are multiplied with: [rows / 16][in / 32][16][32].
 */
#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "tiles.h"

/* A row of a matrix `width` wide gets the norm of x, or without a weight x itself, from column `place` on. */
static void norm_row(const bf16 *x, const float *weight, int64_t size, double eps, bf16 *out, int64_t row, int64_t place,
                     int64_t width) {
    if (!weight) {
        for (int64_t i = 0; i < size; i += 16) memcpy(tiled(out, row, place + i, width), x + i, 16 * sizeof(bf16));
        return;
    }
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        __m512 v = wide(x + i);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    __m512 factor = _mm512_set1_ps((float)(1.0 / sqrt(_mm512_reduce_add_ps(sum) / (double)size + eps)));
    for (int64_t i = 0; i < size; i += 16)
        store(tiled(out, row, place + i, width),
              _mm512_mul_ps(_mm512_mul_ps(wide(x + i), factor), _mm512_loadu_ps(weight + i)));
}

/* What becomes of a product: 32 outputs of up to 16 rows, as two tiles of 16. */
typedef enum { KEEP, ADD, GATE, LOGITS } Use;

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

static void use(Use how, const float *left, const float *right, int64_t rows, int64_t row, int64_t pair, int64_t width,
                const float *bias, void *out) {
    for (int64_t r = 0; r < rows; r++) {
        __m512 a = _mm512_loadu_ps(left + 16 * r), b = _mm512_loadu_ps(right + 16 * r);
        if (bias) {
            a = _mm512_add_ps(a, _mm512_loadu_ps(bias + 32 * pair));
            b = _mm512_add_ps(b, _mm512_loadu_ps(bias + 32 * pair + 16));
        }
        if (how == KEEP) {
            float *place = (float *)out + (row + r) * width + 32 * pair;
            _mm512_storeu_ps(place, a);
            _mm512_storeu_ps(place + 16, b);
        } else if (how == ADD) {
            bf16 *place = (bf16 *)out + (row + r) * width + 32 * pair;
            store(place, _mm512_add_ps(wide(place), a));
            store(place + 16, _mm512_add_ps(wide(place + 16), b));
        } else if (how == GATE) {
            __m512 one = _mm512_set1_ps(1.0f), negative = _mm512_sub_ps(_mm512_setzero_ps(), a);
            __m512 silu = _mm512_div_ps(a, _mm512_add_ps(one, exponential(negative)));
            store(tiled(out, row + r, 16 * pair, width), _mm512_mul_ps(silu, b));
        } else {
            const Pass *pass = out;
            bf16 *place = pass->logits + (row + r) * width + 32 * pair;
            store(place, a);
            store(place + 16, b);
            int64_t mine = omp_get_thread_num() * pass->wanted + row + r;
            float *peak = pass->peaks + ((row + r) * width + 32 * pair) / 32;
            remember(wide(place), wide(place + 16), 32 * pair, peak, pass->highest + mine, pass->likeliest + mine);
        }
    }
}

/* The pairs of tiles that a thread computes: from its first to that of the next thread. */
static inline int64_t share_of(int64_t pairs, int thread, int threads) { return pairs * thread / threads; }

/* Tiled rows times a matrix of 32 · pairs outputs; this thread's share of them. While it computes, what comes next is
 * fetched: the next pair of tiles, or at last its share of `next`, the matrix after this one. */
static void product(const bf16 *x, int64_t rows, int64_t in, const bf16 *matrix, int64_t pairs, const bf16 *next,
                    int thread, int threads, Use how, const float *bias, int64_t width, void *out) {
    if (!rows) return;
    float tiles[4][256] __attribute__((aligned(64)));
    int64_t steps = in / 32, blocks = (rows + 31) / 32, lines = (32 + blocks - 1) / blocks;
    int64_t last = share_of(pairs, thread + 1, threads);
    WRITTEN();
    for (int64_t pair = share_of(pairs, thread, threads); pair < last; pair++) {
        const bf16 *w = matrix + pair * steps * 1024;
        const char *ahead = (const char *)(pair + 1 < last ? w + steps * 1024 : next);
        for (int64_t row = 0; row < rows; row += 32) {
            int more = rows - row > 16;
            const bf16 *upper = x + row * in, *lower = upper + 16 * in;
            _tile_zero(0);
            _tile_zero(1);
            if (more) {
                _tile_zero(2);
                _tile_zero(3);
            }
            for (int64_t k = 0; k < steps; k++) {
                for (int64_t line = 0; line < lines; line++) _mm_prefetch(ahead + 64 * line, _MM_HINT_T1);
                ahead += 64 * lines;
                _tile_loadd(4, upper + 512 * k, 64);
                _tile_loadd(6, w + 1024 * k, 64);
                _tile_loadd(7, w + 1024 * k + 512, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (more) {
                    _tile_loadd(5, lower + 512 * k, 64);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            _tile_stored(0, tiles[0], 64);
            _tile_stored(1, tiles[1], 64);
            int64_t first = rows - row < 16 ? rows - row : 16;
            use(how, tiles[0], tiles[1], first, row, pair, width, bias, out);
            if (more) {
                _tile_stored(2, tiles[2], 64);
                _tile_stored(3, tiles[3], 64);
                int64_t second = rows - row - 16 < 16 ? rows - row - 16 : 16;
                use(how, tiles[2], tiles[3], second, row + 16, pair, width, bias, out);
            }
        }
    }
}

static void turn_head(float *head, const float *weight, int64_t size, double eps, const float *cosine, const float *sine,
                      bf16 *out) {
    if (weight) {
        float sum = 0;
        for (int64_t i = 0; i < size; i++) sum += head[i] * head[i];
        float factor = (float)(1.0 / sqrt(sum / (double)size + eps));
        for (int64_t i = 0; i < size; i++) head[i] *= factor * weight[i];
    }
    int64_t half = size / 2;
    for (int64_t i = 0; i < half; i += 16) {
        __m512 a = _mm512_loadu_ps(head + i), b = _mm512_loadu_ps(head + half + i);
        if (cosine) {
            __m512 c = _mm512_loadu_ps(cosine + i), s = _mm512_loadu_ps(sine + i);
            __m512 turned = _mm512_sub_ps(_mm512_mul_ps(a, c), _mm512_mul_ps(b, s));
            b = _mm512_add_ps(_mm512_mul_ps(b, c), _mm512_mul_ps(a, s));
            a = turned;
        }
        store(out + i, a);
        store(out + half + i, b);
    }
}

/* Norm and rotation of one row's queries and keys; keys and values go to their slot. */
static void place_row(const Model *m, const Layer *layer, const Pass *p, bf16 *cache, int64_t row) {
    int64_t d = m->head_dim, heads = m->heads, kv = m->kv_heads;
    float *qkv = p->qkv + row * (heads + 2 * kv) * d;
    bf16 *slot = cache + p->row_slots[row] * 2 * kv * d;
    const float *cosine = NULL, *sine = NULL;
    if (layer->rope >= 0) {
        cosine = p->cosine + (layer->rope * p->rows + row) * d / 2;
        sine = p->sine + (layer->rope * p->rows + row) * d / 2;
    }
    for (int64_t h = 0; h < heads; h++)
        turn_head(qkv + h * d, layer->q_norm, d, m->eps, cosine, sine, p->queries + (row * heads + h) * d);
    for (int64_t h = 0; h < kv; h++)
        turn_head(qkv + (heads + h) * d, layer->k_norm, d, m->eps, cosine, sine, slot + h * d);
    for (int64_t i = 0; i < kv * d; i += 16) store(slot + kv * d + i, _mm512_loadu_ps(qkv + (heads + kv) * d + i));
}

static void norm_rows(const Model *m, const Pass *p, const float *weight, int thread, int threads) {
    for (int64_t row = thread; row < p->rows; row += threads)
        norm_row(p->x + row * m->hidden, weight, m->hidden, m->eps, p->normed, row, 0, m->hidden);
}

/* What attention reads of each row: its hidden state, behind `beside` where the layer takes both. */
static void attended_rows(const Model *m, const Layer *layer, const Pass *p, int64_t width, int thread, int threads) {
    for (int64_t row = thread; row < p->rows; row += threads) {
        if (layer->beside_norm)
            norm_row(p->beside + row * m->hidden, layer->beside_norm, m->hidden, m->eps, p->normed, row, 0, width);
        norm_row(p->x + row * m->hidden, layer->input_norm, m->hidden, m->eps, p->normed, row, width - m->hidden, width);
    }
}

/* Where a thread will begin to read a matrix of that many outputs and inputs. */
static const bf16 *begin(const bf16 *matrix, int64_t outputs, int64_t inputs, int thread, int threads) {
    return matrix + share_of(outputs / 32, thread, threads) * 32 * inputs;
}

#define SHARE thread, threads

static inline void load_tiles(void) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shapes.bytes[i] = 64;
        shapes.rows[i] = 16;
    }
    WRITTEN();
    _tile_loadconfig(&shapes);
}

void forerun_pass(const Model *m, const Pass *p) {
    int64_t heads = m->heads * m->head_dim, width = heads + 2 * m->kv_heads * m->head_dim;
#pragma omp parallel num_threads((int)p->threads)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        load_tiles();
        for (int64_t l = 0; l <= m->layers; l++) {
            if (p->features[l] && thread == 0) memcpy(p->features[l], p->x, sizeof(bf16) * p->rows * m->hidden);
            if (l == m->layers || !p->active[l]) continue;
            const Layer *layer = m->layer + l;
            bf16 *cache = p->cache + l * p->slots * 2 * m->kv_heads * m->head_dim;
            int64_t read = layer->beside_norm ? 2 * m->hidden : m->hidden;
            attended_rows(m, layer, p, read, thread, threads);
#pragma omp barrier
            product(p->normed, p->rows, read, layer->qkv, width / 32, begin(layer->out, m->hidden, heads, SHARE),
                    SHARE, KEEP, layer->qkv_bias, width, p->qkv);
#pragma omp barrier
            for (int64_t row = thread; row < p->rows; row += threads) place_row(m, layer, p, cache, row);
#pragma omp barrier
            attend_all(m, p, cache, thread, threads);
#pragma omp barrier
            product(p->mixed, p->rows, heads, layer->out, m->hidden / 32,
                    begin(layer->gate_up, 2 * m->inner, m->hidden, SHARE), SHARE, ADD, layer->out_bias, m->hidden, p->x);
#pragma omp barrier
            norm_rows(m, p, layer->inner_norm, thread, threads);
#pragma omp barrier
            product(p->normed, p->rows, m->hidden, layer->gate_up, m->inner / 16,
                    begin(layer->down, m->hidden, m->inner, SHARE), SHARE, GATE, NULL, m->inner, p->act);
#pragma omp barrier
            const bf16 *next = l + 1 < m->layers ? begin(layer[1].qkv, width, m->hidden, SHARE)
                                                 : begin(m->head, m->vocabulary, m->hidden, SHARE);
            product(p->act, p->rows, m->inner, layer->down, m->hidden / 32, next, SHARE, ADD, NULL, m->hidden, p->x);
#pragma omp barrier
        }
        for (int64_t w = thread; w < p->wanted; w += threads)
            norm_row(p->x + p->wanted_rows[w] * m->hidden, m->norm, m->hidden, m->eps, p->normed, w, 0, m->hidden);
#pragma omp barrier
        product(p->normed, p->wanted, m->hidden, m->head, m->vocabulary / 32,
                begin(m->layer[0].qkv, width, m->hidden, SHARE), SHARE, LOGITS, NULL, m->vocabulary, (void *)p);
        _tile_release();
    }
}

#include "growth.h"

/* Linux lends a process the tile registers when asked; 0 if it does. */
int forerun_ask_for_tiles(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }
