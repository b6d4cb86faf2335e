/* One pass of a Llama-like transformer on any CPU, in float32 or with weights in bytes, all layers in one call.
 *
 * Every sum runs in an order that depends on the row's own text alone. Neither the rows beside it, nor the shape of a tree,
 * nor the number of threads changes a single bit of what a row gives, as long as all of them are numbers.
 */
#include <math.h>
#include <omp.h>
#include <string.h>

typedef float number;
#define GATE_PART 64
#define MOST_KEYS 0
#define DISTANCE (16 << 10)
#include "model.h"

#include "float_attention.h"
#include "float_products.h"

/* A row of a matrix `width` wide gets the norm of x, or without a weight x itself, from column `place` on. */
static void norm_row(const float *x, const float *weight, int64_t size, double eps, float *out, int64_t row, int64_t place,
                     int64_t width) {
    float *to = out + row * width + place;
    if (!weight) {
        memcpy(to, x, sizeof(float) * (size_t)size);
        return;
    }
    Vector sum = {0};
    for (int64_t i = 0; i < size; i += LANES) sum = fused(*(const Loose *)(x + i), *(const Loose *)(x + i), sum);
    float factor = (float)(1.0 / sqrt(total(sum) / (double)size + eps));
    for (int64_t i = 0; i < size; i++) to[i] = x[i] * factor * weight[i];
}

static void turn_head(float *head, const float *weight, int64_t size, double eps, const float *cosine, const float *sine,
                      float *out) {
    int64_t half = size / 2;
    if (weight) norm_row(head, weight, size, eps, head, 0, 0, size);
    if (!cosine) memcpy(out, head, sizeof(float) * (size_t)size);
    for (int64_t i = 0; cosine && i < half; i++) {
        float a = head[i], b = head[half + i];
        out[i] = a * cosine[i] - b * sine[i];
        out[half + i] = b * cosine[i] + a * sine[i];
    }
}

static void keep_row(const float *row, int64_t size, float *out) { memcpy(out, row, sizeof(float) * (size_t)size); }

static int rows_get_ready(const Model *m, const Pass *p) {
    (void)m;
    return p->rounded != NULL;
}

static void ready_row(const Model *m, const Pass *p, float *rows, int64_t row, int64_t width) {
    if (rows_get_ready(m, p)) round_row(rows + row * width, row, width, p->rounded, p->rounded_scales);
}

/* Keys are read as they are. */
static void pack_all(const Model *m, const Pass *p, const float *cache, int thread, int threads) {
    (void)m, (void)p, (void)cache, (void)thread, (void)threads;
}

static void open_pass(Stream *s) { begin(s); }
static void close_pass(void) {}

static inline Vector widened(const float *row) { return *(const Loose *)row; }

#include "pass.h"

#include "growth.h"

int64_t forerun_rounds(void) { return ROUNDS; }
