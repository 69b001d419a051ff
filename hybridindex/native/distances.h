// Distances of a few queries to one row. One file of its own, because it alone is compiled with reassociation.
#pragma once
#include <cstdint>

namespace hybridindex {

constexpr int kQueryTile = 4;

// out[i] = <queries[i], row> or |queries[i] - row|^2, for kQueryTile queries.
void inner_products(const float* row, const float* const* queries, std::int64_t dim, float* out);
void squared_l2(const float* row, const float* const* queries, std::int64_t dim, float* out);

// The first of n rows whose sum of squares is not at most limit, NaN and infinity included; n where there is none.
std::int64_t first_row_beyond(const float* rows, std::int64_t n, std::int64_t dim, float limit);

// row[i] = offset[i] + scale[i] * code[i]
void decode_sq8(const std::uint8_t* code, const float* scale, const float* offset, std::int64_t dim, float* row);
// IEEE half precision, stored little-endian.
void decode_f16(const std::uint8_t* code, std::int64_t dim, float* row);

}  // namespace hybridindex
