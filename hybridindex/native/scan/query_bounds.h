// What a filter may rule out: a query in the filter's numbers, and how far these can be from its exact distances.
#pragma once
#include <cstdint>

#include "simd/block_kernels.h"

namespace hybridindex {

// No row x can enter the query's answer unless, with dot as the filter computes it,
//   step * dot + square * terms.square - length * terms.length <= limit + rounding - constant.
struct QueryBound {
    double constant, step, square, length, rounding;

    // Every row passes.
    static QueryBound none();
    // QueryLimits::base for a limit; the other two limits are square / step and length / step.
    float base(double limit) const;
};

// Rows are bytes c that stand for offset + scale * c; the query becomes dim signed bytes. Inner products come with the
// query negated.
QueryBound bound_of_bytes(const float* query, const float* scale, const float* offset, std::int64_t dim, bool inner_product,
                          const BlockKernels& kernels, float* scratch, std::int8_t* weights);

// Rows are floats, rounded to bfloat16; the query becomes dim halves.
QueryBound bound_of_halves(const float* query, std::int64_t dim, bool inner_product, const BlockKernels& kernels,
                           std::uint16_t* halves);

}  // namespace hybridindex
