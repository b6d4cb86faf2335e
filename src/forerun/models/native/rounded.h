/* Rows in whole numbers of 16 bits, for matrices that are folded to 4 or 8.
 *
 * Of each 32 inputs of a row the largest becomes 32767 and the others as many parts of it: finer than bfloat16, which has
 * 8 bits, or TF32, which has 11. Their products with the q of a folded matrix, and the sums of 32 of these, are whole
 * numbers and exact; then a scale of the weights and one of the row make numbers of them again, added up from left to
 * right. So nothing is unfolded, and rows have the same bits whatever is beside them.
 *
 * Rows lie in tiles of 8 rows and 32 inputs, [row / 8][in / 32][8][32], the rows' scales, and what the numbers of a tile's
 * row add up to, in [row / 8][in / 32][8][2].
 */
#pragma once
#include "folded.h"
#include "stream.h"

#define TOGETHER 8

#if defined(__AVX512BW__) || (defined(__AVX2__) && LANES == 8)
#define ROUNDS 1
#else
#define ROUNDS 0
#endif

/* A compiler may add whole numbers in any order, and would first make all products, for which it has no registers. */
#if ROUNDS
#define STAYS(vector) __asm__("" : "+v"(vector))
#else
#define STAYS(vector)
#endif

typedef int16_t Shorts __attribute__((vector_size(4 * LANES)));
typedef int16_t Halves __attribute__((vector_size(2 * LANES)));
typedef Halves LooseHalves __attribute__((aligned(2), may_alias));

/* sums + what both halves of each lane of a and b make, multiplied and added up */
static inline Whole paired(Whole a, Whole b, Whole sums) {
#if defined(__AVX512VNNI__) && LANES == 16
    return (Whole)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX512BW__) && LANES == 16
    return sums + (Whole)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif ROUNDS
    return sums + (Whole)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return sums + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

/* Two numbers of a row, in all lanes, as if they were one of float32: AMD's processors are faster at that. */
static inline Whole both(const int16_t *numbers) {
    float two;
    memcpy(&two, numbers, 4);
    return (Whole)all(two);
}

/* The q of the i-th pair of inputs that share these words. */
static inline Whole pair_in(const int form, Whole words, int i) {
    if (form == NIBBLES) return words >> 4 * i & 0x000f000f;
    return (Whole)(i ? (Shorts)words >> 8 : (Shorts)words << 8 >> 8);
}

static inline int rounds_with(int64_t form) { return form == NIBBLES || form == EIGHTHS; }

/* What is left of a row's 32 numbers; what is no number spoils all of them. */
static inline void round_group(const float *x, int16_t *numbers, float *scale) {
    Vector largest = {0};
    Whole sum = {0}, sound = {0};
    sound = ~sound;
    for (int i = 0; i < SIDE; i += LANES) {
        Vector size = (Vector)((Whole)*(const Loose *)(x + i) & 0x7fffffff);
        sound &= size < all(INFINITY);
        largest = larger(size, largest);
    }
    float most = 0;
    int32_t good = -1;
    for (int i = 0; i < LANES; i++) most = largest[i] > most ? largest[i] : most, good &= sound[i];
    if (!good || most < 1e-30f) {
        memset(numbers, 0, sizeof *numbers * SIDE);
        scale[0] = scale[1] = good ? 0 : NAN;
        return;
    }
    const Vector parts = all(32767 / most), half = all(12582912.0f); /* 1.5 · 2^23, which rounds to whole numbers */
    for (int i = 0; i < SIDE; i += LANES) {
        Whole whole = (Whole)(*(const Loose *)(x + i) * parts + half) - (Whole)half;
        sum += whole;
        *(LooseHalves *)(numbers + i) = __builtin_convertvector(whole, Halves);
    }
    int32_t all_of_them = 0;
    for (int i = 0; i < LANES; i++) all_of_them += sum[i];
    scale[0] = most / 32767;
    scale[1] = scale[0] * (float)all_of_them;
}

/* A row of `width` numbers goes to its place among the tiles. */
static void round_row(const float *x, int64_t row, int64_t width, int16_t *tiles, float *scales) {
    int64_t tile = row / TOGETHER * (width / SIDE), own = row % TOGETHER;
    for (int64_t k = 0; k < width; k += SIDE, tile++)
        round_group(x + k, tiles + (tile * TOGETHER + own) * SIDE, scales + (tile * TOGETHER + own) * 2);
}

/* The first rows of a tile after tile, and what they are multiplied with. */
typedef struct {
    const int16_t *x;
    const float *scales;
    int64_t inputs;
    const char *ahead; /* what is fetched meanwhile, */
    int64_t step;      /* so many bytes with each 32 inputs */
} RoundedPiece;

/* Adds up what they make with a panel, of which `rows` and `form` are constant where this is called. */
static inline __attribute__((always_inline)) void add_up_rounded(const RoundedPiece *piece, const char *group,
                                                                 float (*sums)[SIDE], const int rows, const int form) {
    const int64_t bytes = folded_bytes(form, NUMBERS), part = piece->step * LANES / SIDE;
    const int each = inputs_in(form);
    const char *ahead = piece->ahead;
    for (int64_t start = 0; start < piece->inputs; start += SIDE, group += bytes) {
        const int16_t *x = piece->x + start * TOGETHER;
        const float *scales = piece->scales + start / SIDE * TOGETHER * 2;
        for (int64_t o = 0; o < SIDE; o += LANES) {
            for (int64_t line = 0; line < part; line += LINE) __builtin_prefetch(ahead + line, 0, 2);
            ahead += part;
            Whole own[TOGETHER];
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) own[r] = (Whole){0};
#pragma GCC unroll 8
            for (int k = 0; k < SIDE; k += each) {
                Whole words = words_of(form, group, k, o);
#pragma GCC unroll 4
                for (int i = 0; i < each / 2; i++) {
                    Whole weights = pair_in(form, words, i);
                    STAYS(weights);
#pragma GCC unroll 8
                    for (int r = 0; r < rows; r++) {
                        own[r] = paired(weights, both(x + r * SIDE + k + 2 * i), own[r]);
                        STAYS(own[r]);
                    }
                }
            }
            Steps steps = steps_at(form, group, o);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                Vector *sum = (Vector *)(sums[r] + o), made = __builtin_convertvector(own[r], Vector) * all(scales[2 * r]);
                Vector added = fused(made, steps.scale, *sum);
                *sum = form == NIBBLES ? fused(all(scales[2 * r + 1]), steps.least, added) : added;
            }
        }
    }
}

typedef void AddUpRounded(const RoundedPiece *, const char *panel, float (*sums)[SIDE]);
#define ROUNDED(kind, form, rows) \
    static void kind##_rounded_##rows(const RoundedPiece *p, const char *g, float (*s)[SIDE]) { add_up_rounded(p, g, s, rows, form); }
#define EACH_COUNT(kind, form)                                                                                  \
    ROUNDED(kind, form, 1) ROUNDED(kind, form, 2) ROUNDED(kind, form, 3) ROUNDED(kind, form, 4)                 \
    ROUNDED(kind, form, 5) ROUNDED(kind, form, 6) ROUNDED(kind, form, 7) ROUNDED(kind, form, 8)                 \
    static AddUpRounded *const kind##_rounded[] = {                                                             \
        0, kind##_rounded_1, kind##_rounded_2, kind##_rounded_3, kind##_rounded_4,                              \
        kind##_rounded_5, kind##_rounded_6, kind##_rounded_7, kind##_rounded_8};
EACH_COUNT(nibbles, NIBBLES)
EACH_COUNT(eighths, EIGHTHS)
