// Rows of centroids, as those who round them to bytes see them.
#pragma once
#include <cmath>
#include <cstdint>

#include "simd/block_kernels.h"

namespace hybridindex {

// Fewer bytes of centroids stay in the second cache.
constexpr std::int64_t kLeastCentroidBytes = 512 << 10;
// With more of them sums of products of bytes leave their 32 bits.
constexpr std::int64_t kMostByteDims = 32768;
// So large no product of two numbers is: their bounds are numbers, too.
constexpr double kTooLarge = 1e15;

inline std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

inline double length_of(const float* x, std::int64_t dim) {
    double sum = 0;
    for (std::int64_t i = 0; i < dim; ++i) sum += static_cast<double>(x[i]) * x[i];
    return std::sqrt(sum);
}

// Whether to round them: not where all are in the cache anyway, where the CPU multiplies floats as fast, or where not all
// are numbers.
inline bool worth_rounding(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim,
                           const BlockKernels& kernels) {
    if (!kernels.fast_dots || nlist * dim * 4 < kLeastCentroidBytes || dim > kMostByteDims) return false;
    for (std::int64_t list = 0; list < nlist; ++list)
        if (!(length_of(rows + list * padded_dim, dim) < kTooLarge)) return false;
    return true;
}

}  // namespace hybridindex
