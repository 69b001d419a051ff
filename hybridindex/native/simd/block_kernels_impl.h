// One source for every instruction set. The including file defines HYBRIDINDEX_LANES (floats in a register) and is
// compiled with that set's flags; everything here has internal linkage, so that no code for a newer CPU can be picked
// for an older one by the linker.
#include <cmath>
#include <cstring>

#include "simd/block_kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hybridindex {
namespace {

constexpr int W = HYBRIDINDEX_LANES;
typedef float vec __attribute__((vector_size(W * 4)));
typedef float vec_unaligned __attribute__((vector_size(W * 4), aligned(4), may_alias));
typedef std::int32_t ivec __attribute__((vector_size(W * 4)));

inline vec load(const float* p) { return *reinterpret_cast<const vec_unaligned*>(p); }

template <typename V, typename M>
inline V shuffle(V a, V b, M mask) {
#if defined(__clang__)
    V out;
    for (int i = 0; i < W; ++i) out[i] = mask[i] < W ? a[mask[i]] : b[mask[i] - W];
    return out;
#else
    return __builtin_shuffle(a, b, mask);
#endif
}

// Masks of one step of the sum below: lanes whose bit `step` is 0 belong to a, the others to b.
template <int Step>
constexpr ivec own_lanes() {
    ivec mask{};
    for (int i = 0; i < W; ++i) mask[i] = (i & Step) ? W + i : i;
    return mask;
}
template <int Step>
constexpr ivec other_lanes() {
    ivec mask{};
    for (int i = 0; i < W; ++i) mask[i] = (i & Step) ? W + i - Step : i + Step;
    return mask;
}

template <int Step, typename V>
inline V fold(V a, V b) {
    return shuffle(a, b, own_lanes<Step>()) + shuffle(a, b, other_lanes<Step>());
}

// Lane l of the result is the sum over all lanes of acc[l]; W - 1 folds instead of W sums.
template <typename V>
inline V sum_lanes(V* acc) {
#pragma GCC unroll 16
    for (int i = 0; i < W / 2; ++i) acc[i] = fold<1>(acc[2 * i], acc[2 * i + 1]);
#pragma GCC unroll 16
    for (int i = 0; i < W / 4; ++i) acc[i] = fold<2>(acc[2 * i], acc[2 * i + 1]);
    if constexpr (W >= 8) {
#pragma GCC unroll 16
        for (int i = 0; i < W / 8; ++i) acc[i] = fold<(W >= 8 ? 4 : 1)>(acc[2 * i], acc[2 * i + 1]);
    }
    if constexpr (W >= 16) acc[0] = fold<(W >= 16 ? 8 : 1)>(acc[0], acc[1]);
    return acc[0];
}

// C queries against W / C rows; fetches Fetch lines of the next block ahead with every step.
template <bool L2, int C, int Fetch>
inline void tile(const float* rows, std::int64_t stride, const float* const* queries, std::int64_t dim, float* out,
                 const char*& next) {
    constexpr int R = W / C;
    vec acc[W] = {};
    for (std::int64_t i = 0; i < dim; i += W) {
#pragma GCC unroll 16
        for (int line = 0; line < Fetch; ++line, next += 64) __builtin_prefetch(next, 0, 2);
        vec x[R];
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) x[r] = load(rows + r * stride + i);
#pragma GCC unroll 16
        for (int c = 0; c < C; ++c) {
            const vec q = load(queries[c] + i);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) {
                if constexpr (L2) {
                    const vec t = q - x[r];
                    acc[c * R + r] += t * t;
                } else {
                    acc[c * R + r] += q * x[r];
                }
            }
        }
    }
    const vec sums = sum_lanes(acc);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
        std::memcpy(out + c * kBlockRows, reinterpret_cast<const char*>(&sums) + c * R * 4, R * 4);
}

// One query against W rows, one after the other: a single stream of memory.
template <bool L2>
inline void rows_in_turn(const float* rows, std::int64_t stride, const float* query, std::int64_t dim, float* out) {
    vec acc[W];
    for (int r = 0; r < W; ++r, rows += stride) {
        vec sum = {};
        for (std::int64_t i = 0; i < dim; i += W) {
            const vec q = load(query + i), x = load(rows + i);
            if constexpr (L2) {
                const vec t = q - x;
                sum += t * t;
            } else {
                sum += q * x;
            }
        }
        acc[r] = sum;
    }
    const vec sums = sum_lanes(acc);
    std::memcpy(out, &sums, sizeof(sums));
}

template <bool L2, int C, int Fetch>
inline void tiles(const float* rows, std::int64_t stride, const float* const* queries, std::int64_t dim, float* out,
                  const char*& next) {
    constexpr int R = W / C;
    for (int r = 0; r < kBlockRows; r += R) tile<L2, C, Fetch>(rows + r * stride, stride, queries, dim, out + r, next);
}

template <bool L2>
void block(const float* rows, std::int64_t stride, const float* const* queries, int n, std::int64_t dim, float* out,
           const void* next, const void* later) {
    // A step of C queries reads W * W / C floats of this block: so many lines of the next one keep pace in one pass over
    // the block. Where there are more passes, each fetches a share: a burst would wait for memory.
    constexpr int kLines = W * W / 16;
    const char* at = static_cast<const char*>(next);
    int q = 0;
    if (n == 1 && next == nullptr) {
        for (int r = 0; r < kBlockRows; r += W) rows_in_turn<L2>(rows + r * stride, stride, queries[0], dim, out + r);
        return;
    }
    const auto four = [&]<int Fetch>() {
        tiles<L2, 4, Fetch>(rows, stride, queries + q, dim, out + q * kBlockRows, at);
        q += 4;
    };
    if (next != nullptr) {
        if (n >= 8 && kLines >= 16) {  // enough lines a step that they can be shared
            constexpr int kQuarter = kLines / 16, kHalf = kLines / 8;
            if (n >= kFetchQueries) {
                for (int pass = 0; pass < kFetchQueries / kTileQueries; ++pass) four.template operator()<kQuarter>();
            } else if (n >= 12) {
                four.template operator()<kHalf>();
                four.template operator()<kQuarter>();
                four.template operator()<kQuarter>();
            } else {
                four.template operator()<kHalf>();
                four.template operator()<kHalf>();
            }
        } else if (n >= 4) {
            four.template operator()<kLines / 4>();
        } else if (n >= 2) {
            tiles<L2, 2, kLines / 2>(rows, stride, queries, dim, out, at);
            q = 2;
        } else {
            tiles<L2, 1, kLines>(rows, stride, queries, dim, out, at);
            q = 1;
        }
    }
    if (later != nullptr && n > kFetchQueries && kLines >= 16) {
        at = static_cast<const char*>(later);
        while (q + 4 <= n) four.template operator()<kLines / 16>();
    }
    for (; q + 4 <= n; q += 4) tiles<L2, 4, 0>(rows, stride, queries + q, dim, out + q * kBlockRows, at);
    if (q + 2 <= n) {
        tiles<L2, 2, 0>(rows, stride, queries + q, dim, out + q * kBlockRows, at);
        q += 2;
    }
    if (q < n) tiles<L2, 1, 0>(rows, stride, queries + q, dim, out + q * kBlockRows, at);
}

std::uint32_t at_most(const float* values, float limit) {
#if HYBRIDINDEX_LANES == 16 && defined(__AVX512F__)
    return _mm512_cmp_ps_mask(_mm512_loadu_ps(values), _mm512_set1_ps(limit), _CMP_LE_OQ);
#elif HYBRIDINDEX_LANES == 8 && defined(__AVX__)
    const __m256 l = _mm256_set1_ps(limit);
    return static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(values), l, _CMP_LE_OQ))) |
           static_cast<std::uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(_mm256_loadu_ps(values + 8), l, _CMP_LE_OQ))) << 8;
#else
    std::uint32_t mask = 0;
    for (int i = 0; i < kBlockRows; ++i) mask |= static_cast<std::uint32_t>(values[i] <= limit) << i;
    return mask;
#endif
}

// W bytes as floats.
inline vec load_codes(const std::uint8_t* codes) {
#if HYBRIDINDEX_LANES == 16 && defined(__AVX512F__)
    return reinterpret_cast<vec>(
        _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)))));
#elif HYBRIDINDEX_LANES == 8 && defined(__AVX2__)
    return reinterpret_cast<vec>(
        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes)))));
#else
    vec out;
    for (int i = 0; i < W; ++i) out[i] = static_cast<float>(codes[i]);
    return out;
#endif
}

void decode_u8(const std::uint8_t* codes, const float* scale, const float* offset, std::int64_t dim, float* out) {
    std::int64_t i = 0;
    for (; i + W <= dim; i += W) {
        const vec value = load(offset + i) + load(scale + i) * load_codes(codes + i);
        std::memcpy(out + i, &value, sizeof(value));
    }
    for (; i < dim; ++i) out[i] = offset[i] + scale[i] * static_cast<float>(codes[i]);
}

// Sums as tile() does, pair by pair: lanes in the same order, so that a pair has one distance.
template <bool L2, bool Fetch>
inline void pairs_of(const float* const* rows, const float* const* queries, int n, std::int64_t dim, float* out,
                     const float* const* ahead) {
    for (int first = 0; first < n; first += 4, rows += 4, queries += 4) {
        const int here = n - first < 4 ? n - first : 4;
        vec acc[4] = {};
        for (std::int64_t i = 0; i < dim; i += W)
#pragma GCC unroll 4
            for (int pair = 0; pair < 4; ++pair) {
                const int at = pair < here ? pair : 0;
                if constexpr (Fetch)
                    if (W == 16 || i % 16 == 0) __builtin_prefetch(ahead[first + at] + i, 0, 3);
                const vec q = load(queries[at] + i), x = load(rows[at] + i);
                if constexpr (L2) {
                    const vec t = q - x;
                    acc[pair] += t * t;
                } else {
                    acc[pair] += q * x;
                }
            }
        vec sums = fold<2>(fold<1>(acc[0], acc[1]), fold<1>(acc[2], acc[3]));
        if constexpr (W >= 8) sums = fold<(W >= 8 ? 4 : 1)>(sums, sums);
        if constexpr (W >= 16) sums = fold<(W >= 16 ? 8 : 1)>(sums, sums);
        std::memcpy(out + first, &sums, static_cast<std::size_t>(here) * 4);
    }
}

template <bool L2>
void pairs(const float* const* rows, const float* const* queries, int n, std::int64_t dim, float* out,
           const float* const* ahead) {
    if (ahead != nullptr)
        pairs_of<L2, true>(rows, queries, n, dim, out, ahead);
    else
        pairs_of<L2, false>(rows, queries, n, dim, out, ahead);
}

void decode_bf16(const std::uint8_t* codes, std::int64_t dim, float* out) {
    for (std::int64_t i = 0; i < dim; ++i) {
        std::uint16_t half;
        std::memcpy(&half, codes + 2 * i, 2);
        const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

void decode_f16(const std::uint8_t* codes, std::int64_t dim, float* out) {
    std::int64_t i = 0;
#if HYBRIDINDEX_LANES == 16 && defined(__AVX512F__)
    for (; i + 16 <= dim; i += 16)
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + 2 * i))));
#elif HYBRIDINDEX_LANES == 8 && defined(__F16C__)
    for (; i + 8 <= dim; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 2 * i))));
#endif
    for (; i < dim; ++i) {
        // Re-biases the exponent in float arithmetic: exact, subnormals included; infinities and NaN are restored.
        std::uint16_t half;
        std::memcpy(&half, codes + 2 * i, 2);
        const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
        float value;
        std::memcpy(&value, &magnitude, 4);
        value *= 0x1p112f;
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits |= (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
        bits |= static_cast<std::uint32_t>(half & 0x8000u) << 16;
        std::memcpy(out + i, &bits, 4);
    }
}

// -- The filter of whole numbers

// Sums of (c - 128)^2, lane by lane: whole numbers, exact in 32 bits up to 2^17 dimensions.
inline ivec centred_squares(const std::uint8_t* codes, std::int64_t dim) {
    ivec sums = {};
    std::int64_t i = 0;
#if HYBRIDINDEX_LANES == 16 && defined(__AVX512VNNI__)
    // With s = c - 128, as signed bytes: c s + 128 (-s - 1) = s^2 - 128. Bytes that are not there are 128.
    const __m512i middle = _mm512_set1_epi8(static_cast<char>(128)), ones = _mm512_set1_epi8(-1);
    __m512i products = _mm512_setzero_si512(), middles = _mm512_setzero_si512();
    for (; i < dim; i += 64) {
        const __mmask64 there = dim - i < 64 ? (std::uint64_t{1} << (dim - i)) - 1 : ~std::uint64_t{0};
        const __m512i c = _mm512_mask_loadu_epi8(middle, there, codes + i), s = _mm512_xor_si512(c, middle);
        products = _mm512_dpbusd_epi32(products, c, s);
        middles = _mm512_dpbusd_epi32(middles, middle, _mm512_xor_si512(s, ones));
    }
    const __m512i lost = _mm512_set1_epi32(static_cast<int>(i / 64 * 4 * 128));
    sums = reinterpret_cast<ivec>(_mm512_add_epi32(_mm512_add_epi32(products, middles), lost));
#endif
    for (; i + W <= dim; i += W) {
        const ivec c = __builtin_convertvector(load_codes(codes + i), ivec) - 128;
        sums += c * c;
    }
    for (; i < dim; ++i) {
        const std::int32_t c = static_cast<std::int32_t>(codes[i]) - 128;
        sums[i % W] += c * c;
    }
    return sums;
}

inline vec scaled_squares(const std::uint8_t* codes, const float* scale, std::int64_t dim) {
    vec sums = {};
    std::int64_t i = 0;
    for (; i + W <= dim; i += W) {
        const vec c = load(scale + i) * load_codes(codes + i);
        sums += c * c;
    }
    for (; i < dim; ++i) {
        const float c = scale[i] * static_cast<float>(codes[i]);
        sums[i % W] += c * c;
    }
    return sums;
}

inline void roots(ivec squares, float* out) {
#if HYBRIDINDEX_LANES == 16 && defined(__AVX512F__)
    _mm512_storeu_ps(out, _mm512_sqrt_ps(_mm512_cvtepi32_ps(reinterpret_cast<__m512i>(squares))));
#else
    for (int r = 0; r < W; ++r) out[r] = std::sqrt(static_cast<float>(squares[r]));
#endif
}

constexpr float kLargestSquare = 0x1p126f;

void row_terms(const std::uint8_t* rows, std::int64_t stride, int n_rows, std::int64_t code_dim, const float* scale,
               RowTerms* out) {
    for (int first = 0; first < n_rows; first += W, rows += W * stride) {
        // Lanes of W rows, folded together. Rows that are not there count the first one again.
        ivec centred[W];
        for (int r = 0; r < W; ++r) centred[r] = centred_squares(rows + (first + r < n_rows ? r : 0) * stride, code_dim);
        const ivec squares = sum_lanes(centred);
        roots(squares, out->length + first);
        if (scale == nullptr) {
            for (int r = 0; r < W; ++r) out->square[first + r] = 0;
            continue;
        }
        vec scaled[W];
        for (int r = 0; r < W; ++r)
            scaled[r] = scaled_squares(rows + (first + r < n_rows ? r : 0) * stride, scale, code_dim);
        const vec sums = sum_lanes(scaled);
        // A smaller square rules out less: what overflows must stay a number.
        for (int r = 0; r < W; ++r) out->square[first + r] = sums[r] < kLargestSquare ? sums[r] : kLargestSquare;
    }
}

// Half as many floats as a register holds: as doubles they fill it.
constexpr int H = W / 2;
typedef float hvec __attribute__((vector_size(H * 4)));
typedef std::int32_t hivec __attribute__((vector_size(H * 4)));
typedef std::int8_t hbvec __attribute__((vector_size(H)));
typedef double dvec __attribute__((vector_size(H * 8)));

// The n floats that are there, and zeros.
inline hvec load_half(const float* p, std::int64_t n) {
    hvec out = {};
    if (n >= H)
        std::memcpy(&out, p, sizeof(out));
    else
        std::memcpy(&out, p, static_cast<std::size_t>(n) * 4);
    return out;
}
template <typename V, typename T>
inline void store_half(T* p, V values, std::int64_t n) {
    if (n >= H)
        std::memcpy(p, &values, sizeof(values));
    else
        std::memcpy(p, &values, static_cast<std::size_t>(n) * sizeof(T));
}
inline dvec wide(hvec x) { return __builtin_convertvector(x, dvec); }
inline dvec size_of(dvec x) { return x < 0 ? -x : x; }
inline double sum_of(dvec x) {
    double sum = 0;
    for (int lane = 0; lane < H; ++lane) sum += x[lane];
    return sum;
}

ScaledQuery scale_query(const float* query, const float* scale, const float* offset, std::int64_t dim, bool inner_product,
                        float* w) {
    dvec constant = {}, magnitude = {};
    for (std::int64_t i = 0; i < dim; i += H) {
        const std::int64_t n = dim - i;
        const dvec x = wide(load_half(query + i, n)), a = wide(load_half(offset + i, n)), b = wide(load_half(scale + i, n));
        const dvec most = size_of(a) + 255 * size_of(b), far = inner_product ? x : x - a;
        store_half(w + i, __builtin_convertvector(inner_product ? x * b : -2 * far * b, hvec), n);
        constant += far * (inner_product ? a : far);
        magnitude += inner_product ? size_of(x) * most : (size_of(x) + most) * (size_of(x) + most);
    }
    return {sum_of(constant), sum_of(magnitude)};
}

// Any step is a right one; below this its inverse is no longer a float.
constexpr float kLeastStep = 1e-30f;

QueryWeights weigh(const float* w, std::int64_t dim, std::int8_t* weights) {
    hvec sizes = {};
    for (std::int64_t i = 0; i < dim; i += H) {
        const hvec x = load_half(w + i, dim - i), size = x < 0 ? -x : x;
        sizes = size > sizes ? size : sizes;
    }
    float largest = 0;
    for (int lane = 0; lane < H; ++lane) largest = sizes[lane] > largest ? sizes[lane] : largest;
    const float fitting = largest / 127, step = largest == 0 ? 1.0f : fitting < kLeastStep ? kLeastStep : fitting;
    const float inverse = 1 / step;
    // Adding and taking away leaves a whole number, as the sum has no place for the rest.
    constexpr float kWhole = 0x1.8p23f;
    dvec sums = {}, squares = {};
    for (std::int64_t i = 0; i < dim; i += H) {
        const hvec exact = load_half(w + i, dim - i);
        hvec whole = exact * inverse + kWhole - kWhole;
        whole = whole > 127.0f ? 127.0f + hvec{} : whole;
        whole = whole < -127.0f ? -127.0f + hvec{} : whole;
        store_half(weights + i, __builtin_convertvector(__builtin_convertvector(whole, hivec), hbvec), dim - i);
        const dvec error = wide(exact) - static_cast<double>(step) * wide(whole);
        sums += error;
        squares += error * error;
    }
    return {step, sum_of(sums), std::sqrt(sum_of(squares))};
}

// Without tiles of their own hardware queries stay rows of dim bytes.

std::int64_t packed_bytes(int n, std::int64_t dim) { return n * dim; }

void pack(const std::int8_t* const* queries, int n, std::int64_t dim, std::int8_t* packed) {
    for (int q = 0; q < n; ++q) std::memcpy(packed + q * dim, queries[q], static_cast<std::size_t>(dim));
}

#if HYBRIDINDEX_LANES == 16 && defined(__AVX512VNNI__)
inline ivec dot_step(ivec acc, const std::uint8_t* u, const std::int8_t* s) {
    return reinterpret_cast<ivec>(_mm512_dpbusd_epi32(reinterpret_cast<__m512i>(acc), _mm512_loadu_si512(u), _mm512_loadu_si512(s)));
}
constexpr int kDotBytes = 64;
constexpr bool kFastDots = true;
#elif HYBRIDINDEX_LANES == 8 && defined(__AVX2__)
inline ivec dot_step(ivec acc, const std::uint8_t* u, const std::int8_t* s) {
    const __m256i a = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(u)));
    const __m256i b = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(s)));
    return acc + reinterpret_cast<ivec>(_mm256_madd_epi16(a, b));
}
constexpr int kDotBytes = 16;
constexpr bool kFastDots = true;
#else
inline ivec dot_step(ivec acc, const std::uint8_t* u, const std::int8_t* s) {
    for (int i = 0; i < W; ++i) acc[i] += static_cast<std::int32_t>(u[i]) * static_cast<std::int32_t>(s[i]);
    return acc;
}
constexpr int kDotBytes = W;
constexpr bool kFastDots = false;
#endif

// C queries against W / C rows. Few queries take one row after the other, which is a single stream of memory.
template <int C, bool Fetch>
inline void dot_tile(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* queries, std::int64_t dim,
                     std::int32_t* out, const char*& next) {
    constexpr int R = W / C;
    ivec acc[W] = {};
    if constexpr (C < kTileQueries) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r, rows += stride) {
            ivec sums[C] = {};
            for (std::int64_t i = 0; i < dim; i += kDotBytes) {
                if constexpr (Fetch)
                    if (kDotBytes >= 64 || i % 64 == 0) __builtin_prefetch(next, 0, 2), next += 64;
#pragma GCC unroll 16
                for (int c = 0; c < C; ++c) sums[c] = dot_step(sums[c], rows + i, queries + c * dim + i);
            }
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c) acc[c * R + r] = sums[c];
        }
    } else {
        // Lines of the next block for every step: as many bytes as are read of this one.
        constexpr int kStep = R * kDotBytes / 64, kLines = kStep > 0 ? kStep : 1;
        for (std::int64_t i = 0; i < dim; i += kDotBytes) {
            if constexpr (Fetch) {
#pragma GCC unroll 16
                for (int line = 0; line < kLines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
            }
#pragma GCC unroll 16
            for (int c = 0; c < C; ++c)
#pragma GCC unroll 16
                for (int r = 0; r < R; ++r)
                    acc[c * R + r] = dot_step(acc[c * R + r], rows + r * stride + i, queries + c * dim + i);
        }
    }
    const ivec sums = sum_lanes(acc);
#pragma GCC unroll 16
    for (int c = 0; c < C; ++c)
        std::memcpy(out + c * kBlockRows, reinterpret_cast<const char*>(&sums) + c * R * 4, R * 4);
}

void dots(const std::uint8_t* rows, std::int64_t row_bytes, const std::int8_t* query, std::int32_t* out, const void* next) {
    const char* at = static_cast<const char*>(next);
    for (int r = 0; r < kBlockRows; r += W) {
        if (next != nullptr)
            dot_tile<1, true>(rows + r * row_bytes, row_bytes, query, row_bytes, out + r, at);
        else
            dot_tile<1, false>(rows + r * row_bytes, row_bytes, query, row_bytes, out + r, at);
    }
}

template <int C, bool Fetch>
inline int filter_tiles(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* queries, std::int64_t dim,
                        const QueryLimits& limits, const RowTerms& terms, int first, std::uint32_t* found,
                        const void* next) {
    constexpr int R = W / C;
    std::int32_t dots[C * kBlockRows];
    const char* at = Fetch ? static_cast<const char*>(next) : nullptr;
    for (int r = 0; r < kBlockRows; r += R) dot_tile<C, Fetch>(rows + r * stride, stride, queries, dim, dots + r, at);
    int n_found = 0;
    for (int c = 0; c < C; ++c) {
        float values[kBlockRows];
        const float square = limits.square[first + c], length = limits.length[first + c];
        for (int r = 0; r < kBlockRows; ++r)
            values[r] = static_cast<float>(dots[c * kBlockRows + r]) + square * terms.square[r] - length * terms.length[r];
        for (std::uint32_t mask = at_most(values, limits.base[first + c]); mask != 0; mask &= mask - 1)
            found[n_found++] = static_cast<std::uint32_t>(first + c) << 4 | static_cast<std::uint32_t>(__builtin_ctz(mask));
    }
    return n_found;
}

int filter(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n, std::int64_t dim,
           const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found, const void* next) {
    int q = 0, count = 0;
    const auto pass = [&]<int C>() {
        // The first pass over a block fetches the next one.
        count += q == 0 && next != nullptr
                     ? filter_tiles<C, true>(rows, stride, packed, dim, limits, terms, 0, found, next)
                     : filter_tiles<C, false>(rows, stride, packed + q * dim, dim, limits, terms, q, found + count, next);
        q += C;
    };
    while (q + 4 <= n) pass.template operator()<4>();
    if (q + 2 <= n) pass.template operator()<2>();
    if (q < n) pass.template operator()<1>();
    return count;
}

#if HYBRIDINDEX_LANES == 16 && defined(__AVX512VNNI__)
// A register holds 4 bytes of 16 rows, and those of a query go to all of them: sums need no folding.
template <int Q, bool Fetch>
inline int filter_lanes(const std::uint8_t* rows, const std::int8_t* queries, std::int64_t row_bytes, const QueryLimits& limits,
                        const RowTerms& terms, int first, std::uint32_t* found, const void* next) {
    __m512i acc[Q];
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) acc[q] = _mm512_setzero_si512();
    const char* at = static_cast<const char*>(next);
    for (std::int64_t i = 0; i < row_bytes; i += 4, rows += 64, queries += 64) {
        if constexpr (Fetch) __builtin_prefetch(at, 0, 2), at += 64;
        const __m512i row = _mm512_loadu_si512(rows);
#pragma GCC unroll 16
        for (int q = 0; q < Q; ++q) {
            std::int32_t four;
            std::memcpy(&four, queries + 4 * q, 4);
            acc[q] = _mm512_dpbusd_epi32(acc[q], row, _mm512_set1_epi32(four));
        }
    }
    const __m512 squares = _mm512_loadu_ps(terms.square), lengths = _mm512_loadu_ps(terms.length);
    int n_found = 0;
#pragma GCC unroll 16
    for (int q = 0; q < Q; ++q) {
        const __m512 values =
            _mm512_sub_ps(_mm512_add_ps(_mm512_cvtepi32_ps(acc[q]),
                                        _mm512_mul_ps(_mm512_set1_ps(limits.square[first + q]), squares)),
                          _mm512_mul_ps(_mm512_set1_ps(limits.length[first + q]), lengths));
        for (std::uint32_t mask = _mm512_cmp_ps_mask(values, _mm512_set1_ps(limits.base[first + q]), _CMP_LE_OQ); mask != 0;
             mask &= mask - 1)
            found[n_found++] = static_cast<std::uint32_t>(first + q) << 4 | static_cast<std::uint32_t>(__builtin_ctz(mask));
    }
    return n_found;
}

int filter_interleaved(const std::uint8_t* rows, const std::int8_t* queries, int n, std::int64_t row_bytes,
                       const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found, const void* next) {
    int q = 0, count = 0;
    const auto pass = [&]<int Q>() {
        const std::int8_t* const own = queries + (q & -16) * row_bytes + (q & 15) * 4;
        count += q == 0 && next != nullptr
                     ? filter_lanes<Q, true>(rows, own, row_bytes, limits, terms, 0, found, next)
                     : filter_lanes<Q, false>(rows, own, row_bytes, limits, terms, q, found + count, nullptr);
        q += Q;
    };
    while (q + 16 <= n) pass.template operator()<16>();
    if (q + 8 <= n) pass.template operator()<8>();
    if (q + 4 <= n) pass.template operator()<4>();
    while (q < n) pass.template operator()<1>();
    return count;
}
#else
constexpr decltype(BlockKernels::filter_interleaved) filter_interleaved = nullptr;
#endif

void nothing() {}

constexpr BlockKernels make_kernels(const char* name) {
    return {.name = name,
            .inner_products = block<false>,
            .squared_l2 = block<true>,
            .inner_product_pairs = pairs<false>,
            .squared_l2_pairs = pairs<true>,
            .at_most = at_most,
            .decode_f16 = decode_f16,
            .decode_bf16 = decode_bf16,
            .decode_u8 = decode_u8,
            .dots = dots,
            .fast_dots = kFastDots,
            .packed_bytes = packed_bytes,
            .pack = pack,
            .filter = filter,
            .filter_interleaved = filter_interleaved,
            .filter_halves = nullptr,
            .begin = nothing,
            .end = nothing,
            .row_terms = row_terms,
            .scale_query = scale_query,
            .weigh = weigh,
            .round_rows = nullptr,
            .round_query = nullptr};
}

}  // namespace
}  // namespace hybridindex
