// One source for every instruction set. The including file defines HYBRIDINDEX_LANES (floats in a register) and is
// compiled with that set's flags; everything here has internal linkage, so that no code for a newer CPU can be picked
// for an older one by the linker.
#include "simd/filter_kernels_impl.h"
#include "simd/lanes_impl.h"

namespace hybridindex {
namespace {

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
