// sq8 only: queries as whole numbers, for the integer filter of the block kernels, and the bound that makes it exact.
//
// The distance of a query x to a row of bytes c is
//   constant + square(c) + sum of w[i] c[i],  w = step * weights + error,
// and sum of error[i] c[i] = 128 * sum of error[i] + sum of error[i] (c[i] - 128), where the last sum is at least
// -|error| |c - 128| (Cauchy-Schwarz). `constant` has the middle part in it, `rounding` bounds what float sums lose.
#pragma once
#include <cmath>
#include <cstdint>

#include "block_kernels.h"
#include "codes.h"

namespace hybridindex {

// Products of more bytes than this, 255 * 127 each, do not fit 32 bits.
constexpr std::int64_t kMostIntegerDim = 1 << 16;

// Whether rows are whole numbers that the filter can compare.
inline bool is_integer(const RowCodes& codes, bool has_centroids) {
    return codes.code == Code::u8 && !has_centroids && codes.dim <= kMostIntegerDim;
}

struct IntegerQuery {
    double constant, step, error_length, rounding;

    // QueryLimits, for one query. No row beyond `base` can be nearer than `limit`.
    float base(double limit) const {
        const double base = (limit + rounding - constant) / step;
        return static_cast<float>(base + std::abs(base) * 0x1p-22);
    }
    float square() const { return static_cast<float>(1 / step); }
    float length() const { return static_cast<float>(error_length / step * (1 + 0x1p-20)); }
};

// `query` (dim) as the kernels read it: negated for inner products. `w` is scratch (dim), `weights` receives dim bytes.
IntegerQuery make_integer_query(const BlockKernels& kernels, const RowCodes& codes, bool inner_product,
                                const float* query, float* w, std::int8_t* weights);

}  // namespace hybridindex
