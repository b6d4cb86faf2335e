/* Matrices of float32 in fewer bytes, where their numbers allow it: many were made from fewer. Unfolded they are the same
 * numbers, and only zeros lose their sign, so nothing that is computed with them changes.
 *
 * They lie in groups of 32 outputs and 32 inputs, panels of 32 outputs one after the other. A group has words of 32 bits,
 * one for each output and some inputs:
 *
 *   HALVES   bfloat16                               [16][32] words of 2
 *   NIBBLES  least + scale q, q from 0 to 15        scales [32], least numbers [32], [4][32] words of 8
 *   EIGHTHS  scale q, q from -127 to 127            scales [32], [8][32] words of 4
 *
 * with a scale, and a least number, for each output. Of the inputs that share a word those with even numbers are in its lower
 * half, and the next one of each lies 16 bits higher: shifted and masked, a word has two neighbours in its halves.
 */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "model.h"
#include "vectors.h"

typedef Whole LooseWhole __attribute__((aligned(4), may_alias));

/* Where the words of a group begin, and how many inputs share one. */
static inline int64_t words_at(int64_t form) { return form == NIBBLES ? 8 * SIDE : form == EIGHTHS ? 4 * SIDE : 0; }
static inline int inputs_in(int64_t form) { return form == NIBBLES ? 8 : form == EIGHTHS ? 4 : 2; }

/* Where the i-th of them lies, counted from the lowest bits. */
static inline int place_in(int64_t form, int i) { return i / 2 + inputs_in(form) / 2 * (i % 2); }

/* What some outputs need besides words. */
typedef struct {
    Vector scale, least;
} Steps;

static inline Steps steps_at(const int form, const char *group, int64_t output) {
    const float *scales = (const float *)group + output;
    Steps found = {{0}, {0}};
    if (form != HALVES) found.scale = *(const Loose *)scales;
    if (form == NIBBLES) found.least = *(const Loose *)(scales + SIDE);
    return found;
}

static inline Whole words_of(const int form, const char *group, int64_t input, int64_t output) {
    return *(const LooseWhole *)(group + words_at(form) + 4 * (SIDE * (input / inputs_in(form)) + output));
}

/* The numbers of the i-th input that shares these words. */
static inline Vector number_in(const int form, Whole words, int i, Steps steps) {
    if (form == HALVES) return (Vector)(i ? words & ~0xffff : words << 16);
    const int place = place_in(form, i);
    if (form == NIBBLES) return fused(steps.scale, __builtin_convertvector(words >> 4 * place & 15, Vector), steps.least);
    return steps.scale * __builtin_convertvector(words << (24 - 8 * place) >> 24, Vector);
}

/* One group, to [32 inputs][32 outputs]. */
static inline __attribute__((always_inline)) void unfold_group(const int form, const char *group, float *out) {
    for (int64_t o = 0; o < SIDE; o += LANES) {
        Steps steps = steps_at(form, group, o);
        for (int64_t k = 0; k < SIDE; k += inputs_in(form)) {
            Whole words = words_of(form, group, k, o);
#pragma GCC unroll 8
            for (int i = 0; i < inputs_in(form); i++) *(Vector *)(out + SIDE * (k + i) + o) = number_in(form, words, i, steps);
        }
    }
}

/* Some inputs of a panel, to [inputs][32]. */
static void unfold(int64_t form, const char *panel, int64_t inputs, float *out) {
    for (int64_t k = 0; k < inputs; k += SIDE, panel += folded_bytes(form, NUMBERS), out += NUMBERS) {
        if (form == UNFOLDED) memcpy(out, panel, sizeof(float) * NUMBERS);
        else if (form == HALVES) unfold_group(HALVES, panel, out);
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

static inline void put_words(int64_t form, const int8_t *q, char *group, int64_t output) {
    uint32_t *words = (uint32_t *)(group + words_at(form)) + output;
    int each = inputs_in(form), bits = 32 / each;
    for (int k = 0; k < SIDE; k += each) {
        uint32_t word = 0;
        for (int i = 0; i < each; i++) word |= ((uint32_t)q[k + i] & ((1u << bits) - 1)) << bits * place_in(form, i);
        words[SIDE * (k / each)] = word;
    }
}

/* One output of a group, from its 32 numbers; 0 where they do not allow it. */
static inline int fold_output(int64_t form, const float *x, char *group, int64_t output) {
    uint32_t *words = (uint32_t *)(group + words_at(form)) + output;
    float *scale = (float *)group + output, *least = scale + SIDE;
    int8_t q[SIDE];
    if (form == HALVES) {
        uint32_t bits[SIDE];
        memcpy(bits, x, sizeof bits);
        for (int k = 0; k < SIDE; k += 2) {
            if ((bits[k] | bits[k + 1]) & 0xffff) return 0;
            words[SIDE * (k / 2)] = bits[k] >> 16 | bits[k + 1];
        }
        return 1;
    }
    float low = x[0], high = x[0];
    for (int k = 1; k < SIDE; k++) low = x[k] < low ? x[k] : low, high = x[k] > high ? x[k] : high;
    float farthest = -low > high ? low : high;
    if (form == EIGHTHS) {
        *scale = farthest / 127;
        if (!steps_of(x, *scale, 0, -127, 127, q)) return 0;
    } else {
        *least = low; /* as Q4_1 has them */
        *scale = in_eleven_bits((high - low) / 15);
        if (!steps_of(x, *scale, *least, 0, 15, q)) {
            *least = farthest; /* as Q4_0 has them */
            *scale = -farthest / 8;
            if (!steps_of(x, *scale, *least, 0, 15, q)) return 0;
        }
    }
    put_words(form, q, group, output);
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

/* Each 32 numbers of an output rounded to 8 bits, for what only drafts. */
void forerun_round(const float *matrix, char *place, int64_t outputs, int64_t inputs, int64_t threads) {
#pragma omp parallel for num_threads((int)threads)
    for (int64_t o = 0; o < outputs; o++)
        for (int64_t k = 0; k < inputs; k += SIDE) {
            char *group = place + folded_bytes(EIGHTHS, (o / SIDE * inputs + k) * SIDE);
            const float *x = matrix + o * inputs + k;
            float most = 0;
            int8_t q[SIDE];
            for (int i = 0; i < SIDE; i++) most = fabsf(x[i]) > most ? fabsf(x[i]) : most;
            float scale = ((float *)group)[o % SIDE] = most / 127;
            for (int i = 0; i < SIDE; i++) q[i] = (int8_t)(scale > 0 ? rintf(x[i] / scale) : 0);
            put_words(EIGHTHS, q, group, o % SIDE);
        }
}

/* The way back. */
void forerun_unfold(int64_t form, int64_t outputs, int64_t inputs, const char *place, float *matrix) {
    float group[NUMBERS] __attribute__((aligned(64)));
    for (int64_t panel = 0; panel < outputs / SIDE; panel++)
        for (int64_t k = 0; k < inputs; k += SIDE) {
            const char *from = place + folded_bytes(form, (panel * inputs + k) * SIDE);
            unfold(form, from, SIDE, group);
            for (int64_t i = 0; i < NUMBERS; i++)
                matrix[(SIDE * panel + i % SIDE) * inputs + k + i / SIDE] = group[i];
        }
}
