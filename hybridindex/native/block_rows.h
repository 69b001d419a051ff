// Blocks of rows as the kernels read them: kBlockRows rows of floats or of bytes, each padded with zeros.
#pragma once
#include <cstdint>

#include "block_kernels.h"
#include "codes.h"

namespace hybridindex {

constexpr std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

// Elements of a padded row of floats; bytes of a padded row of the integer filter.
constexpr std::int64_t padded_dim(std::int64_t dim) { return round_up(dim, kDimStep); }
constexpr std::int64_t padded_code(std::int64_t dim) { return round_up(dim, kCodeStep); }

// Whether rows can be read where they lie, without decoding.
inline bool is_direct(const RowCodes& codes, bool has_centroids) {
    return codes.code == Code::f32 && !has_centroids && codes.dim == padded_dim(codes.dim);
}

// One code as padded_dim(dim) floats, `centroid` (dim) added unless it is nullptr.
void decode_row(const BlockKernels& kernels, const RowCodes& codes, const std::uint8_t* code, const float* centroid,
                float* row);

}  // namespace hybridindex
