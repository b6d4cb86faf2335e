/* Matrices of float32 in fewer bytes, where their numbers allow it: many were made from fewer. Unfolded they are the same
 * numbers, and only zeros lose their sign, so nothing that is computed with them changes.
 *
 * They lie in groups of 32 outputs and 32 inputs, panels of 32 outputs one after the other:
 *
 *   HALVES   bfloat16                               [32 inputs][32 outputs] of 16 bits
 *   NIBBLES  least + scale q, q from 0 to 15        scales [32], least numbers [32], [16][32] of q of inputs k and k + 16
 *   EIGHTHS  scale q, q from -127 to 127            scales [32], [32][32]
 *
 * with a scale, and a least number, for each output of a group.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "model.h"
#include "vectors.h"

typedef uint8_t Octets __attribute__((vector_size(LANES)));
typedef int8_t Signed __attribute__((vector_size(LANES)));
typedef uint16_t Sixteens __attribute__((vector_size(2 * LANES)));

#define READ(type, place) ({ type found; memcpy(&found, place, sizeof(type)); found; })
#define WIDENED(numbers) __builtin_convertvector(numbers, Whole)
#define AS_FLOATS(whole) __builtin_convertvector(whole, Vector)

/* One group, to [32 inputs][32 outputs]. */
static inline void unfold_group(int64_t form, const char *group, float *out) {
    const float *scales = (const float *)group, *least = scales + SIDE;
    for (int64_t o = 0; o < SIDE; o += LANES) {
        if (form == HALVES) {
            for (int64_t k = 0; k < SIDE; k++)
                *(Vector *)(out + SIDE * k + o) = (Vector)(WIDENED(READ(Sixteens, group + 2 * (SIDE * k + o))) << 16);
            continue;
        }
        Vector scale = *(const Loose *)(scales + o);
        if (form == EIGHTHS) {
            for (int64_t k = 0; k < SIDE; k++)
                *(Vector *)(out + SIDE * k + o) = scale * AS_FLOATS(WIDENED(READ(Signed, group + 4 * SIDE + SIDE * k + o)));
            continue;
        }
        Vector start = *(const Loose *)(least + o);
        for (int64_t k = 0; k < SIDE / 2; k++) {
            Whole both = WIDENED(READ(Octets, group + 8 * SIDE + SIDE * k + o));
            *(Vector *)(out + SIDE * k + o) = fused(scale, AS_FLOATS(both & 15), start);
            *(Vector *)(out + SIDE * (k + SIDE / 2) + o) = fused(scale, AS_FLOATS(both >> 4), start);
        }
    }
}

/* Some inputs of a panel, to [inputs][32]; as many bytes are fetched from `ahead` on, if that is not NULL. */
static void unfold(int64_t form, const char *panel, int64_t inputs, float *out, const char *ahead) {
    int64_t bytes = folded_bytes(form, NUMBERS);
    for (int64_t k = 0; k < inputs; k += SIDE, panel += bytes, out += NUMBERS) {
        for (int64_t line = 0; ahead && line < bytes; line += 64) __builtin_prefetch(ahead + line, 0, 2);
        if (ahead) ahead += bytes;
        if (form == HALVES) unfold_group(HALVES, panel, out);
        else if (form == NIBBLES) unfold_group(NIBBLES, panel, out);
        else unfold_group(EIGHTHS, panel, out);
    }
}

/* The nearest number that has 11 bits, as float16 has. */
static inline float in_eleven_bits(float x) {
    float size = fabsf(x);
    if (size < 6.103515625e-05f) return rintf(x * 16777216.0f) / 16777216.0f; /* its small ones are multiples of 2^-24 */
    uint32_t bits;
    memcpy(&bits, &x, 4);
    bits += 0xfff + (bits >> 13 & 1);
    bits &= ~(uint32_t)0x1fff;
    memcpy(&x, &bits, 4);
    return x;
}

/* The q of 32 numbers, from `low` to `high`; 0 if one of them is something else than start + scale q, of which only the
 * sum is rounded: however a processor computes it. */
static inline int steps_of(const float *x, float scale, float start, int low, int high, int8_t *q) {
    for (int k = 0; k < SIDE; k++) {
        float step = scale != 0 ? rintf((x[k] - start) / scale) : 0;
        if (!(step >= low && step <= high) || (double)step * scale != step * scale) return 0;
        if (step * scale + start != x[k]) return 0;
        q[k] = (int8_t)step;
    }
    return 1;
}

/* One output of a group, from its 32 numbers; 0 where they do not allow it. */
static inline int fold_output(int64_t form, const float *x, char *group, int64_t output) {
    int8_t q[SIDE];
    if (form == HALVES) {
        for (int k = 0; k < SIDE; k++) {
            uint32_t bits;
            memcpy(&bits, x + k, 4);
            if (bits & 0xffff) return 0;
            ((uint16_t *)group)[SIDE * k + output] = (uint16_t)(bits >> 16);
        }
        return 1;
    }
    float low = x[0], high = x[0];
    for (int k = 1; k < SIDE; k++) low = x[k] < low ? x[k] : low, high = x[k] > high ? x[k] : high;
    float farthest = -low > high ? low : high, *scale = (float *)group + output, *least = scale + SIDE;
    if (form == EIGHTHS) {
        *scale = farthest / 127;
        if (!steps_of(x, *scale, 0, -127, 127, q)) return 0;
        for (int k = 0; k < SIDE; k++) ((int8_t *)group)[4 * SIDE + SIDE * k + output] = q[k];
        return 1;
    }
    *least = low; /* as Q4_1 has them */
    *scale = in_eleven_bits((high - low) / 15);
    if (!steps_of(x, *scale, *least, 0, 15, q)) {
        *least = farthest; /* as Q4_0 has them */
        *scale = -farthest / 8;
        if (!steps_of(x, *scale, *least, 0, 15, q)) return 0;
    }
    for (int k = 0; k < SIDE / 2; k++)
        ((uint8_t *)group)[8 * SIDE + SIDE * k + output] = (uint8_t)(q[k] | q[k + SIDE / 2] << 4);
    return 1;
}

/* A matrix [outputs, inputs], multiples of 32, in such a form; 0 where its numbers do not allow it. */
static int fold_as(int64_t form, const float *matrix, int64_t outputs, int64_t inputs, char *place, int threads) {
    int64_t panels = outputs / SIDE, each = folded_bytes(form, SIDE * inputs), bytes = folded_bytes(form, NUMBERS);
    int fits = 1;
#pragma omp parallel for num_threads(threads)
    for (int64_t panel = 0; panel < panels; panel++)
        for (int64_t o = 0; o < SIDE; o++)
            for (int64_t k = 0; k < inputs; k += SIDE) {
                int going;
#pragma omp atomic read
                going = fits;
                if (!going) break;
                const float *x = matrix + (SIDE * panel + o) * inputs + k;
                if (fold_output(form, x, place + panel * each + k / SIDE * bytes, o)) continue;
#pragma omp atomic write
                fits = 0;
            }
    return fits;
}

/* In as few bytes as its numbers allow; the form. */
int64_t forerun_fold(const float *matrix, char *place, int64_t outputs, int64_t inputs, int64_t threads) {
    static const int64_t forms[] = {NIBBLES, EIGHTHS, HALVES};
    for (int i = 0; i < 3; i++)
        if (fold_as(forms[i], matrix, outputs, inputs, place, (int)threads)) return forms[i];
#pragma omp parallel for num_threads((int)threads)
    for (int64_t panel = 0; panel < outputs / SIDE; panel++)
        for (int64_t k = 0; k < inputs; k++)
            for (int64_t o = 0; o < SIDE; o++)
                ((float *)place)[(panel * inputs + k) * SIDE + o] = matrix[(SIDE * panel + o) * inputs + k];
    return UNFOLDED;
}

/* The way back. */
void forerun_unfold(int64_t form, int64_t outputs, int64_t inputs, const char *place, float *matrix) {
    float group[NUMBERS] __attribute__((aligned(64)));
    for (int64_t panel = 0; panel < outputs / SIDE; panel++)
        for (int64_t k = 0; k < inputs; k += SIDE) {
            const char *from = place + folded_bytes(form, (panel * inputs + k) * SIDE);
            if (form == UNFOLDED) memcpy(group, from, sizeof group);
            else unfold(form, from, SIDE, group, NULL);
            for (int64_t i = 0; i < NUMBERS; i++)
                matrix[(SIDE * panel + i % SIDE) * inputs + k + i / SIDE] = group[i];
        }
}
