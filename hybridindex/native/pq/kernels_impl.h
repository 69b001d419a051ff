// One source for every instruction set, compiled with that set's flags and without contraction. Everything here has
// internal linkage.
#include "pq/kernels.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include "simd/neon.h"
#endif

namespace hybridindex {
namespace {

// out[part][word] = sum over the part's dimensions of add(x of the dimension, its coordinate of the codeword).
template <typename Of, typename Add>
inline void entries(const PqForm& form, const Of& of, const Add& add, float* out) {
    const std::int64_t words = form.words(), dims = form.part_dims();
    for (std::int64_t part = 0; part < form.parts; ++part, out += words) {
        std::memset(out, 0, static_cast<std::size_t>(words) * sizeof(float));
        for (std::int64_t i = part * dims; i < (part + 1) * dims; ++i) {
            const float x = of(i);
            const float* const coordinates = form.codewords + i * words;
            for (std::int64_t w = 0; w < words; ++w) out[w] += add(x, coordinates[w]);
        }
    }
}

void table(const PqForm& form, const float* query, float* out) {
    const auto product = [](float x, float y) { return x * y; };
    if (!form.l2)
        entries(form, [&](std::int64_t i) { return -query[i]; }, product, out);
    else if (form.residual)
        entries(form, [&](std::int64_t i) { return -2.0f * (query[i] - form.middle[i]); }, product, out);
    else
        entries(form, [&](std::int64_t i) { return query[i]; }, [](float x, float y) { return (x - y) * (x - y); }, out);
}

void term_table(const PqForm& form, const float* centroid, float* out) {
    entries(form, [&](std::int64_t i) { return 2.0f * (centroid[i] - form.middle[i]); },
            [](float x, float y) { return (x + y) * y; }, out);
}

typedef float Floats __attribute__((vector_size(64)));
typedef std::int32_t Ints __attribute__((vector_size(64)));
typedef std::uint8_t Bytes __attribute__((vector_size(16)));

inline Floats load(const float* numbers) {
    Floats loaded;
    std::memcpy(&loaded, numbers, sizeof(loaded));
    return loaded;
}

inline Floats less_of(Floats x, Floats y) { return x < y ? x : y; }
inline Floats larger_of(Floats x, Floats y) { return x > y ? x : y; }

// Of sixteen numbers, in an order of its own: it decides what comes of numbers that are none.
template <typename Pick>
inline float one_of(Floats x, const Pick& pick) {
    x = pick(__builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7), x);
    x = pick(__builtin_shufflevector(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11), x);
    x = pick(__builtin_shufflevector(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), x);
    x = pick(__builtin_shufflevector(x, x, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), x);
    return x[0];
}

template <int Words>
inline std::pair<float, float> span_of(const float* numbers) {
    Floats least = load(numbers), largest = least;
    for (int w = 16; w < Words; w += 16) {
        least = less_of(load(numbers + w), least);
        largest = larger_of(load(numbers + w), largest);
    }
    return {one_of(least, less_of), one_of(largest, larger_of)};
}

template <int Words>
PqBound round_words(const PqForm& form, const float* table, std::uint8_t* out) {
    double low = 0, most = 0;
    float span = 0;
    for (std::int64_t part = 0; part < form.parts; ++part) {
        const auto [least, largest] = span_of<Words>(table + part * Words);
        low += least;
        most += std::max(std::fabs(least), std::fabs(largest));
        span = std::max(span, largest - least);
    }
    const float levels = static_cast<float>(std::min<std::int64_t>(kMostLevel, 65535 / form.parts));
    const float factor = span > 0 && std::isfinite(levels / span) ? levels / span : 0.0f;
    const Floats none = {}, every = none + levels;
    for (std::int64_t part = 0; part < form.parts; ++part) {
        const float least = span_of<Words>(table + part * Words).first;
        for (int w = 0; w < Words; w += 16) {
            const Floats level = (load(table + part * Words + w) - least) * factor;
            // What is no number is 0.
            const Floats bounded = level > none ? less_of(level, every) : none;
            const Bytes bytes = __builtin_convertvector(__builtin_convertvector(bounded, Ints), Bytes);
            std::memcpy(out + part * Words + w, &bytes, sizeof(bytes));
        }
    }
    if (form.tables() > form.parts) std::memset(out + form.entries(), 0, Words);
    return {factor > 0 ? span / levels : 0.0f, low, most};
}

PqBound round_table(const PqForm& form, const float* table, std::uint8_t* out) {
    return form.bits == 4 ? round_words<16>(form, table, out) : round_words<256>(form, table, out);
}

// Sum over the dimensions of of(i), in lanes.
template <typename Of>
inline float in_lanes(std::int64_t dim, const Of& of) {
    float lanes[8] = {};
    std::int64_t i = 0;
    for (; i + 8 <= dim; i += 8)
        for (int lane = 0; lane < 8; ++lane) lanes[lane] += of(i + lane);
    for (; i < dim; ++i) lanes[i & 7] += of(i);
    return add_lanes(lanes);
}

float base(const PqForm& form, const float* query, const float* centroid) {
    if (!form.residual) return 0;
    if (!form.l2) return -in_lanes(form.dim, [&](std::int64_t i) { return query[i] * centroid[i]; });
    return in_lanes(form.dim, [&](std::int64_t i) { return (query[i] - centroid[i]) * (query[i] - centroid[i]); });
}

float sum_in_block(const std::uint8_t* block, int row, std::int64_t parts, const float* table) {
    const std::uint8_t* const numbers = block + lane_of(row & 15);
    const int shift = row & 16 ? 4 : 0;
    return in_lanes(parts, [&](std::int64_t part) { return table[part * 16 + (numbers[part * 16] >> shift & 15)]; });
}

float sum_of_row(const std::uint8_t* row, std::int64_t parts, const float* table) {
    return in_lanes(parts, [&](std::int64_t part) { return table[part * 256 + row[part]]; });
}

void sums_of_rows(const std::uint8_t* rows, std::int64_t stride, int n_rows, std::int64_t parts, const std::uint8_t* table,
                  std::uint16_t* sums) {
    int r = 0;
    for (; r + 4 <= n_rows; r += 4) {
        const std::uint8_t *a = rows + r * stride, *b = a + stride, *c = b + stride, *d = c + stride;
        std::uint32_t s = 0, t = 0, u = 0, v = 0;
        const std::uint8_t* own = table;
        for (std::int64_t part = 0; part < parts; ++part, own += 256)
            s += own[a[part]], t += own[b[part]], u += own[c[part]], v += own[d[part]];
        sums[r] = static_cast<std::uint16_t>(s), sums[r + 1] = static_cast<std::uint16_t>(t);
        sums[r + 2] = static_cast<std::uint16_t>(u), sums[r + 3] = static_cast<std::uint16_t>(v);
    }
    for (; r < n_rows; ++r) {
        std::uint32_t s = 0;
        for (std::int64_t part = 0; part < parts; ++part) s += table[part * 256 + rows[r * stride + part]];
        sums[r] = static_cast<std::uint16_t>(s);
    }
}

#if defined(HYBRIDINDEX_PQ_AVX2) || defined(HYBRIDINDEX_PQ_AVX512)

#if defined(HYBRIDINDEX_PQ_AVX512)

// Four parts are 64 bytes of a block, and of a table. Their numbers of a row lie together, so that one instruction adds up
// what the table has for them; where there are two parts left, the others are zeros.
template <int Q, bool Fetch>
inline void sums_of_pairs(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables,
                          std::uint16_t* sums, const std::uint8_t* ahead) {
    alignas(64) static constexpr auto kOfRows = [] {
        std::array<std::uint8_t, 64> at{};
        for (int row = 0; row < 16; ++row)
            for (int part = 0; part < 4; ++part)
                at[static_cast<std::size_t>(4 * row + part)] = static_cast<std::uint8_t>(16 * part + lane_of(row));
        return at;
    }();
    const __m512i of_rows = _mm512_load_si512(kOfRows.data());
    const __m512i low = _mm512_set1_epi8(0x0f), of_parts = _mm512_set1_epi32(0x30201000), ones = _mm512_set1_epi8(1);
    // Of one query sums go to two places in turn: one alone would wait for itself.
    constexpr int kTurns = Q == 1 ? 2 : 1, kSums = Q * kTurns;
    __m512i first[kSums], last[kSums];  // rows below 16, and the others
#pragma GCC unroll 6
    for (int i = 0; i < kSums; ++i) first[i] = last[i] = _mm512_setzero_si512();
    const auto add = [&](std::int64_t pair, int turn, __m512i numbers, const auto& table_at) {
        numbers = _mm512_permutexvar_epi8(of_rows, numbers);
        const __m512i lows = _mm512_ternarylogic_epi32(numbers, low, of_parts, 0xea);
        const __m512i highs = _mm512_ternarylogic_epi32(_mm512_srli_epi16(numbers, 4), low, of_parts, 0xea);
#pragma GCC unroll 6
        for (int q = 0; q < Q; ++q) {
            const __m512i table = table_at(tables[q] + 32 * pair);
            __m512i &of_first = first[turn * Q + q], &of_last = last[turn * Q + q];
            of_first = _mm512_dpbusd_epi32(of_first, _mm512_permutexvar_epi8(lows, table), ones);
            of_last = _mm512_dpbusd_epi32(of_last, _mm512_permutexvar_epi8(highs, table), ones);
        }
    };
    const auto whole = [](const std::uint8_t* at) { return _mm512_loadu_si512(at); };
    std::int64_t pair = 0;
    for (; pair + 2 * kTurns <= pairs; pair += 2 * kTurns) {
#pragma GCC unroll 2
        for (int turn = 0; turn < kTurns; ++turn) {
            // Line by line: many at once would keep what is read now waiting.
            if constexpr (Fetch) __builtin_prefetch(ahead + 32 * (pair + 2 * turn), 0, 3);
            add(pair + 2 * turn, turn, whole(block + 32 * (pair + 2 * turn)), whole);
        }
    }
    for (; pair < pairs; pair += 2) {
        const __mmask64 there = pairs - pair > 1 ? ~__mmask64{0} : 0xffffffff;
        const auto some = [&](const std::uint8_t* at) { return _mm512_maskz_loadu_epi8(there, at); };
        if constexpr (Fetch) __builtin_prefetch(ahead + 32 * pair, 0, 3);
        add(pair, 0, some(block + 32 * pair), some);
    }
#pragma GCC unroll 6
    for (int q = 0; q < Q; ++q) {
        if constexpr (kTurns == 2) {
            first[q] = _mm512_add_epi32(first[q], first[Q + q]);
            last[q] = _mm512_add_epi32(last[q], last[Q + q]);
        }
        __m256i* const out = reinterpret_cast<__m256i*>(sums + q * kPqRows);
        _mm256_storeu_si256(out, _mm512_cvtepi32_epi16(first[q]));
        _mm256_storeu_si256(out + 1, _mm512_cvtepi32_epi16(last[q]));
    }
}
constexpr int kMostQueries = 6;

#else

// A pair of parts is 32 bytes of a block, and of a table: the shuffle finds 16 rows of each part.
template <int Q, bool Fetch>
inline void sums_of_pairs(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables,
                          std::uint16_t* sums, const std::uint8_t* ahead) {
    const __m256i low = _mm256_set1_epi8(0x0f);
    // Of rows below 16 and of the others: sums of even bytes with 256 times those of odd ones, and of odd ones.
    __m256i both[Q][2], odd[Q][2];
    for (int q = 0; q < Q; ++q)
        for (int half = 0; half < 2; ++half) both[q][half] = odd[q][half] = _mm256_setzero_si256();
    for (std::int64_t pair = 0; pair < pairs; ++pair) {
        if constexpr (Fetch)
            if (pair % 2 == 0) __builtin_prefetch(ahead + 32 * pair, 0, 3);
        const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(block) + pair);
        const __m256i halves[2] = {_mm256_and_si256(numbers, low), _mm256_and_si256(_mm256_srli_epi16(numbers, 4), low)};
        for (int q = 0; q < Q; ++q) {
            const __m256i table = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(tables[q]) + pair);
            for (int half = 0; half < 2; ++half) {
                const __m256i found = _mm256_shuffle_epi8(table, halves[half]);
                both[q][half] = _mm256_add_epi16(both[q][half], found);
                odd[q][half] = _mm256_add_epi16(odd[q][half], _mm256_srli_epi16(found, 8));
            }
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int half = 0; half < 2; ++half) {
            const __m256i even = _mm256_sub_epi16(both[q][half], _mm256_slli_epi16(odd[q][half], 8));
            const auto add = [](__m256i x) { return _mm_add_epi16(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1)); };
            __m128i* const out = reinterpret_cast<__m128i*>(sums + q * kPqRows) + 2 * half;
            _mm_storeu_si128(out, add(even));
            _mm_storeu_si128(out + 1, add(odd[q][half]));
        }
}

constexpr int kMostQueries = 2;

#endif

template <bool Fetch>
inline int sums_of_some(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables, int n,
                        std::uint16_t* sums, const std::uint8_t* ahead) {
    if constexpr (kMostQueries >= 6) {
        if (n >= 6) return sums_of_pairs<6, Fetch>(block, pairs, tables, sums, ahead), 6;
        if (n == 5) return sums_of_pairs<5, Fetch>(block, pairs, tables, sums, ahead), 5;
        if (n == 4) return sums_of_pairs<4, Fetch>(block, pairs, tables, sums, ahead), 4;
        if (n == 3) return sums_of_pairs<3, Fetch>(block, pairs, tables, sums, ahead), 3;
    }
    if (n >= 2) return sums_of_pairs<2, Fetch>(block, pairs, tables, sums, ahead), 2;
    return sums_of_pairs<1, Fetch>(block, pairs, tables, sums, ahead), 1;
}

void sums_of_block(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables, int n,
                   std::uint16_t* sums, const std::uint8_t* ahead) {
    int q = 0;
    if (ahead != nullptr && n > 0) q = sums_of_some<true>(block, pairs, tables, n, sums, ahead);
    while (q < n) q += sums_of_some<false>(block, pairs, tables + q, n - q, sums + q * kPqRows, nullptr);
}

#if defined(HYBRIDINDEX_PQ_AVX512)

inline std::uint32_t at_most_one(const std::uint16_t* sums, std::uint16_t limit) {
    return _mm512_cmple_epu16_mask(_mm512_loadu_si512(sums), _mm512_set1_epi16(static_cast<short>(limit)));
}

std::uint32_t at_most_with(const std::uint16_t* sums, const float* terms, float step, float limit) {
    const __m512 factor = _mm512_set1_ps(step), most = _mm512_set1_ps(limit), rounding = _mm512_set1_ps(0x1p-20f);
    const auto half = [&](int at) {
        const __m256i words = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums) + at);
        const __m512 sum = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(words)), term = _mm512_loadu_ps(terms + 16 * at);
        const __m512 least = _mm512_sub_ps(term, _mm512_mul_ps(_mm512_abs_ps(term), rounding));
        return std::uint32_t{_mm512_cmp_ps_mask(_mm512_add_ps(_mm512_mul_ps(sum, factor), least), most, _CMP_LE_OQ)};
    };
    return half(0) | half(1) << 16;
}

#else

inline std::uint32_t at_most_one(const std::uint16_t* sums, std::uint16_t limit) {
    const __m256i most = _mm256_set1_epi16(static_cast<short>(limit));
    const auto mask = [&](int at) {
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(sums) + at);
        return _mm256_cmpeq_epi16(_mm256_min_epu16(x, most), x);
    };
    // Packs as 0-7, 16-23, 8-15, 24-31.
    const __m256i found = _mm256_permute4x64_epi64(_mm256_packs_epi16(mask(0), mask(1)), 0xd8);
    return static_cast<std::uint32_t>(_mm256_movemask_epi8(found));
}

std::uint32_t at_most_with(const std::uint16_t* sums, const float* terms, float step, float limit) {
    const __m256 factor = _mm256_set1_ps(step), most = _mm256_set1_ps(limit), rounding = _mm256_set1_ps(0x1p-20f);
    const __m256 sign = _mm256_set1_ps(-0.0f);
    std::uint32_t found = 0;
    for (int at = 0; at < 4; ++at) {
        const __m256 sum = _mm256_cvtepi32_ps(
            _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(sums) + at)));
        const __m256 term = _mm256_loadu_ps(terms + 8 * at);
        const __m256 least = _mm256_sub_ps(term, _mm256_mul_ps(_mm256_andnot_ps(sign, term), rounding));
        const __m256 distance = _mm256_add_ps(_mm256_mul_ps(sum, factor), least);
        found |= static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(distance, most, _CMP_LE_OQ))) << (8 * at);
    }
    return found;
}

#endif

#elif defined(HYBRIDINDEX_PQ_NEON)

template <int Q>
inline void sums_of_pairs(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables,
                          std::uint16_t* sums) {
    const uint8x16_t low = vdupq_n_u8(0x0f);
    // Of rows below 16 and of the others: sums of even bytes with 256 times those of odd ones, and of odd ones.
    uint16x8_t both[Q][2], odd[Q][2];
    for (int q = 0; q < Q; ++q)
        for (int half = 0; half < 2; ++half) both[q][half] = odd[q][half] = vdupq_n_u16(0);
    for (std::int64_t part = 0; part < 2 * pairs; ++part) {
        const uint8x16_t numbers = vld1q_u8(block + 16 * part);
        const uint8x16_t halves[2] = {vandq_u8(numbers, low), vshrq_n_u8(numbers, 4)};
#pragma GCC unroll 4
        for (int q = 0; q < Q; ++q) {
            const uint8x16_t table = vld1q_u8(tables[q] + 16 * part);
            for (int half = 0; half < 2; ++half) {
                const uint16x8_t found = vreinterpretq_u16_u8(vqtbl1q_u8(table, halves[half]));
                both[q][half] = vaddq_u16(both[q][half], found);
                odd[q][half] = vsraq_n_u16(odd[q][half], found, 8);
            }
        }
    }
    for (int q = 0; q < Q; ++q)
        for (int half = 0; half < 2; ++half) {
            std::uint16_t* const out = sums + q * kPqRows + 16 * half;
            vst1q_u16(out, vsubq_u16(both[q][half], vshlq_n_u16(odd[q][half], 8)));
            vst1q_u16(out + 8, odd[q][half]);
        }
}

void sums_of_block(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables, int n,
                   std::uint16_t* sums, const std::uint8_t* ahead) {
    for (std::int64_t byte = 0; ahead != nullptr && byte < 32 * pairs; byte += 64) __builtin_prefetch(ahead + byte);
    int q = 0;
    for (; q + 4 <= n; q += 4) sums_of_pairs<4>(block, pairs, tables + q, sums + q * kPqRows);
    for (; q < n; ++q) sums_of_pairs<1>(block, pairs, tables + q, sums + q * kPqRows);
}

inline std::uint32_t at_most_one(const std::uint16_t* sums, std::uint16_t limit) {
    const uint16x8_t most = vdupq_n_u16(limit);
    const auto mask = [&](int at) { return vcleq_u16(vld1q_u16(sums + at), most); };
    return mask_of(mask(0), mask(8)) | mask_of(mask(16), mask(24)) << 16;
}

std::uint32_t at_most_with(const std::uint16_t* sums, const float* terms, float step, float limit) {
    const float32x4_t factor = vdupq_n_f32(step), most = vdupq_n_f32(limit), rounding = vdupq_n_f32(0x1p-20f);
    const auto four = [&](int at) {
        const float32x4_t sum = vcvtq_f32_u32(vmovl_u16(vld1_u16(sums + at))), term = vld1q_f32(terms + at);
        const float32x4_t least = vsubq_f32(term, vmulq_f32(vabsq_f32(term), rounding));
        return vreinterpretq_u16_u32(vcleq_f32(vaddq_f32(vmulq_f32(sum, factor), least), most));
    };
    const auto eight = [&](int at) { return vuzp1q_u16(four(at), four(at + 4)); };
    return mask_of(eight(0), eight(8)) | mask_of(eight(16), eight(24)) << 16;
}

#else

void sums_of_block(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables, int n,
                   std::uint16_t* sums, const std::uint8_t*) {
    for (int q = 0; q < n; ++q)
        for (int r = 0; r < kPqRows; ++r) {
            const std::uint8_t* const numbers = block + lane_of(r & 15);
            const int shift = r & 16 ? 4 : 0;
            std::uint32_t sum = 0;
            for (std::int64_t part = 0; part < 2 * pairs; ++part)
                sum += tables[q][part * 16 + (numbers[part * 16] >> shift & 15)];
            sums[q * kPqRows + r] = static_cast<std::uint16_t>(sum);
        }
}

inline std::uint32_t at_most_one(const std::uint16_t* sums, std::uint16_t limit) {
    std::uint32_t found = 0;
    for (int r = 0; r < kPqRows; ++r) found |= static_cast<std::uint32_t>(sums[r] <= limit) << r;
    return found;
}

std::uint32_t at_most_with(const std::uint16_t* sums, const float* terms, float step, float limit) {
    std::uint32_t found = 0;
    for (int r = 0; r < kPqRows; ++r) {
        const float least = terms[r] - std::fabs(terms[r]) * 0x1p-20f;
        found |= static_cast<std::uint32_t>(static_cast<float>(sums[r]) * step + least <= limit) << r;
    }
    return found;
}

#endif

void at_most(const std::uint16_t* sums, int n, const std::uint16_t* limits, std::uint32_t* near) {
    for (int q = 0; q < n; ++q) near[q] = at_most_one(sums + q * kPqRows, limits[q]);
}

#if defined(HYBRIDINDEX_PQ_AVX512)

// A lane for each of 16 rows: all find their entries of a part at once. Lane by lane the sums of in_lanes.
inline void sums_of_half(const std::uint8_t* block, int shift, std::int64_t parts, const float* table, float* out) {
    __m512 lanes[8];
#pragma GCC unroll 8
    for (__m512& lane : lanes) lane = _mm512_setzero_ps();
    const auto add = [&](std::int64_t part, __m512& lane) {
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(block + 16 * part)));
        // Of an index four bits count.
        const __m512i number = _mm512_srl_epi32(bytes, _mm_cvtsi32_si128(shift));
        lane = _mm512_add_ps(lane, _mm512_permutexvar_ps(number, _mm512_loadu_ps(table + 16 * part)));
    };
    std::int64_t part = 0;
    for (; part + 8 <= parts; part += 8)
#pragma GCC unroll 8
        for (int lane = 0; lane < 8; ++lane) add(part + lane, lanes[lane]);
    const std::int64_t left = parts - part;
#pragma GCC unroll 8
    for (int lane = 0; lane < 8; ++lane)
        if (lane < left) add(part + lane, lanes[lane]);
    const auto both = [&](int a, int b) { return _mm512_add_ps(lanes[a], lanes[b]); };
    const __m512 sums = _mm512_add_ps(_mm512_add_ps(both(0, 4), both(2, 6)), _mm512_add_ps(both(1, 5), both(3, 7)));
    alignas(64) float by_byte[16];
    _mm512_store_ps(by_byte, sums);
    for (int row = 0; row < 16; ++row) out[row] = by_byte[lane_of(row)];
}

void sums_in_block(const std::uint8_t* block, std::uint32_t wanted, std::int64_t parts, const float* table, float* out) {
    for (int half = 0; half < 2; ++half) {
        std::uint32_t rows = wanted >> (16 * half) & 0xffffu;
        if ((rows & (rows - 1)) != 0) {
            sums_of_half(block, 4 * half, parts, table, out + 16 * half);
        } else if (rows != 0) {
            const int row = 16 * half + __builtin_ctz(rows);
            out[row] = sum_in_block(block, row, parts, table);
        }
    }
}

#else

void sums_in_block(const std::uint8_t* block, std::uint32_t wanted, std::int64_t parts, const float* table, float* out) {
    for (; wanted != 0; wanted &= wanted - 1) {
        const int row = __builtin_ctz(wanted);
        out[row] = sum_in_block(block, row, parts, table);
    }
}

#endif

}  // namespace
}  // namespace hybridindex
