/* Rows times matrices, with weights in float32, folded or not.
 *
 * Matrices lie in panels of 32 outputs, [out / 32][in][32]; of gate and up, panels take turns. A number is the sum of
 * sums over 128 inputs each, from the first on, of which each adds up its products from left to right: so rows have the
 * same bits whatever rows are beside them, and wherever panels are shared among threads.
 */
#pragma once
#include <math.h>

#include "folded.h"
#include "rounded.h"
#include "stream.h"
#include "vectors.h"

#define PANEL 32
#define VECTORS (PANEL / LANES)
#define INPUTS 128       /* that are added up before their sum is added to the others' */
#define ROWS_AT_ONCE 48  /* go by a panel's inputs while these are near */
#if LANES == 16
#define MOST_ROWS 12 /* whose sums stay in registers */
#elif LANES == 8
#define MOST_ROWS 3
#else
#define MOST_ROWS 2
#endif
#define FEW (MOST_ROWS < 3 ? MOST_ROWS : 3) /* rows, for which a folded panel is not unfolded first */

typedef struct {
    float sums[ROWS_AT_ONCE][PANEL] __attribute__((aligned(64)));
} Sums;

/* Some rows, and a part of a panel's inputs. */
typedef struct {
    const float *x; /* of the first row */
    int64_t stride, rows, inputs;
    const char *ahead; /* what is fetched meanwhile, */
    int64_t step;      /* so many bytes with each input */
} Piece;

static inline Vector weights_of(const void *panel, int64_t place) { return *(const Loose *)((const float *)panel + place); }

/* Adds up a piece of which `rows` are constant where this is called; where it has fewer rows the last one is computed
 * again. */
static inline __attribute__((always_inline)) void add_up(const Piece *piece, const void *panel, float (*sums)[PANEL],
                                                         const int rows) {
    const float *x[MOST_ROWS];
    Vector own[MOST_ROWS][VECTORS];
    const char *ahead = piece->ahead;
    const int64_t step = piece->step;
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        x[r] = piece->x + (r < piece->rows ? r : piece->rows - 1) * piece->stride;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) own[r][v] = all(0);
    }
    for (int64_t k = 0; k < piece->inputs; k++) {
        __builtin_prefetch(ahead, 0, 2);
        __builtin_prefetch(ahead + step / 2, 0, 2);
        ahead += step;
#if LANES == 16 /* few vectors of weights and many rows, */
        Vector weights[VECTORS];
#pragma GCC unroll 2
        for (int v = 0; v < VECTORS; v++) weights[v] = weights_of(panel, k * PANEL + v * LANES);
#pragma GCC unroll 12
        for (int r = 0; r < rows; r++) {
            Vector number = all(x[r][k]);
#pragma GCC unroll 2
            for (int v = 0; v < VECTORS; v++) own[r][v] = fused(number, weights[v], own[r][v]);
        }
#else /* or many of weights and few rows */
        Vector numbers[MOST_ROWS];
#pragma GCC unroll 3
        for (int r = 0; r < rows; r++) numbers[r] = all(x[r][k]);
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) {
            Vector weights = weights_of(panel, k * PANEL + v * LANES);
            READ_ONCE(weights);
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) own[r][v] = fused(numbers[r], weights, own[r][v]);
        }
#endif
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; r++) {
        if (r >= piece->rows) break;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *(Vector *)(sums[r] + v * LANES) += own[r][v];
    }
}

typedef void AddUp(const Piece *, const void *panel, float (*sums)[PANEL]);
#define FIXED(rows)                                                                          \
    static void floats_##rows(const Piece *piece, const void *panel, float (*sums)[PANEL]) { \
        add_up(piece, panel, sums, rows);                                                    \
    }
FIXED(1)
FIXED(2)
#if MOST_ROWS > 2
FIXED(3)
#endif
#if MOST_ROWS > 3
FIXED(4)
FIXED(5)
FIXED(6)
FIXED(8)
FIXED(10)
FIXED(12)
#endif
#if MOST_ROWS == 12
#define BY_ROWS(kind) \
    {0, kind##_1, kind##_2, kind##_3, kind##_4, kind##_5, kind##_6, kind##_8, kind##_8, kind##_10, kind##_10, kind##_12, kind##_12}
#elif MOST_ROWS == 3
#define BY_ROWS(kind) {0, kind##_1, kind##_2, kind##_3}
#else
#define BY_ROWS(kind) {0, kind##_1, kind##_2}
#endif
static AddUp *const in_floats[] = BY_ROWS(floats);

/* The same for a folded panel, whose numbers are used as they are unfolded. */
static inline __attribute__((always_inline)) void add_up_folded(const Piece *piece, const char *group, float (*sums)[PANEL],
                                                                const int rows, const int form) {
    const float *x[FEW];
    Vector own[FEW][VECTORS];
    const char *ahead = piece->ahead;
    const int64_t bytes = folded_bytes(form, NUMBERS), step = piece->step * inputs_in(form);
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) {
        x[r] = piece->x + r * piece->stride;
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) own[r][v] = all(0);
    }
    for (int64_t start = 0; start < piece->inputs; start += SIDE, group += bytes) {
        Steps steps[VECTORS];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) steps[v] = steps_at(form, group, v * LANES);
        for (int64_t k = 0; k < SIDE; k += inputs_in(form)) {
            for (int64_t line = 0; line < step; line += LINE) __builtin_prefetch(ahead + line, 0, 2);
            ahead += step;
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS; v++) {
                Whole words = words_of(form, group, k, v * LANES);
#pragma GCC unroll 8
                for (int i = 0; i < inputs_in(form); i++) {
                    Vector weights = number_in(form, words, i, steps[v]);
#pragma GCC unroll 3
                    for (int r = 0; r < rows; r++) own[r][v] = fused(all(x[r][start + k + i]), weights, own[r][v]);
                }
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS; v++) *(Vector *)(sums[r] + v * LANES) += own[r][v];
}

#define FOLDED(kind, form)                                                                                         \
    static void kind##_1(const Piece *p, const void *panel, float (*sums)[PANEL]) { add_up_folded(p, panel, sums, 1, form); } \
    static void kind##_2(const Piece *p, const void *panel, float (*sums)[PANEL]) { add_up_folded(p, panel, sums, 2, form); }
FOLDED(halves, HALVES)
FOLDED(nibbles, NIBBLES)
FOLDED(eighths, EIGHTHS)
#if MOST_ROWS > 2
#define THIRD(kind, form) \
    static void kind##_3(const Piece *p, const void *panel, float (*sums)[PANEL]) { add_up_folded(p, panel, sums, 3, form); }
THIRD(halves, HALVES)
THIRD(nibbles, NIBBLES)
THIRD(eighths, EIGHTHS)
#define BY_FEW(kind) (AddUp *const[]){0, kind##_1, kind##_2, kind##_3}
#else
#define BY_FEW(kind) (AddUp *const[]){0, kind##_1, kind##_2}
#endif
static AddUp *const *const in_form[] = {in_floats, BY_FEW(halves), BY_FEW(nibbles), BY_FEW(eighths)};

/* Of what the thread will read later as much as this part of `bytes`, each with one of so many `parts` of the arithmetic. */
static inline int64_t ahead_of(Stream *s, int64_t bytes, int64_t block, int64_t blocks, int64_t parts, const char **ahead) {
    int64_t own = bytes * (block + 1) / blocks - bytes * block / blocks;
    const char *found = claim(s, own);
    if (!found) return 0;
    *ahead = found;
    return (own + parts - 1) / parts;
}

/* `multiply` for rows that were rounded. */
static void multiply_rounded(const Task *t, Matrix matrix, const char *weights, int64_t row, int64_t rows, Sums *out, Stream *s) {
    AddUpRounded *const *add = matrix.form == NIBBLES ? nibbles_rounded : eighths_rounded;
    int64_t blocks = (rows + TOGETHER - 1) / TOGETHER, most = blocks > 1 ? 4 * INPUTS : t->in; /* the first cache holds */
    for (int64_t input = 0; input < t->in; input += most) {
        int64_t inputs = t->in - input < most ? t->in - input : most;
        for (int64_t block = 0; block < blocks; block++) {
            int64_t first = TOGETHER * block, count = rows - first < TOGETHER ? rows - first : TOGETHER;
            int64_t place = (row + first) * t->in + TOGETHER * input;
            const int16_t *x = s->p->rounded + place;
            RoundedPiece piece = {x, s->p->rounded_scales + place / SIDE * 2, inputs, (const char *)x, 0};
            if (row == 0)
                piece.step = ahead_of(s, bytes_of(matrix, PANEL * inputs), block, blocks, inputs / SIDE, &piece.ahead);
            add[count](&piece, weights + bytes_of(matrix, input * PANEL), out->sums + first);
        }
    }
}

/* What a panel makes of some rows. Of what the thread will read later as much is fetched as is read here the first time,
 * by all blocks in turn: memory should not wait while they compute. */
static void multiply(const Task *t, Matrix matrix, int64_t panel, int64_t row, int64_t rows, Sums *out, Stream *s) {
    const char *weights = (const char *)matrix.weights + bytes_of(matrix, panel * PANEL * t->in);
    float unfolded[INPUTS * PANEL] __attribute__((aligned(64)));
    int64_t blocks = (rows + MOST_ROWS - 1) / MOST_ROWS;
    if (blocks == 1 && rows > 4) blocks = 2; /* one computes while what the other has fetched is near */
    memset(out, 0, sizeof(float) * PANEL * (size_t)rows);
    if (s->p->rounded && rounds_with(matrix.form)) return multiply_rounded(t, matrix, weights, row, rows, out, s);
    for (int64_t input = 0; input < t->in; input += INPUTS) {
        int64_t inputs = t->in - input < INPUTS ? t->in - input : INPUTS;
        const char *here = weights + bytes_of(matrix, input * PANEL);
        AddUp *const *add = rows > FEW ? in_floats : in_form[matrix.form];
        if (matrix.form && rows > FEW) {
            unfold(matrix.form, here, inputs, unfolded);
            here = (const char *)unfolded;
        }
        for (int64_t block = 0; block < blocks; block++) {
            int64_t first = rows * block / blocks, count = rows * (block + 1) / blocks - first;
            const float *x = t->x + (row + first) * t->in + input;
            Piece piece = {x, t->in, count, inputs, (const char *)x, 0};
            if (row == 0) piece.step = ahead_of(s, bytes_of(matrix, PANEL * inputs), block, blocks, inputs, &piece.ahead);
            add[count](&piece, here, out->sums + first);
        }
    }
}

/* The first of 32 logits from `token` on that is larger than all before them. NaN stays. */
static inline void remember(const float *logits, int64_t token, float *peak, float *highest, int64_t *likeliest) {
    float best = -INFINITY;
    int64_t numbers = 0;
    for (int64_t i = 0; i < PANEL; i++) {
        numbers += logits[i] == logits[i];
        best = logits[i] > best ? logits[i] : best;
    }
    *peak = best;
    if (numbers < PANEL) *highest = NAN;
    if (!(best > *highest)) return;
    int64_t i = 0;
    while (logits[i] != best) i++;
    *highest = best;
    *likeliest = token + i;
}

/* What becomes of 32 sums of one row; of twice as many where one half is the gate of the other. */
static inline void use(const Task *t, const float *sums, const float *up, int64_t row, int64_t panel, int thread) {
    float *place = (float *)t->out + row * t->width + PANEL * panel;
    const float *bias = t->bias ? t->bias + PANEL * panel : NULL;
    if (t->how == GATE) {
        for (int64_t i = 0; i < PANEL; i += LANES) {
            Vector gate = *(const Vector *)(sums + i), one = all(1);
            *(Loose *)(place + i) = gate / (one + exponential(-gate)) * *(const Vector *)(up + i);
        }
    } else if (t->how == ADD) {
        for (int64_t i = 0; i < PANEL; i++) place[i] += bias ? sums[i] + bias[i] : sums[i];
    } else if (t->how == KEEP) {
        for (int64_t i = 0; i < PANEL; i++) place[i] = bias ? sums[i] + bias[i] : sums[i];
    } else {
        const Pass *pass = t->out;
        int64_t mine = thread * pass->wanted + row, token = PANEL * panel;
        memcpy(pass->logits + row * t->width + token, sums, sizeof(float) * PANEL);
        remember(sums, token, pass->peaks + (row * t->width + token) / PANEL, pass->highest + mine, pass->likeliest + mine);
    }
}

/* Rows times a matrix; this thread's share of its outputs. */
static void product(const Task *t, Matrix matrix, int64_t outputs, Stream *s, int64_t more) {
    int64_t each = t->how == GATE ? 2 : 1, panels = outputs / (PANEL * each);
    int64_t last = share_of(panels, s->thread + 1, s->threads);
    Sums sums, up;
    (void)more;
    for (int64_t panel = share_of(panels, s->thread, s->threads); panel < last; panel++)
        for (int64_t row = 0; row < t->rows; row += ROWS_AT_ONCE) {
            int64_t rows = t->rows - row < ROWS_AT_ONCE ? t->rows - row : ROWS_AT_ONCE;
            multiply(t, matrix, each * panel, row, rows, &sums, s);
            if (each == 2) multiply(t, matrix, each * panel + 1, row, rows, &up, s);
            for (int64_t r = 0; r < rows; r++) use(t, sums.sums[r], up.sums[r], row + r, panel, s->thread);
        }
}
