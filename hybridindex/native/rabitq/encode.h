// Codes of rows, in the blocks of the file. Equal to hybridindex/index/rabitq/encode.py, to the bit.
#pragma once
#include <cstdint>

#include "rabitq/rotation.h"

namespace hybridindex {

// How vectors are coded: see docs/index-format.md.
struct CodeFormat {
    int bits;                 // 1, 2 or 4
    std::int64_t dim;         // of rows and queries
    float f_scale, g_scale;
    bool l2;
    Rotation rotation;

    std::int64_t dims() const { return rotation.dims; }
    std::int64_t chunks() const;
    std::int64_t plane_bytes() const { return bits * chunks() * 64; }
    std::int64_t block_bytes() const { return plane_bytes() + (l2 ? 128 : 64); }
};

// Writes the blocks of n rows (n, dim) of a list; `out` is ceil(n / 16) blocks.
void encode_rows(const CodeFormat& format, const float* rows, std::int64_t n, const float* centroid, std::uint8_t* out);

}  // namespace hybridindex
