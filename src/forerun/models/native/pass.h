/* The way of rows through all layers of a model. The file that includes this has the arithmetic: `norm_row`, `turn_head`,
 * `keep_row`, `ready_row`, `rows_get_ready`, `product`, `pack_all`,
 * `attend_all`, and what a thread does before and behind a pass. */
#pragma once
#include <math.h>
#include <omp.h>
#include <string.h>

#include "stream.h"

/* Norm and rotation of one row's queries and keys; keys and values go to their slot. */
static void place_row(const Model *m, const Layer *layer, const Pass *p, number *cache, int64_t row) {
    int64_t d = m->head_dim, heads = m->heads, kv = m->kv_heads;
    float *qkv = p->qkv + row * (heads + 2 * kv) * d;
    number *slot = cache + p->row_slots[row] * 2 * kv * d;
    const float *cosine = NULL, *sine = NULL;
    if (layer->rope >= 0) {
        cosine = p->cosine + (layer->rope * p->rows + row) * d / 2;
        sine = p->sine + (layer->rope * p->rows + row) * d / 2;
    }
    for (int64_t h = 0; h < heads; h++)
        turn_head(qkv + h * d, layer->q_norm, d, m->eps, cosine, sine, p->queries + (row * heads + h) * d);
    for (int64_t h = 0; h < kv; h++)
        turn_head(qkv + (heads + h) * d, layer->k_norm, d, m->eps, cosine, sine, slot + h * d);
    keep_row(qkv + (heads + kv) * d, kv * d, slot + kv * d);
}

static void ready_rows(const Model *m, const Pass *p, number *rows, int64_t width, int thread, int threads) {
    if (!rows_get_ready(m, p)) return;
    for (int64_t row = thread; row < p->rows; row += threads) ready_row(m, p, rows, row, width);
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
        if (p->features[l] && thread == 0) memcpy(p->features[l], p->x, sizeof(number) * p->rows * m->hidden);
        if (l == m->layers || !p->active[l]) continue;
        const Layer *layer = m->layer + l;
        number *cache = p->cache + l * p->slots * 2 * m->kv_heads * m->head_dim;
        int64_t read = layer->beside_norm ? 2 * m->hidden : m->hidden;
        attended_rows(m, layer, p, read, SHARE);
#pragma omp barrier
        Task attended = {p->normed, p->row_scales, p->rows, read, KEEP, layer->qkv_bias, width, p->qkv};
        product(&attended, layer->qkv, width, s, looked_at);
#pragma omp barrier
        for (int64_t row = thread; row < p->rows; row += threads) place_row(m, layer, p, cache, row);
#pragma omp barrier
        pack_all(m, p, cache, SHARE);
        attend_all(m, p, cache, s);
#pragma omp barrier
        ready_rows(m, p, p->mixed, heads, SHARE);
        Task mixed = {p->mixed, p->row_scales, p->rows, heads, ADD, layer->out_bias, m->hidden, p->x};
        product(&mixed, layer->out, m->hidden, s, 0);
#pragma omp barrier
        norm_rows(m, p, layer->inner_norm, SHARE);
#pragma omp barrier
        Task normed = {p->normed, p->row_scales, p->rows, m->hidden, GATE, NULL, m->inner, p->act};
        product(&normed, layer->gate_up, 2 * m->inner, s, 0);
#pragma omp barrier
        ready_rows(m, p, p->act, m->inner, SHARE);
        Task gated = {p->act, p->row_scales, p->rows, m->inner, ADD, NULL, m->hidden, p->x};
        product(&gated, layer->down, m->hidden, s, 0);
#pragma omp barrier
    }
    for (int64_t w = thread; w < p->wanted; w += threads) {
        norm_row(p->x + p->wanted_rows[w] * m->hidden, m->norm, m->hidden, m->eps, p->normed, w, 0, m->hidden);
        ready_row(m, p, p->normed, w, m->hidden);
    }
#pragma omp barrier
    Task last = {p->normed, p->row_scales, p->wanted, m->hidden, LOGITS, NULL, m->vocabulary, (void *)p};
    product(&last, m->head, m->vocabulary, s, 0);
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
        open_pass(&stream);
        pass_rows(m, p, &stream);
        close_pass();
    }
    settle(p);
}
