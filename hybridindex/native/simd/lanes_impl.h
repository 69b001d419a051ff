// Registers of HYBRIDINDEX_LANES floats, for the kernels of one instruction set (simd/block_kernels_impl.h).
#pragma once
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

}  // namespace
}  // namespace hybridindex
