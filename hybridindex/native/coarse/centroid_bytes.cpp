#include "coarse/centroid_bytes.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "coarse/centroid_rows.h"

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
    bytes_.grow(count * row_bytes_);
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
    std::vector<std::uint8_t> apart(static_cast<std::size_t>(kBlockRows * row_bytes_));
    for (std::int64_t first = 0; first < count; first += kBlockRows) {
        std::uint8_t* const own = bytes_.data() + first * row_bytes_;
        kernels.row_terms(own, row_bytes_, kBlockRows, dim, inner_product ? nullptr : scale_.data(),
                          &terms_[static_cast<std::size_t>(first / kBlockRows)]);
        if (kernels.filter_interleaved == nullptr) continue;
        std::copy(own, own + kBlockRows * row_bytes_, apart.begin());
        const std::uint8_t* each[kBlockRows];
        for (int r = 0; r < kBlockRows; ++r) each[r] = apart.data() + r * row_bytes_;
        interleave(each, kBlockRows, row_bytes_, own);
    }
}

std::int64_t CentroidBytes::packed_bytes(std::int64_t n) const {
    if (kernels_.filter_interleaved != nullptr) return round_up(n, kBlockRows) * row_bytes_;
    return kernels_.packed_bytes(static_cast<int>(n), row_bytes_);
}

void CentroidBytes::pack(const std::int8_t* const* queries, int n, std::int8_t* packed) const {
    if (kernels_.filter_interleaved == nullptr) return kernels_.pack(queries, n, row_bytes_, packed);
    for (int first = 0; first < n; first += kBlockRows) {
        const std::uint8_t* each[kBlockRows];
        const int there = std::min(n - first, kBlockRows);
        for (int q = 0; q < there; ++q) each[q] = reinterpret_cast<const std::uint8_t*>(queries[first + q]);
        interleave(each, there, row_bytes_, reinterpret_cast<std::uint8_t*>(packed + first * row_bytes_));
    }
}

int CentroidBytes::near(std::int64_t first, const std::int8_t* packed, int n, const QueryLimits& limits,
                        std::uint32_t* found, std::int64_t next) const {
    const RowTerms& terms = terms_[static_cast<std::size_t>(first / kBlockRows)];
    const std::uint8_t* const later = next < static_cast<std::int64_t>(terms_.size()) * kBlockRows ? block(next) : nullptr;
    if (kernels_.filter_interleaved != nullptr)
        return kernels_.filter_interleaved(block(first), packed, n, row_bytes_, limits, terms, found, later);
    return kernels_.filter(block(first), row_bytes_, packed, n, row_bytes_, limits, terms, found, later);
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
