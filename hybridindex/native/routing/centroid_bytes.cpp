#include "routing/centroid_bytes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "routing/centroid_rows.h"

namespace hybridindex {
namespace {

// Beside what sums of doubles lose.
constexpr double kAbove = 1 + 1e-6;

}  // namespace

CentroidBytes::CentroidBytes(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim,
                             bool inner_product, const BlockKernels& kernels)
    : dim_(dim), row_bytes_(round_up(dim, kFilterStep)), inner_product_(inner_product), kernels_(kernels) {
    if (!worth_rounding(rows, nlist, dim, padded_dim, kernels)) return;
    const std::size_t n = static_cast<std::size_t>(dim);
    std::vector<float> most(rows, rows + dim);
    offset_.assign(rows, rows + dim);
    for (std::int64_t list = 1; list < nlist; ++list)
        for (std::int64_t i = 0; i < dim; ++i) {
            const float value = rows[list * padded_dim + i];
            const std::size_t at = static_cast<std::size_t>(i);
            offset_[at] = std::min(offset_[at], value);
            most[at] = std::max(most[at], value);
        }
    scale_.resize(n);
    for (std::size_t i = 0; i < n; ++i) scale_[i] = (most[i] - offset_[i]) / 255.0f;
    const std::int64_t count = round_up(nlist, kBlockRows);
    bytes_.assign(static_cast<std::size_t>(count * row_bytes_), 0);
    for (std::int64_t list = 0; list < nlist; ++list) {
        const float* const row = rows + list * padded_dim;
        std::uint8_t* const out = bytes_.data() + list * row_bytes_;
        double square = 0;
        for (std::int64_t i = 0; i < dim; ++i) {
            const std::size_t at = static_cast<std::size_t>(i);
            const float steps = scale_[at] > 0 ? (row[i] - offset_[at]) / scale_[at] : 0.0f;
            out[i] = static_cast<std::uint8_t>(std::clamp(std::nearbyint(steps), 0.0f, 255.0f));
            const double made = static_cast<double>(offset_[at]) + static_cast<double>(scale_[at]) * out[i];
            const double error = static_cast<double>(row[i]) - made;
            square += error * error;
        }
        error_ = std::max(error_, std::sqrt(square) * kAbove);
    }
    terms_.resize(static_cast<std::size_t>(count / kBlockRows));
    for (std::int64_t first = 0; first < count; first += kBlockRows)
        kernels.row_terms(block(first), row_bytes_, kBlockRows, dim, inner_product ? nullptr : scale_.data(),
                          &terms_[static_cast<std::size_t>(first / kBlockRows)]);
}

CentroidBytes::Query CentroidBytes::query(const float* query, float* scratch, std::int8_t* whole) const {
    std::memset(whole + dim_, 0, static_cast<std::size_t>(row_bytes_ - dim_));
    const QueryBound bound =
        bound_of_bytes(query, scale_.data(), offset_.data(), dim_, inner_product_, kernels_, scratch, whole);
    return {bound, length_of(query, dim_) * kAbove};
}

// With c = x + e: <q, x> <= <q, c> + |q| |e|, and |q - x| <= |q - c| + |e|. A limit that was computed in float is below the
// true distance by the bound's own rounding at most, which is counted once more here.
float CentroidBytes::base(const Query& query, float limit) const {
    const double own = static_cast<double>(limit) + query.bound.rounding;
    if (inner_product_) return query.bound.base(own + query.length * error_);
    const double apart = std::sqrt(std::max(own, 0.0)) + error_;
    return query.bound.base(apart * apart);
}

}  // namespace hybridindex
