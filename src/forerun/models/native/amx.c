/* One pass of a Llama-like transformer on a CPU with AMX, in bfloat16 or with weights in bytes, all layers in one call.
 *
 * Every sum runs in an order that depends on the row's own text alone: over the width of a matrix from left to right,
 * over keys in the order of their positions. Neither the rows beside it, nor the shape of a tree, nor the number of
 * threads changes a single bit of what a row gives, as long as all of them are numbers.
 */
#include <math.h>
#include <omp.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "attention.h"
#include "products.h"
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

/* Rows in tiles as the model's weights want them. */
static void ready_row(const Model *m, const Pass *p, bf16 *tiles, int64_t row, int64_t width) {
    if (m->head.scales) p->row_scales[row] = as_bytes(tiles, row, width);
}

static void ready_rows(const Model *m, const Pass *p, bf16 *tiles, int64_t width, int thread, int threads) {
    if (!m->head.scales) return;
    for (int64_t row = thread; row < p->rows; row += threads) ready_row(m, p, tiles, row, width);
#pragma omp barrier
}

static void norm_rows(const Model *m, const Pass *p, const float *weight, int thread, int threads) {
    for (int64_t row = thread; row < p->rows; row += threads) {
        norm_row(p->x + row * m->hidden, weight, m->hidden, m->eps, p->normed, row, 0, m->hidden);
        ready_row(m, p, p->normed, row, m->hidden);
    }
}

/* What attention reads of each row: its hidden state, behind `beside` where the layer takes both. */
static void attended_rows(const Model *m, const Layer *layer, const Pass *p, int64_t width, int thread, int threads) {
    for (int64_t row = thread; row < p->rows; row += threads) {
        if (layer->beside_norm)
            norm_row(p->beside + row * m->hidden, layer->beside_norm, m->hidden, m->eps, p->normed, row, 0, width);
        norm_row(p->x + row * m->hidden, layer->input_norm, m->hidden, m->eps, p->normed, row, width - m->hidden, width);
        ready_row(m, p, p->normed, row, width);
    }
}

/* What one thread does of a pass. */
static void pass_rows(const Model *m, const Pass *p, Stream *s) {
    int thread = s->thread, threads = s->threads;
    int64_t heads = m->heads * m->head_dim, width = heads + 2 * m->kv_heads * m->head_dim;
    int64_t looked_at = bytes_looked_at(m, p);
    for (int64_t l = 0; l <= m->layers; l++) {
        if (p->features[l] && thread == 0) memcpy(p->features[l], p->x, sizeof(bf16) * p->rows * m->hidden);
        if (l == m->layers || !p->active[l]) continue;
        const Layer *layer = m->layer + l;
        bf16 *cache = p->cache + l * p->slots * 2 * m->kv_heads * m->head_dim;
        int64_t read = layer->beside_norm ? 2 * m->hidden : m->hidden;
        attended_rows(m, layer, p, read, SHARE);
#pragma omp barrier
        Task attended = {p->normed, p->row_scales, p->rows, read, KEEP, layer->qkv_bias, width, p->qkv};
        product(&attended, layer->qkv, width / 32, s, looked_at);
#pragma omp barrier
        for (int64_t row = thread; row < p->rows; row += threads) place_row(m, layer, p, cache, row);
#pragma omp barrier
        pack_all(m, p, cache, SHARE);
        attend_all(m, p, cache, s);
#pragma omp barrier
        ready_rows(m, p, p->mixed, heads, SHARE);
        Task mixed = {p->mixed, p->row_scales, p->rows, heads, ADD, layer->out_bias, m->hidden, p->x};
        product(&mixed, layer->out, m->hidden / 32, s, 0);
#pragma omp barrier
        norm_rows(m, p, layer->inner_norm, SHARE);
#pragma omp barrier
        Task normed = {p->normed, p->row_scales, p->rows, m->hidden, GATE, NULL, m->inner, p->act};
        product(&normed, layer->gate_up, m->inner / 16, s, 0);
#pragma omp barrier
        ready_rows(m, p, p->act, m->inner, SHARE);
        Task gated = {p->act, p->row_scales, p->rows, m->inner, ADD, NULL, m->hidden, p->x};
        product(&gated, layer->down, m->hidden / 32, s, 0);
#pragma omp barrier
    }
    for (int64_t w = thread; w < p->wanted; w += threads) {
        norm_row(p->x + p->wanted_rows[w] * m->hidden, m->norm, m->hidden, m->eps, p->normed, w, 0, m->hidden);
        ready_row(m, p, p->normed, w, m->hidden);
    }
#pragma omp barrier
    Task last = {p->normed, p->row_scales, p->wanted, m->hidden, LOGITS, NULL, m->vocabulary, (void *)p};
    product(&last, m->head, m->vocabulary / 32, s, 0);
}

/* What all threads found likeliest becomes the first row of `likeliest`; -1 where no logit is largest. They share the
 * tokens in order, so the first of equals is the earlier thread's. */
static void settle(const Pass *p) {
    for (int64_t w = 0; w < p->wanted; w++) {
        float best = p->highest[w];
        for (int64_t i = p->wanted + w; i < p->threads * p->wanted; i += p->wanted) {
            if (!(p->highest[i] > best) && p->highest[i] == p->highest[i]) continue; /* NaN stays */
            best = best == best ? p->highest[i] : best;
            p->likeliest[w] = p->likeliest[i];
        }
        if (!(best > -INFINITY && best < INFINITY)) p->likeliest[w] = -1;
    }
}

void forerun_pass(const Model *m, const Pass *p) {
    for (int64_t i = 0; i < p->threads * p->wanted; i++) p->highest[i] = -INFINITY;
#pragma omp parallel num_threads((int)p->threads)
    {
        Stream stream = {.m = m, .p = p, .thread = omp_get_thread_num(), .threads = omp_get_num_threads()};
        load_tiles(16);
        pass_rows(m, p, &stream);
        _tile_release();
    }
    settle(p);
}

/* Rows that come in parts, [rows, inputs] each, times a matrix in bfloat16 that reads them side by side; added to what
 * is in `out`. `tiles` is scratch, with rows rounded up to 32. */
void forerun_join(const bf16 *const *parts, int64_t count, int64_t rows, int64_t inputs, const bf16 *matrix,
                  int64_t outputs, bf16 *tiles, bf16 *out, int64_t all_threads) {
    int64_t width = count * inputs;
    Matrix plain = {matrix, NULL};
#pragma omp parallel num_threads((int)all_threads)
    {
        Stream stream = {.thread = omp_get_thread_num(), .threads = omp_get_num_threads()};
        enter_matrix(&stream, plain, outputs, width);
        load_tiles(16);
        for (int64_t row = stream.thread; row < rows; row += stream.threads)
            for (int64_t part = 0; part < count; part++)
                norm_row(parts[part] + row * inputs, NULL, inputs, 0, tiles, row, part * inputs, width);
#pragma omp barrier
        Task joint = {tiles, NULL, rows, width, ADD, NULL, outputs, out};
        product(&joint, plain, outputs / 32, &stream, 0);
        _tile_release();
    }
}

#include "growth.h"

/* Linux lends a process the tile registers when asked; 0 if it does. */
int forerun_ask_for_tiles(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }
