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

#include "tiles.h" /* first: it says what a number is */

#include "attention.h"
#include "products.h"

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

static void keep_row(const float *row, int64_t size, bf16 *out) {
    for (int64_t i = 0; i < size; i += 16) store(out + i, _mm512_loadu_ps(row + i));
}

/* Rows in tiles as the model's weights want them. */
static int rows_get_ready(const Model *m, const Pass *p) {
    (void)p;
    return m->head.scales != NULL;
}

static void ready_row(const Model *m, const Pass *p, bf16 *tiles, int64_t row, int64_t width) {
    if (m->head.scales) p->row_scales[row] = as_bytes(tiles, row, width);
}

static void open_pass(Stream *s) {
    (void)s;
    load_tiles(16);
}
static void close_pass(void) { _tile_release(); }

#include "pass.h"

/* Rows that come in parts, [rows, inputs] each, times a matrix in bfloat16 that reads them side by side; added to what
 * is in `out`. `tiles` is scratch, with rows rounded up to 32. */
void forerun_join(const bf16 *const *parts, int64_t count, int64_t rows, int64_t inputs, const bf16 *matrix,
                  int64_t outputs, bf16 *tiles, bf16 *out, int64_t all_threads) {
    int64_t width = count * inputs;
    Matrix plain = {matrix, NULL, UNFOLDED};
#pragma omp parallel num_threads((int)all_threads)
    {
        Stream stream = {.thread = omp_get_thread_num(), .threads = omp_get_num_threads()};
        enter_matrix(&stream, plain, outputs, width, 32);
        load_tiles(16);
        for (int64_t row = stream.thread; row < rows; row += stream.threads)
            for (int64_t part = 0; part < count; part++)
                norm_row(parts[part] + row * inputs, NULL, inputs, 0, tiles, row, part * inputs, width);
#pragma omp barrier
        Task joint = {tiles, NULL, rows, width, ADD, NULL, outputs, out};
        product(&joint, plain, outputs, &stream, 0);
        _tile_release();
    }
}

#include "growth.h"

/* Linux lends a process the tile registers when asked; 0 if it does. */
int forerun_ask_for_tiles(void) { return (int)syscall(SYS_arch_prctl, 0x1023, 18); }
