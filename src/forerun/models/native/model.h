/* What a pass is given. The file that includes this says which kind of `number` a row is made of. `in_c.py` has the same
 * structures. */
#pragma once
#include <stdint.h>

/* How a matrix of float32 is kept: see `folded.h`. */
enum { UNFOLDED, HALVES, NIBBLES, EIGHTHS };

#define SIDE 32 /* of a group of numbers that are kept together, so many outputs and inputs */
#define NUMBERS (SIDE * SIDE)

static inline int64_t folded_bytes(int64_t form, int64_t numbers) {
    static const int64_t group[] = {4 * NUMBERS, 2 * NUMBERS, 8 * SIDE + NUMBERS / 2, 4 * SIDE + NUMBERS};
    return numbers / NUMBERS * group[form];
}

typedef struct {
    const void *weights;
    const float *scales; /* of its outputs where it is in bytes, else NULL; all of a model's are of one kind */
    int64_t form;        /* of one in float32 */
} Matrix;

typedef struct {
    Matrix qkv, out, gate_up, down;
    const float *input_norm, *inner_norm, *q_norm, *k_norm; /* all but the inner one may be NULL */
    const float *beside_norm;                               /* where attention reads `beside` too, else NULL */
    const float *qkv_bias, *out_bias;                       /* may be NULL */
    int64_t rope;                                           /* which table, -1 for none */
} Layer;

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, inner, vocabulary;
    const Layer *layer;
    const float *norm; /* may be NULL */
    Matrix head;
    double eps, scale;
} Model;

typedef struct {
    int64_t rows, segments, wanted, slots, threads;
    number *x;                         /* [rows, hidden] embeddings; hidden states at the end */
    const number *beside;              /* [rows, hidden] what attention reads beside them, or NULL */
    const float *cosine, *sine;      /* [tables][rows][head_dim / 2] */
    number *cache;                     /* [layers][slots][2][kv_heads][head_dim] */
    const int64_t *row_slots;        /* [rows] where keys and values go */
    const int64_t *first_row;        /* [segments + 1] */
    const int64_t *first_key;        /* [segments + 1] in `keys` */
    const int64_t *keys;             /* slots of a segment's keys, its own rows last */
    const int32_t *prefix;           /* [rows] so many keys of the segment are seen, from the first on, */
    const int32_t *tail_start;       /* [rows + 1] and then these, in the order of their positions: */
    const int32_t *tail;             /* places among the segment's keys */
    const int64_t *wanted_rows;      /* [wanted] */
    const uint8_t *active;           /* [layers] 0 skips a layer */
    number *const *features;           /* [layers + 1] where to copy the hidden states before a layer, or NULL */
    number *logits;                    /* [wanted, vocabulary] */
    float *peaks;                    /* [wanted, vocabulary / 32] the largest logit of each 32 tokens */
    float *highest;                  /* [threads][wanted] the largest logit of a thread's share, NaN if one is, */
    int64_t *likeliest;              /* [threads][wanted] and the first token that has it; behind a whole pass the first
                                        row has those of all, -1 where there is none */
    number *normed, *queries, *mixed, *act; /* scratch, rows rounded up to 32 */
    float *qkv;                      /* [rows, (heads + 2 kv_heads) head_dim] */
    float *scores;                   /* [threads][score_size] */
    int64_t score_size;
    float *row_scales;               /* [rows] where weights are in bytes */
    number *packed;                    /* scratch: values of all keys, or NULL */
    int16_t *rounded;                /* scratch: rows as `rounded.h` has them, or NULL for rows as they are */
    float *rounded_scales;
} Pass;

/* What becomes of a product. */
typedef enum { KEEP, ADD, GATE, LOGITS } Use;

/* The rows of one product, and what becomes of it. */
typedef struct {
    const number *x;         /* [rows, in] */
    const float *row_scales; /* where the matrix is in bytes */
    int64_t rows, in;
    Use how;
    const float *bias; /* may be NULL */
    int64_t width;     /* of what it becomes */
    void *out;
} Task;
