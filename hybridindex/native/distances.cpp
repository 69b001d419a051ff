// Compiled with reassociation of sums (see CMakeLists.txt), which lets the compiler vectorise reductions. NaN and
// infinity keep their meaning. On x86-64 with glibc the loader picks the widest of three versions of each function.
#include "distances.h"

#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define HYBRIDINDEX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HYBRIDINDEX_CLONES
#endif

namespace hybridindex {

HYBRIDINDEX_CLONES
void inner_products(const float* row, const float* const* queries, std::int64_t dim, float* out) {
    const float *a = queries[0], *b = queries[1], *c = queries[2], *d = queries[3];
    float sa = 0, sb = 0, sc = 0, sd = 0;
    for (std::int64_t i = 0; i < dim; ++i) {
        const float r = row[i];
        sa += a[i] * r;
        sb += b[i] * r;
        sc += c[i] * r;
        sd += d[i] * r;
    }
    out[0] = sa, out[1] = sb, out[2] = sc, out[3] = sd;
}

HYBRIDINDEX_CLONES
void squared_l2(const float* row, const float* const* queries, std::int64_t dim, float* out) {
    const float *a = queries[0], *b = queries[1], *c = queries[2], *d = queries[3];
    float sa = 0, sb = 0, sc = 0, sd = 0;
    for (std::int64_t i = 0; i < dim; ++i) {
        const float r = row[i];
        sa += (a[i] - r) * (a[i] - r);
        sb += (b[i] - r) * (b[i] - r);
        sc += (c[i] - r) * (c[i] - r);
        sd += (d[i] - r) * (d[i] - r);
    }
    out[0] = sa, out[1] = sb, out[2] = sc, out[3] = sd;
}

HYBRIDINDEX_CLONES
std::int64_t first_row_beyond(const float* rows, std::int64_t n, std::int64_t dim, float limit) {
    for (std::int64_t row = 0; row < n; ++row, rows += dim) {
        float sum = 0;
        for (std::int64_t i = 0; i < dim; ++i) sum += rows[i] * rows[i];
        if (!(sum <= limit)) return row;
    }
    return n;
}

HYBRIDINDEX_CLONES
void decode_sq8(const std::uint8_t* code, const float* scale, const float* offset, std::int64_t dim, float* row) {
    for (std::int64_t i = 0; i < dim; ++i) row[i] = offset[i] + scale[i] * static_cast<float>(code[i]);
}

HYBRIDINDEX_CLONES
void decode_f16(const std::uint8_t* code, std::int64_t dim, float* row) {
    // Exact conversion by re-biasing the exponent in float arithmetic: subnormals come out right, infinities and NaN
    // are restored from the half's all-ones exponent.
    for (std::int64_t i = 0; i < dim; ++i) {
        std::uint16_t half;
        std::memcpy(&half, code + 2 * i, 2);
        const std::uint32_t sign = static_cast<std::uint32_t>(half & 0x8000u) << 16;
        const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
        float value;
        std::memcpy(&value, &magnitude, 4);
        value *= 0x1p112f;
        std::uint32_t bits;
        std::memcpy(&bits, &value, 4);
        bits |= (half & 0x7c00u) == 0x7c00u ? 0x7f800000u : 0u;
        bits |= sign;
        std::memcpy(row + i, &bits, 4);
    }
}

}  // namespace hybridindex
