// Lengths of rows: the check that every query and every vector goes through.
#pragma once
#include <cstdint>

namespace hybridindex {

// The first of n rows whose sum of squares is not at most limit, NaN and infinity included; n where there is none.
std::int64_t first_row_beyond(const float* rows, std::int64_t n, std::int64_t dim, float limit);

}  // namespace hybridindex
