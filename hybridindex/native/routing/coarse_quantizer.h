// Coarse quantization with a flat quantizer: the lists whose centroids are nearest to a query.
//
// A distance is summed in one order, which the kernels set; equal distances are ordered by list. What a query gets
// depends neither on the queries beside it nor on how many they are.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>

#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

namespace hybridindex {

// Safe to use from several threads at once, without a lock.
class CoarseQuantizer {
public:
    // Copies the centroids, (nlist, dim).
    CoarseQuantizer(const float* centroids, std::int64_t nlist, std::int64_t dim, bool inner_product,
                    const BlockKernels& kernels);
    ~CoarseQuantizer();

    const BlockKernels& kernels() const { return kernels_; }
    std::int64_t nlist() const { return nlist_; }
    std::int64_t dim() const { return dim_; }

    // Of n queries the p nearest lists each, nearest first, with inner products or squared distances; p is 1 to nlist.
    // A centroid whose distance is no number is never found: the rest is -1, as far away as can be.
    void quantize(const float* queries, std::int64_t n, std::int64_t p, std::int64_t* lists, float* distances);

private:
    struct Scratch;

    const std::int64_t nlist_, dim_, padded_dim_;
    const bool inner_product_;
    const BlockKernels& kernels_;
    AlignedBuffer<float> centroids_;  // padded to whole blocks and steps
    std::atomic<Scratch*> idle_{nullptr};  // of the call before; one at the same time brings its own
};

}  // namespace hybridindex
