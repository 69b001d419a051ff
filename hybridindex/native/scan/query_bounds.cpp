#include "scan/query_bounds.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace hybridindex {
namespace {

// Below it the filter's own arithmetic would underflow.
constexpr double kLeastStep = 0x1p-90;
// Lengths of queries between which no product overflows or vanishes that matters.
constexpr double kShortest = 0x1p-40, kLongest = 0x1p60;
// More than what vanishes because it is too small for a float: of a sum of products, and of the length of a row, whose
// squares do, per square root of a dimension.
constexpr double kVanished = 0x1p-80, kVanishedLength = 0x1p-74;

}  // namespace

QueryBound QueryBound::none() { return {-std::numeric_limits<double>::infinity(), 1, 0, 0, 0}; }

float QueryBound::base(double limit) const {
    const double base = (limit + rounding - constant) / step;
    return static_cast<float>(base + std::abs(base) * 0x1p-22);
}

// The distance to c is constant + square(c) + sum of w[i] c[i], w = step * weights + error, and the sum of error[i] c[i]
// is 128 * sum of error[i] + sum of error[i] (c[i] - 128), where the last sum is at least -|error| |c - 128|
// (Cauchy-Schwarz). `constant` has the middle part in it.
QueryBound bound_of_bytes(const float* query, const float* scale, const float* offset, std::int64_t dim, bool inner_product,
                          const BlockKernels& kernels, float* scratch, std::int8_t* weights) {
    // distance = <x, a + b c>, or the sum of ((x - a) - b c)^2.
    const auto [constant, magnitude] = kernels.scale_query(query, scale, offset, dim, inner_product, scratch);
    const QueryWeights made = kernels.weigh(scratch, dim, weights);
    if (!(made.step > kLeastStep)) return QueryBound::none();
    // Rounding: of w, of the exact distance and what it is compared with, of the row's square, of the filter.
    const double rounding = magnitude * static_cast<double>(dim + 16) * 0x1p-20;
    return {constant + 128 * made.error_sum, made.step, inner_product ? 0.0 : 1.0, made.error_length * (1 + 0x1p-20),
            rounding};
}

// The distance is <w, x> with w the query, or |query|^2 + |x|^2 + <w, x> with w = -2 query. The filter has w' and x' for
// w and x: |<w, x> - <w', x'>| <= |w - w'| |x| + |w'| |x - x'|, and rounding to 8 bits gives |x - x'| <= 2^-8 |x|. What
// float32 sums lose, here and in the exact distance, is below dim * 2^-22 of the lengths' product or of their squares.
QueryBound bound_of_halves(const float* query, std::int64_t dim, bool inner_product, const BlockKernels& kernels,
                           std::uint16_t* halves) {
    const float factor = inner_product ? 1.0f : -2.0f;
    const auto [square, lost, kept] = kernels.round_query(query, factor, dim, halves);
    const double size = std::sqrt(square);
    if (!(size >= kShortest && size <= kLongest)) return QueryBound::none();
    const double sums = static_cast<double>(dim + 16) * 0x1p-20;
    const double length = (std::sqrt(lost) + std::sqrt(kept) * (0x1p-8 + sums)) * (1 + sums);
    // Elements below 2^-75 have no square, below 2^-126 they are nothing to the tiles: |x| may lack so much.
    if (inner_product) return {0, 1, 0, length, kVanished + size * std::sqrt(static_cast<double>(dim)) * kVanishedLength};
    return {square / 4, 1, 1 - sums, length, square * sums + kVanished};
}

}  // namespace hybridindex
