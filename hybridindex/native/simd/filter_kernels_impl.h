// The filter of whole numbers: bounds of products of bytes, for the kernels of one instruction set
// (simd/block_kernels_impl.h).
#pragma once
#include "simd/lanes_impl.h"

namespace hybridindex {
namespace {

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

}  // namespace
}  // namespace hybridindex
