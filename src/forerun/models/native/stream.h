/* What a thread will read in a pass, fetched some way ahead of the arithmetic: its share of matrix after matrix, and the
 * keys and values that a layer's attention looks at. A core waits long for a line, and for few at once, so it should never
 * stop asking, whatever it computes meanwhile. */
#pragma once
#include "model.h"

#define SHARE thread, threads
#define LINE 64
#ifndef DISTANCE
#define DISTANCE (64 << 10) /* bytes between what is fetched and what is computed; the second cache has to hold them */
#endif
#define FARTHEST (DISTANCE + (64 << 10)) /* where attention computes and nothing of the matrices is needed */
#ifndef MOST_KEYS
#define MOST_KEYS (768 << 10) /* bytes of keys and values that are fetched for a layer */
#endif
#ifndef GATE_PART
#define GATE_PART 32 /* outputs of gate and up together that are never parted */
#endif

typedef enum { QKV, KEYS, OUT, GATE_UP, DOWN, STAGES } Stage;

typedef struct {
    const Model *m; /* NULL if there is one matrix only */
    const Pass *p;
    int thread, threads;
    int64_t layer;
    Stage stage;           /* what comes after the present piece; that of the layer behind the last is the output head */
    int64_t key, segment;  /* the same within keys and values */
    const char *at;        /* in the present piece, */
    int64_t left;          /* which has so many bytes left */
    int is_matrix;         /* or else keys and values */
    int64_t ahead;         /* bytes of matrices that were fetched and not read yet */
    int64_t allowed;       /* lines, for now */
} Stream;

/* The parts that a thread computes: from its first to that of the next thread. */
static inline int64_t share_of(int64_t parts, int thread, int threads) { return parts * thread / threads; }

static inline int64_t bytes_of(Matrix matrix, int64_t numbers) {
    if (matrix.form) return folded_bytes(matrix.form, numbers);
    return matrix.scales ? numbers : (int64_t)sizeof(number) * numbers;
}

/* This thread's share of a matrix is next, of which it gets whole parts of so many outputs. */
static void enter_matrix(Stream *s, Matrix matrix, int64_t outputs, int64_t inputs, int64_t part) {
    int64_t parts = outputs / part, first = share_of(parts, s->thread, s->threads);
    s->at = (const char *)matrix.weights + bytes_of(matrix, first * part * inputs);
    s->left = bytes_of(matrix, (share_of(parts, s->thread + 1, s->threads) - first) * part * inputs);
    s->is_matrix = 1;
}

/* Keys and values of one slot are next, of all heads; 0 if there are no more. The rows' own are not there yet. */
static int enter_slot(Stream *s) {
    const Pass *p = s->p;
    int64_t size = 2 * s->m->kv_heads * s->m->head_dim * (int64_t)sizeof(number);
    while (s->segment < p->segments) {
        int64_t rows = p->first_row[s->segment + 1] - p->first_row[s->segment];
        if (s->key < p->first_key[s->segment + 1] - rows && s->key * size < MOST_KEYS) {
            s->at = (const char *)p->cache + (s->layer * p->slots + p->keys[s->key++]) * size;
            s->left = size;
            s->is_matrix = 0;
            return 1;
        }
        s->key = p->first_key[++s->segment];
    }
    return 0;
}

/* How much of keys and values is fetched for a layer. */
static int64_t bytes_looked_at(const Model *m, const Pass *p) {
    int64_t size = 2 * m->kv_heads * m->head_dim * (int64_t)sizeof(number), all = (p->first_key[p->segments] - p->rows) * size;
    return all < MOST_KEYS ? all : MOST_KEYS;
}

/* The next piece; 0 at the end of the pass. */
static int enter_next(Stream *s) {
    const Model *m = s->m;
    for (; m && s->layer < m->layers; s->layer++, s->stage = QKV) {
        if (!s->p->active[s->layer]) continue;
        const Layer *layer = m->layer + s->layer;
        int64_t heads = m->heads * m->head_dim, width = heads + 2 * m->kv_heads * m->head_dim;
        for (; s->stage < STAGES; s->stage++) {
            if (s->stage == KEYS && enter_slot(s)) return 1;
            if (s->stage == KEYS) continue;
            if (s->stage == QKV) {
                enter_matrix(s, layer->qkv, width, layer->beside_norm ? 2 * m->hidden : m->hidden, 32);
                s->key = s->segment = 0;
            }
            if (s->stage == OUT) enter_matrix(s, layer->out, m->hidden, heads, 32);
            if (s->stage == GATE_UP) enter_matrix(s, layer->gate_up, 2 * m->inner, m->hidden, GATE_PART);
            if (s->stage == DOWN) enter_matrix(s, layer->down, m->hidden, m->inner, 32);
            s->stage++;
            return 1;
        }
    }
    if (!m || s->layer > m->layers || !s->p->wanted) return 0;
    enter_matrix(s, m->head, m->vocabulary, m->hidden, 32);
    s->layer++;
    return 1;
}

static inline void fetch(Stream *s, int64_t lines) {
    if (lines > s->allowed) lines = s->allowed;
    s->allowed -= lines;
    while (lines > 0) {
        if (s->left <= 0 && !enter_next(s)) return;
        int64_t here = s->left / LINE < lines ? s->left / LINE : lines;
        for (int64_t line = 0; line < here; line++) __builtin_prefetch(s->at + LINE * line, 0, 2);
        s->at += LINE * here;
        s->left -= LINE * here;
        if (s->is_matrix) s->ahead += LINE * here;
        lines -= here;
    }
}

/* So many bytes in one run, for somebody who fetches them; NULL at the end of the pass. */
static inline const char *claim(Stream *s, int64_t bytes) {
    if (s->left <= 0 && !enter_next(s)) return NULL;
    s->at += bytes;
    s->left -= bytes;
    return s->at - bytes;
}

/* What is read first is fetched at once. */
static inline void begin(Stream *s) {
    s->allowed = DISTANCE / LINE;
    fetch(s, s->allowed);
}
