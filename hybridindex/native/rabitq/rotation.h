// The random rotation, and sums in an order that is the same everywhere. Equal to hybridindex/index/rabitq/rotation.py, to
// the bit. Pure.
#pragma once
#include <cstdint>

namespace hybridindex {

// Rounds of signs (rounds, dims) and fast Hadamard transforms. dims is a multiple of 32.
struct Rotation {
    const float* signs;
    std::int64_t rounds;
    std::int64_t dims;

    // x: dims floats, changed in place.
    void apply(float* x) const;
};

// <a, b> of n floats, n a multiple of 16: sixteen partial sums.
float lane_product(const float* a, const float* b, std::int64_t n);

}  // namespace hybridindex
