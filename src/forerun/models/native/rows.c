/* A few rows times a matrix in float32, as fast as the matrix can be read or as the processor multiplies.
 *
 * A number is the sum of one vector of partial sums, of which lane i adds up the inputs i, i + LANES, i + 2 LANES, … in
 * this order. So a row gives the same bits whatever rows are beside it, and wherever
 * blocks and threads are cut.
 */
#include "vectors.h"

/* The partial sums of a block of rows and outputs stay in registers, beside its weights and a vector of a row: there
 * are 32 of them, or 16. */
#define ROWS 4
#if defined(__AVX512F__) || defined(__aarch64__)
#define OUTPUTS 4
#else
#define OUTPUTS 3
#endif

#define LINE 16     /* floats that come from memory together */
#define AHEAD 256   /* floats between what a single row reads and what it asks for */
#define SMALL 32768 /* products that one thread has made before others are awake */

typedef struct {
    const float *x, *weight, *bias, *plus; /* [rows, in], [out, in], [out] or NULL, [rows, out] or NULL */
    float *y;                              /* [rows, out] */
    int64_t in, out;
} Task;

/* `count` < LANES numbers, and zeros. */
static inline Vector some(const float *from, int64_t count) {
    Vector found = {0};
    for (int64_t i = 0; i < count; i++) found[i] = from[i];
    return found;
}

/* The totals of four quads, each (0 + 2) + (1 + 3). */
static inline Quad totals(Quad a, Quad b, Quad c, Quad d) {
    Quad ab = PICK(a, b, 0, 1, 4, 5) + PICK(a, b, 2, 3, 6, 7), cd = PICK(c, d, 0, 1, 4, 5) + PICK(c, d, 2, 3, 6, 7);
    return PICK(ab, cd, 0, 2, 4, 6) + PICK(ab, cd, 1, 3, 5, 7);
}

/* Write `count` numbers of a row, from `output` on. */
static inline void finish(const Task *t, int64_t row, int64_t output, int64_t count, Quad sums) {
    int64_t place = row * t->out + output;
    if (count == 4) {
        if (t->bias) sums += *(const LooseQuad *)(t->bias + output);
        if (t->plus) sums += *(const LooseQuad *)(t->plus + place);
        *(LooseQuad *)(t->y + place) = sums;
        return;
    }
    for (int64_t i = 0; i < count; i++) {
        float sum = sums[i];
        if (t->bias) sum += t->bias[output + i];
        if (t->plus) sum += t->plus[place + i];
        t->y[place + i] = sum;
    }
}

/* A vector of the inputs from k on. */
#define WHOLE(from) *(const Loose *)(from)
#define REST(from) some(from, in - k)

/* One row and one output: the matrix is read from its first number to its last, which is when memory is fastest. */
static void single(const Task *t, int64_t row, int64_t output, const float *ahead, int64_t step) {
    int64_t in = t->in, k = 0;
    const float *x = t->x + row * in, *w = t->weight + output * in;
    Vector sums = {0};
    (void)ahead, (void)step;
    for (; k + LINE <= in; k += LINE) {
        __builtin_prefetch(w + k + AHEAD);
#pragma GCC unroll 4
        for (int i = 0; i < LINE; i += LANES) sums = fused(WHOLE(x + k + i), WHOLE(w + k + i), sums);
    }
    for (; k + LANES <= in; k += LANES) sums = fused(WHOLE(x + k), WHOLE(w + k), sums);
    if (k < in) sums = fused(REST(x + k), REST(w + k), sums);
    Quad own = fold(sums);
    finish(t, row, output, 1, totals(own, own, own, own));
}

/* What a block adds for the vector of inputs k, as READ reads it. */
#define ADD(READ)                                                                                  \
    _Pragma("GCC unroll 4") for (int o = 0; o < outputs; o++) weights[o] = READ(w[o] + k);         \
    _Pragma("GCC unroll 4") for (int r = 0; r < rows; r++) {                                       \
        Vector own = READ(x + r * in + k);                                                         \
        _Pragma("GCC unroll 4") for (int o = 0; o < outputs; o++)                                  \
            sums[r][o] = fused(own, weights[o], sums[r][o]);                                       \
    }
/* A block whose size is constant where this is called. With every vector of inputs it asks for the memory at `ahead`,
 * which goes on in the order in which the matrix lies there: asked for row beside row, it comes more slowly. */
static inline __attribute__((always_inline)) void block(const Task *t, const int rows, const int outputs, int64_t row,
                                                        int64_t output, const float *ahead, int64_t step) {
    int64_t in = t->in, k = 0;
    const float *x = t->x + row * in, *w[OUTPUTS];
    Vector sums[ROWS][OUTPUTS], weights[OUTPUTS];
#pragma GCC unroll 4
    for (int o = 0; o < outputs; o++) w[o] = t->weight + (output + o < t->out ? output + o : t->out - 1) * in;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) sums[r][o] = (Vector){0};
    for (; k + LANES <= in; k += LANES, ahead += step) {
#pragma GCC unroll 4
        for (int i = 0; i < outputs * LANES; i += LINE) {
            if (outputs == 2) __builtin_prefetch(ahead + i); /* soon needed: into the first cache */
            else __builtin_prefetch(ahead + i, 0, 2);
        }
        ADD(WHOLE)
    }
    if (k < in) {
        ADD(REST)
    }
    int64_t count = t->out - output < outputs ? t->out - output : outputs;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++) {
        Quad own[4] = {{0}};
#pragma GCC unroll 4
        for (int o = 0; o < outputs; o++) own[o] = fold(sums[r][o]);
        finish(t, row + r, output, count, totals(own[0], own[1], own[2], own[3]));
    }
}

typedef void Block(const Task *, int64_t row, int64_t output, const float *ahead, int64_t step);
#define BLOCK(name, rows, outputs)                                                                   \
    static void name(const Task *t, int64_t row, int64_t output, const float *ahead, int64_t step) { \
        block(t, rows, outputs, row, output, ahead, step);                                           \
    }
BLOCK(pair, 2, 2)
BLOCK(two, 2, OUTPUTS)
BLOCK(three, 3, OUTPUTS)
BLOCK(four, 4, OUTPUTS)

/* y = x weightᵀ + bias + plus. */
void forerun_rows(const float *x, const float *weight, const float *bias, const float *plus, float *y, int64_t rows,
                  int64_t in, int64_t out, int64_t threads) {
    Task task = {x, weight, bias, plus, y, in, out};
    Block *const of[] = {0, single, rows == 2 ? pair : two, three, four};
    int64_t outputs = rows <= 2 ? rows : OUTPUTS, parts = (rows + ROWS - 1) / ROWS;
    int64_t step = (outputs * LANES + parts - 1) / parts; /* all parts together ask for the next block */
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * in * out > SMALL)
    for (int64_t output = 0; output < out; output += outputs)
        for (int64_t part = 0; part < parts; part++) {
            int64_t row = rows * part / parts, end = rows * (part + 1) / parts;
            const float *next = weight + (output + outputs) * in + part * step * (in / LANES);
            of[end - row](&task, row, output, next, step);
        }
}
