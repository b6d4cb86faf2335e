/* A dynamic tree behind one text, grown by a head of one layer: the unread rows of the text and then level after level,
 * in one call. What `drafters/host_growth.py` says, for a head whose pass is here. */
#pragma once
#include <stdlib.h>

#include "candidates.h"

typedef struct {
    int64_t joined;           /* whether `fc` joins embedding and state; else attention reads the embedding beside it */
    const number *embedding;    /* [tokens, hidden] */
    Matrix fc;                /* hidden outputs of 2 hidden inputs, not in bytes */
    const float *token_norm, *state_norm; /* before `fc`; may be NULL */
    Choice choice;            /* its width is that of the tree */
    int64_t depth, size;      /* of the tree, the root counted in `size` */
    int64_t length;           /* of the text, its root included, */
    int64_t unread;           /* of which so many rows are read here, the root's last: */
    const int64_t *text;      /* [unread] their tokens */
    const number *brought;      /* [unread, hidden] their states */
    const int64_t *slots;     /* [length + width (depth - 1)] of the text and of the rows behind it */
    const float *cosine, *sine;           /* [positions][head_dim / 2] */
    const int64_t *keys;      /* [depth] of the noise behind each depth */
    double least;             /* a level whose nodes have a smaller chance than that, all together, is not read */
    number *states;             /* [1 + width (depth - 1), hidden] the root's first */
    number *joint;              /* scratch: tiles of 2 hidden columns */
    int64_t *paths;           /* scratch: [width (depth - 1)][depth] */
    int64_t *tokens, *parents, *numbers;  /* [1 + width + width² (depth - 1)] of all nodes that grew */
    double *values;           /* the same */
    int64_t *kept_tokens, *kept_parents;  /* [size] */
    double *kept_values;
} Growth;

typedef struct {
    double value;
    int64_t node;
} Ranked;

static int by_value(const void *a, const void *b) {
    const Ranked *x = a, *y = b;
    if (x->value != y->value) return x->value < y->value ? 1 : -1;
    return x->node < y->node ? -1 : 1; /* of equals the one that grew first: a parent before its child */
}

/* The nodes from `first` to `end`, the most valuable first. */
static void rank(const Growth *g, int64_t first, int64_t end, Ranked *ranked) {
    for (int64_t node = first; node < end; node++) ranked[node - first] = (Ranked){g->values[node], node};
    qsort(ranked, (size_t)(end - first), sizeof(Ranked), by_value);
}

/* The value of the last node that would be kept if no more grew. */
static double worst_kept(const Growth *g, int64_t grown, Ranked *ranked) {
    if (grown < g->size) return -INFINITY;
    rank(g, 0, grown, ranked);
    return ranked[g->size - 1].value;
}

/* The children of nodes whose candidates are there; how many nodes there are then. */
static int64_t expand(const Growth *g, const int64_t *frontier, int64_t count, int64_t grown) {
    const Choice *c = &g->choice;
    for (int64_t r = 0; r < count; r++)
        for (int64_t i = r * c->width; i < (r + 1) * c->width; i++) {
            if (c->places[i] < 0 || !(c->shares[i] > -INFINITY)) continue;
            g->tokens[grown] = c->ids[c->places[i]];
            g->parents[grown] = frontier[r];
            g->values[grown] = g->values[frontier[r]] + (c->shares[i] < 0 ? c->shares[i] : 0);
            g->numbers[grown++] = -1;
        }
    return grown;
}

/* A token and the state before it become a row of a pass. */
static void enter(const Model *m, const Pass *p, const Growth *g, int64_t row, int64_t token, const number *state) {
    int64_t hidden = m->hidden;
    const number *embedding = g->embedding + token * hidden;
    if (g->joined) {
        norm_row(embedding, g->token_norm, hidden, m->eps, g->joint, row, 0, 2 * hidden);
        norm_row(state, g->state_norm, hidden, m->eps, g->joint, row, hidden, 2 * hidden);
        memset(p->x + row * hidden, 0, sizeof(number) * hidden);
    } else {
        memcpy(p->x + row * hidden, state, sizeof(number) * hidden);
        memcpy((number *)p->beside + row * hidden, embedding, sizeof(number) * hidden);
    }
}

static void turn(const Model *m, Pass *p, const Growth *g, int64_t row, int64_t position) {
    int64_t half = m->head_dim / 2;
    memcpy((float *)p->cosine + row * half, g->cosine + position * half, sizeof(float) * half);
    memcpy((float *)p->sine + row * half, g->sine + position * half, sizeof(float) * half);
}

/* What may follow the wanted rows, which stand at `depth`; this thread's share of them. */
static void follow(const Model *m, const Pass *p, const Growth *g, int64_t depth, int thread, int threads) {
    int64_t first = share_of(p->wanted, thread, threads), last = share_of(p->wanted, thread + 1, threads);
    for (int64_t row = first; row < last; row++)
        follow_row(&g->choice, p, row, m->vocabulary, (uint64_t)g->keys[depth],
                   g->choice.scratch + thread * 5 * m->vocabulary);
}

/* The rows that were entered, and the candidates behind the wanted ones, which stand at `depth`. */
static void read_rows(const Model *m, const Pass *p, const Growth *g, int64_t depth) {
#pragma omp parallel num_threads((int)p->threads)
    {
        int thread = omp_get_thread_num(), threads = omp_get_num_threads();
        Stream stream = {.m = m, .p = p, .thread = thread, .threads = threads};
        if (g->joined) enter_matrix(&stream, g->fc, m->hidden, 2 * m->hidden, 32);
        open_pass(&stream);
        if (g->joined) {
            Task joint = {g->joint, NULL, p->rows, 2 * m->hidden, ADD, NULL, m->hidden, p->x};
            product(&joint, g->fc, m->hidden, &stream, 0);
#pragma omp barrier
        }
        pass_rows(m, p, &stream);
        close_pass();
#pragma omp barrier
        follow(m, p, g, depth, SHARE);
    }
}

/* The rows of the text, of which each sees those before it; only what follows the root is asked for. */
static void read_text(const Model *m, Pass *p, const Growth *g, const int64_t *rows) {
    int64_t *first_row = (int64_t *)p->first_row, *first_key = (int64_t *)p->first_key, before = g->length - g->unread;
    int32_t *prefix = (int32_t *)p->prefix, *tail_start = (int32_t *)p->tail_start;
    p->rows = g->unread;
    p->wanted = 1;
    p->wanted_rows = rows + g->unread - 1;
    p->row_slots = g->slots + before;
    p->keys = g->slots;
    first_row[0] = first_key[0] = tail_start[0] = 0;
    first_row[1] = g->unread;
    first_key[1] = g->length;
    for (int64_t r = 0; r < g->unread; r++) {
        enter(m, p, g, r, g->text[r], g->brought + r * m->hidden);
        turn(m, p, g, r, before + r);
        prefix[r] = (int32_t)(before + r + 1);
        tail_start[r + 1] = 0;
    }
    read_rows(m, p, g, 0);
    memcpy(g->states, p->x + (g->unread - 1) * m->hidden, sizeof(number) * m->hidden);
    p->wanted_rows = rows;
}

/* The rows of the frontier, which see the text and their ancestors; `read` are the rows below the root before them. */
static void read_level(const Model *m, Pass *p, const Growth *g, const int64_t *frontier, int64_t count, int64_t level,
                       int64_t read) {
    int64_t *first_row = (int64_t *)p->first_row, *first_key = (int64_t *)p->first_key;
    int32_t *prefix = (int32_t *)p->prefix, *tail_start = (int32_t *)p->tail_start, *tail = (int32_t *)p->tail;
    p->rows = p->wanted = count;
    p->row_slots = g->slots + g->length + read;
    first_row[1] = count;
    first_key[1] = g->length + read + count;
    for (int64_t r = 0; r < count; r++) {
        int64_t number = read + r, above = g->numbers[g->parents[frontier[r]]], *path = g->paths + number * g->depth;
        enter(m, p, g, r, g->tokens[frontier[r]], g->states + (1 + above) * m->hidden);
        turn(m, p, g, r, g->length - 1 + level);
        if (above >= 0) memcpy(path, g->paths + above * g->depth, sizeof(int64_t) * (level - 1));
        path[level - 1] = g->length + number;
        g->numbers[frontier[r]] = number;
        for (int64_t i = 0; i < level; i++) tail[tail_start[r] + i] = (int32_t)path[i];
        tail_start[r + 1] = tail_start[r] + (int32_t)level;
        prefix[r] = (int32_t)g->length;
    }
    read_rows(m, p, g, level);
    memcpy(g->states + (1 + read) * m->hidden, p->x, sizeof(number) * count * m->hidden);
}

/* `wanted_rows` are 0, 1, 2, … */
void forerun_grow(const Model *m, Pass *p, const Growth *g) {
    int64_t width = g->choice.width, most = 1 + width + width * width * (g->depth - 1);
    int64_t grown = 1, first = 1, read = 0, count = 1;
    int64_t frontier[MOST_WIDTH];
    Ranked *ranked = malloc(sizeof(Ranked) * (size_t)most);
    g->tokens[0] = g->text[g->unread - 1];
    g->parents[0] = g->numbers[0] = -1;
    g->values[0] = 0;
    frontier[0] = 0;
    read_text(m, p, g, p->wanted_rows);
    for (int64_t level = 1;; level++) {
        grown = expand(g, frontier, count, grown);
        if (level == g->depth || grown == first) break;
        double bar = worst_kept(g, grown, ranked), chance = 0;
        rank(g, first, grown, ranked);
        count = grown - first < width ? grown - first : width;
        while (count && ranked[count - 1].value < bar) count--; /* nor would anything below it be kept */
        for (int64_t r = 0; r < count; r++) {
            frontier[r] = ranked[r].node;
            chance += exp(ranked[r].value);
        }
        if (!count || chance < g->least) break;
        first = grown;
        read_level(m, p, g, frontier, count, level, read);
        read += count;
    }
    rank(g, 0, grown, ranked);
    for (int64_t i = 0; i < g->size; i++) g->kept_tokens[i] = -1;
    int64_t kept = grown < g->size ? grown : g->size;
    for (int64_t i = 0; i < kept; i++) {
        int64_t node = ranked[i].node;
        g->kept_tokens[i] = g->tokens[node];
        g->kept_values[i] = g->values[node];
        g->kept_parents[i] = node ? g->numbers[g->parents[node]] : -1; /* now: where the parent was kept */
        g->numbers[node] = i;
    }
    free(ranked);
}
