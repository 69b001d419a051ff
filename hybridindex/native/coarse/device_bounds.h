// What a device's products with centroids say of those that it left out.
//
// A device multiplies matrices, and rounds in a way of its own. How far it may be from the truth is known, so its order
// proves that all lists beyond a certain place are farther than others, as the host computes distances.
#pragma once
#include <cstdint>

namespace hybridindex {

class DeviceBounds {
public:
    // Of rows of padded_dim numbers.
    DeviceBounds(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim, bool inner_product);

    // A lower bound of the host's distance to each list that a device found to be no nearer than `farthest`; smaller is
    // nearer. The device computes -<q, c>, or |c|^2 / 2 - <q, c>, with products of TF32 at worst. No number: nothing is known.
    double least_distance(const float* query, float farthest) const;

private:
    const std::int64_t dim_;
    const bool inner_product_;
    double longest_ = 0;  // centroid; no number where one is none
};

}  // namespace hybridindex
