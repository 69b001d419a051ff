// Centroids in bytes, for many queries at once: pairs of a query and a list that may be near, for a quarter of the time that
// products of floats take.
//
// Element i of a centroid is offset[i] + scale[i] * byte, plus an error; the longest error of all is known. So a list that the
// filter leaves out is farther than the limit by more than all that was rounded.
#pragma once
#include <cstdint>
#include <vector>

#include "scan/query_bounds.h"
#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

namespace hybridindex {

// Safe to use from several threads at once.
class CentroidBytes {
public:
    // A query in the filter's numbers.
    struct Query {
        QueryBound bound;
        double length;
    };

    // Of rows of padded_dim numbers. Empty where rounding does not pay: see worth_rounding.
    CentroidBytes(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim, bool inner_product,
                  const BlockKernels& kernels);

    bool empty() const { return terms_.empty(); }
    std::int64_t row_bytes() const { return row_bytes_; }

    // `query` is negated for inner products; `scratch` has room for dim numbers, `whole` for row_bytes().
    Query query(const float* query, float* scratch, std::int8_t* whole) const;
    // QueryLimits::base: lists that are no farther than `limit` pass.
    float base(const Query& query, float limit) const;

    // Queries for near(): `packed` has room for packed_bytes(n), at a multiple of 64.
    std::int64_t packed_bytes(std::int64_t n) const;
    void pack(const std::int8_t* const* queries, int n, std::int8_t* packed) const;
    // BlockKernels::filter on the block of lists from `first`, a multiple of kBlockRows; fetches that from `next` ahead,
    // where there is one.
    int near(std::int64_t first, const std::int8_t* packed, int n, const QueryLimits& limits, std::uint32_t* found,
             std::int64_t next) const;

private:
    const std::uint8_t* block(std::int64_t first) const { return bytes_.data() + first * row_bytes_; }

    const std::int64_t dim_, row_bytes_;
    const bool inner_product_;
    const BlockKernels& kernels_;
    std::vector<float> scale_, offset_;
    AlignedBuffer<std::uint8_t> bytes_;  // in whole blocks, interleaved where the CPU compares them so
    std::vector<RowTerms> terms_;
    double error_ = 0;  // the length of the longest one, rounded up
};

}  // namespace hybridindex
