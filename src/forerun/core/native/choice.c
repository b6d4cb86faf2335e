/* From logits to laws, and from laws to tokens, a row at a time: what `law.py`, `exact.py` and `noise.py` say, in one
 * pass over a vocabulary instead of dozens. Rows are independent, and each is added up in the order of its tokens.
 *
 * Multiplications and additions are not fused here, so that logarithms have the bits that PyTorch's have.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

static const uint64_t GOLDEN = 0x9E3779B97F4A7C15u;

static inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

/* As `exact.log`. Written so that compilers make vectors of it. */
static inline double logarithm(double x) {
    uint64_t bits;
    memcpy(&bits, &x, 8);
    double exponent = (double)((int64_t)(bits >> 52) - 1023), m;
    bits = (bits & 0xFFFFFFFFFFFFFu) | ((uint64_t)1023 << 52);
    memcpy(&m, &bits, 8);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    double s = (m - 1.0) / (m + 1.0), z = s * s, series = 1.0 / 21;
    for (int odd = 19; odd >= 1; odd -= 2) series = series * z + 1.0 / odd;
    return series * s * 2.0 + exponent * 0.6931471805599453;
}

/* e^x for x ≤ 0, to about 1e-7; 0 where float32 has nothing smaller. Written so that compilers make vectors of it. */
static inline float exponential(float x) {
    float y = x > -103.0f ? x : -103.0f;
    float n = rintf(y * 1.44269504f);
    float r = (y - n * 0.693359375f) + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t high = (int32_t)n / 2, low = (int32_t)n - high; /* in two steps: the smallest numbers have no exponent */
    union { int32_t i; float f; } a = {(high + 127) << 23}, b = {(low + 127) << 23};
    return x > -103.0f ? p * a.f * b.f : 0.0f;
}

static inline int64_t fixed(float w) { return (int64_t)((double)w * 0x1p50); }

/* Floats as numbers in the same order, and back. */
static inline uint32_t ordered(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

static inline float unordered(uint32_t bits) {
    float x;
    bits = bits >> 31 ? bits & 0x7FFFFFFFu : ~bits;
    memcpy(&x, &bits, 4);
    return x;
}

/* Of the values, times `scale`, above `least`: the largest v such that those ≥ v count at least `wanted`. Each counts
 * its mass, or 1. -INFINITY if they never do. 11 bits of v are settled at a time. */
static float reach(const float *values, int64_t size, float scale, float least, double wanted, int by_mass,
                   float *found, int64_t *counts) {
    int64_t left = 0, above = 0;
    for (int64_t i = 0; i < size; i++) {
        found[left] = values[i] * scale;
        left += found[left] > least;
    }
    uint32_t prefix = 0;
    static const int shifts[3] = {21, 10, 0}, widths[3] = {11, 11, 10};
    for (int step = 0; step < 3; step++) {
        int64_t buckets = (int64_t)1 << widths[step], kept = 0, bucket = buckets - 1;
        memset(counts, 0, sizeof(int64_t) * buckets);
        for (int64_t i = 0; i < left; i++) {
            uint32_t bits = ordered(found[i]);
            if (step && bits >> shifts[step - 1] != prefix) continue;
            found[kept++] = found[i];
            counts[bits >> shifts[step] & (buckets - 1)] += by_mass ? fixed(found[i]) : 1;
        }
        left = kept;
        while (bucket >= 0 && (double)(above + counts[bucket]) < wanted) above += counts[bucket--];
        if (bucket < 0) return -INFINITY;
        prefix = prefix << widths[step] | (uint32_t)bucket;
    }
    return unordered(prefix);
}

static double sum_of(const float *p, int64_t size) {
    double sums[16] = {0}, total = 0;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) sums[j] += p[i + j];
    for (; i < size; i++) sums[0] += p[i];
    for (int j = 0; j < 16; j++) total += sums[j];
    return total;
}

/* p of one row of scores, whose largest is `best` and stands at `choice`. `found` holds `size` floats, `counts` 2048. */
static void law_of(const float *scores, int64_t size, float best, int64_t choice, double temperature, int64_t top_k,
                   double top_p, double min_p, float *out, float *found, int64_t *counts) {
    if (temperature == 0) {
        memset(out, 0, sizeof(float) * size);
        out[choice] = 1;
        return;
    }
    double t = temperature < 1.17549435e-38 ? 1.17549435e-38 : temperature;
    float heat = t > 3.4028234e38 ? 3.4028234e38f : (float)t, least = -INFINITY, threshold = 0;
    if (top_k > 0 && top_k < size) least = reach(scores, size, 1.0f, -INFINITY, (double)top_k, 0, found, counts);
    for (int64_t i = 0; i < size; i++) {
        float w = exponential((scores[i] - best) / heat);
        out[i] = scores[i] >= least ? w : 0.0f;
    }
    float scale = (float)(1.0 / sum_of(out, size));
    if (top_p < 1) {
        int64_t mass = 0;
        for (int64_t i = 0; i < size; i++) mass += fixed(out[i] * scale);
        float little = (float)((1 - top_p) / (2.0 * size)); /* below it all together hold half of the rest */
        threshold = reach(out, size, scale, little, top_p * (double)mass, 1, found, counts);
    }
    float by_ratio = (float)min_p * scale; /* the likeliest token weighs 1 */
    if (by_ratio > threshold) threshold = by_ratio;
    if (threshold > 0) {
        for (int64_t i = 0; i < size; i++) out[i] = out[i] * scale >= threshold ? out[i] : 0.0f;
        scale = (float)(1.0 / sum_of(out, size));
    }
    for (int64_t i = 0; i < size; i++) out[i] *= scale;
}

/* scores [rows, size] with their largest, finite entries `best` and the tokens `choice` that have them → p.
 * `scratch` holds `size` floats and 2048 counts for each row. */
void forerun_laws(const float *scores, int64_t rows, int64_t size, const float *best, const int64_t *choice,
                  const double *temperature, const int64_t *top_k, const double *top_p, const double *min_p, float *p,
                  float *scratch, int64_t *counts) {
#pragma omp parallel for schedule(dynamic) if (rows > 2)
    for (int64_t r = 0; r < rows; r++)
        law_of(scores + r * size, size, best[r], choice[r], temperature[r], top_k[r], top_p[r], min_p[r], p + r * size,
               scratch + r * size, counts + r * 2048);
}

/* The largest of up to `size` values, 16 at a time: compilers make vectors of it. */
static float peak_of(const float *values, int64_t size) {
    float peaks[16], peak = -INFINITY;
    for (int j = 0; j < 16; j++) peaks[j] = -INFINITY;
    int64_t i = 0;
    for (; i + 16 <= size; i += 16)
        for (int j = 0; j < 16; j++) peaks[j] = values[i + j] > peaks[j] ? values[i + j] : peaks[j];
    for (; i < size; i++) peak = values[i] > peak ? values[i] : peak;
    for (int j = 0; j < 16; j++) peak = peaks[j] > peak ? peaks[j] : peak;
    return peak;
}

/* The uniform number of (key, token), never 0 or 1. */
static inline double inside(uint64_t key, int64_t token) {
    return ((double)(mix(key + (uint64_t)(token + 1) * GOLDEN) >> 12) + 0.5) * 0x1p-52;
}

/* Whether p / E may be `best` or more, where E = -log U ≥ 1 - U: for most it may not, and they need no logarithm. */
static inline int may_win(float p, double uniform, double best) {
    return (p > 0) & !((1.0 - uniform) * best > (double)p * 1.000001);
}

/* The token of largest p / E, where E is the exponential of (key, token); the first of equals. */
static int64_t winner_of(const float *p, int64_t size, uint64_t key) {
    float peak = peak_of(p, size);
    int64_t winner = 0;
    while (peak > 0 && p[winner] != peak) winner++;
    double best = (double)p[winner] / -logarithm(inside(key, winner)); /* the likeliest is hard to beat */
    for (int64_t start = 0; start < size; start += 64) {
        int64_t end = size - start < 64 ? size : start + 64, may = 0;
        for (int64_t i = start; i < end; i++) may |= may_win(p[i], inside(key, i), best);
        for (int64_t i = start; may && i < end; i++) {
            double uniform = inside(key, i);
            if (!may_win(p[i], uniform, best)) continue;
            double score = (double)p[i] / -logarithm(uniform);
            if (score > best || (score == best && i < winner)) {
                best = score;
                winner = i;
            }
        }
    }
    return winner;
}

void forerun_race(const float *p, int64_t rows, int64_t size, const int64_t *keys, int64_t *tokens) {
#pragma omp parallel for schedule(dynamic) if (rows > 2)
    for (int64_t r = 0; r < rows; r++) tokens[r] = winner_of(p + r * size, size, (uint64_t)keys[r]);
}

static inline float entry(const void *scores, int64_t i, int half) {
    if (!half) return ((const float *)scores)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)scores)[i] << 16;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* From some rows of logits, float32 or with `half` bfloat16, to the winners of races under their laws; -1 where a row
 * holds what is no number or nothing finite. `scratch` holds 3 · `size` floats and 2048 counts for each row. */
void forerun_chosen(const void *logits, int64_t half, int64_t count, const int64_t *rows, int64_t size,
                    const double *temperature, const int64_t *top_k, const double *top_p, const double *min_p,
                    const int64_t *keys, float *scratch, int64_t *counts, int64_t *tokens) {
#pragma omp parallel for schedule(dynamic) if (count > 2)
    for (int64_t r = 0; r < count; r++) {
        float *scores = scratch + r * 3 * size, *p = scores + size;
        int32_t strange = 0;
        for (int64_t i = 0; i < size; i++) {
            scores[i] = entry(logits, rows[r] * size + i, (int)half);
            strange |= scores[i] != scores[i];
        }
        float best = peak_of(scores, size);
        int64_t choice = 0;
        tokens[r] = -1;
        if (strange || !(best > -INFINITY && best < INFINITY)) continue;
        while (scores[choice] != best) choice++;
        law_of(scores, size, best, choice, temperature[r], top_k[r], top_p[r], min_p[r], p, p + size, counts + r * 2048);
        tokens[r] = winner_of(p, size, (uint64_t)keys[r]);
    }
}

/* The first token whose cumulative weight exceeds u times the total. */
void forerun_draws(const float *weights, int64_t rows, int64_t size, const double *u, int64_t *tokens) {
#pragma omp parallel for schedule(dynamic) if (rows > 2)
    for (int64_t r = 0; r < rows; r++) {
        const float *own = weights + r * size;
        int64_t total = 0, passed = 0, i = 0;
        for (int64_t j = 0; j < size; j++) total += fixed(own[j]);
        double level = u[r] * (double)total;
        for (; i < size - 1; i++) {
            passed += fixed(own[i]);
            if ((double)passed > level) break;
        }
        tokens[r] = i;
    }
}

/* Keep the `count` largest values seen so far, largest first, with their places; of equals the first seen. */
static inline void offer(float value, int64_t place, int64_t count, float *values, int64_t *places) {
    if (!(value > values[count - 1])) return;
    int64_t at = count - 1;
    for (; at > 0 && value > values[at - 1]; at--) {
        values[at] = values[at - 1];
        places[at] = places[at - 1];
    }
    values[at] = value;
    places[at] = place;
}

/* The `count` ≤ 64 largest of each row of float32, or with `half` of bfloat16. `peaks` are the largest of each `block`
 * entries: the blocks with the largest peaks hold them all. */
void forerun_largest(const void *scores, int64_t half, int64_t rows, int64_t size, const float *peaks, int64_t block,
                     int64_t count, float *values, int64_t *places) {
    int64_t blocks = size / block;
#pragma omp parallel for schedule(static) if (rows > 8)
    for (int64_t r = 0; r < rows; r++) {
        float *best = values + r * count, heights[64];
        int64_t *found = places + r * count, where[64];
        for (int64_t i = 0; i < count; i++) heights[i] = best[i] = -INFINITY, where[i] = -1, found[i] = i;
        for (int64_t b = 0; b < blocks; b++) offer(peaks[r * blocks + b], b, count, heights, where);
        for (int64_t i = 0; i < count && where[i] >= 0; i++)
            for (int64_t j = where[i] * block; j < (where[i] + 1) * block; j++)
                offer(entry(scores, r * size + j, (int)half), j, count, best, found);
    }
}

/* The noise of a place in a text: -log E for the exponential E of (key, id), for each of `size` ids. */
void forerun_gumbel(uint64_t key, const int64_t *ids, int64_t size, float *noise) {
    for (int64_t i = 0; i < size; i++) noise[i] = (float)-logarithm(-logarithm(inside(key, ids[i])));
}

/* A draft may say nonsense: what is no number is not drafted, and nothing is beyond all numbers. */
static inline float number(float x) {
    float finite = x < FLT_MAX ? x : FLT_MAX;
    return x == x ? finite : -INFINITY;
}

/* What may follow each row: its `count` ≤ 64 best columns with the logarithms of their shares. They are the likeliest,
 * by the shares of q^(1/tau); in rows that race, the first of a race with the noise of their key, by the shares of
 * (q/E)^(1/tau) with the second `tau`. Rows of one key stand together. `scratch` holds 3 · `size` floats. */
void forerun_candidates(const void *logits, int64_t half, int64_t rows, int64_t size, const int64_t *ids,
                        const double *temperature, const int64_t *keys, const int64_t *raced, const double *tau,
                        int64_t count, float *scratch, float *shares, int64_t *places) {
    float *noise = scratch, *scores = scratch + size, *weights = scratch + 2 * size;
    int64_t heard = -1; /* the row whose noise is there */
    for (int64_t r = 0; r < rows; r++) {
        float *best = shares + r * count, sharp = (float)(1 / tau[raced[r] != 0]);
        for (int64_t i = 0; i < count; i++) best[i] = -INFINITY, places[r * count + i] = -1;
        for (int64_t i = 0; i < size; i++) scores[i] = number(entry(logits, r * size + i, (int)half));
        float largest = peak_of(scores, size);
        if (!(largest > -INFINITY)) continue;
        if (raced[r]) {
            float heat = 1 / temperature[r] < FLT_MAX ? (float)(1 / temperature[r]) : FLT_MAX;
            if (heard < 0 || keys[heard] != keys[r]) forerun_gumbel((uint64_t)keys[heard = r], ids, size, noise);
            for (int64_t i = 0; i < size; i++) scores[i] = (scores[i] - largest) * heat + noise[i];
            largest = peak_of(scores, size);
        }
        for (int64_t i = 0; i < size; i++) weights[i] = exponential((scores[i] - largest) * sharp);
        float all = (float)log(sum_of(weights, size));
        for (int64_t start = 0; start < size; start += 64) {
            int64_t length = size - start < 64 ? size - start : 64;
            if (!(peak_of(scores + start, length) > best[count - 1])) continue;
            for (int64_t i = start; i < start + length; i++) offer(scores[i], i, count, best, places + r * count);
        }
        for (int64_t i = 0; i < count; i++) best[i] = (best[i] - largest) * sharp - all;
    }
}
