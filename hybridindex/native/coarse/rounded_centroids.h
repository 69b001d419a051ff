// Centroids in bytes: which lists may be among the nearest of a query, for a quarter of what centroids take to read.
//
// Each centroid and each query is a vector of whole numbers times a step, plus an error of known length. So a distance is
// known to within a bound, and the lists that are left out are farther than others by more than both bounds.
#pragma once
#include <cstdint>
#include <vector>

#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

namespace hybridindex {

// Lists in ascending order, and what finding them takes; of one thread.
struct NearLists {
    AlignedBuffer<std::int32_t> lists;
    std::int64_t count = 0;

    AlignedBuffer<float> weights;
    AlignedBuffer<std::int8_t> whole;
    AlignedBuffer<float> low, high;
    AlignedBuffer<std::int32_t> buckets;
};

// Safe to use from several threads at once.
class RoundedCentroids {
public:
    // Of rows of padded_dim numbers. Nothing is rounded where that does not pay: see worth_rounding.
    RoundedCentroids(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim, bool inner_product,
                     const BlockKernels& kernels);

    // Whether looking for so many lists is faster than comparing all.
    bool pays(std::int64_t p) const { return !steps_.empty() && p <= nlist_ / 3; }
    // Finds lists of which the p nearest are some, nearest as the kernels compute distances and by list where these are
    // equal. False: they would be most, or a number is too large for the bounds.
    bool find_near(const float* query, std::int64_t p, NearLists& near) const;

private:
    const std::int64_t nlist_, dim_, row_bytes_;
    const bool inner_product_;
    const BlockKernels& kernels_;
    // Numbers plus 128, in whole blocks; of each centroid its step, the length of its error and its own, rounded up, and for
    // distances the square of its length.
    AlignedBuffer<std::uint8_t> whole_;
    std::vector<float> steps_, errors_, lengths_, squares_;
};

}  // namespace hybridindex
