#include "coarse/rounded_centroids.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "coarse/buckets.h"
#include "coarse/centroid_rows.h"

namespace hybridindex {
namespace {

// Of three lists two: comparing all would be as fast.
constexpr std::int64_t kMostOfThree = 2;
// Bytes between what is read and what is fetched.
constexpr std::int64_t kBytesAhead = 4 << 10;
constexpr int kZero = 128;
constexpr float kLargest = std::numeric_limits<float>::max();

// A float that is not below it.
float above(double value) { return static_cast<float>(value * (1 + 1e-6)) + std::numeric_limits<float>::min(); }

// Sums in float of dim products differ from the true ones by so much of the product of both lengths, at most, with room
// for what bounds themselves lose.
double float_error(std::int64_t dim) { return std::ldexp(static_cast<double>(dim + 64), -22); }

}  // namespace

RoundedCentroids::RoundedCentroids(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim,
                                   bool inner_product, const BlockKernels& kernels)
    : nlist_(nlist), dim_(dim), row_bytes_(round_up(dim, kFilterStep)), inner_product_(inner_product), kernels_(kernels) {
    if (!worth_rounding(rows, nlist, dim, padded_dim, kernels)) return;
    const std::int64_t count = round_up(nlist, kBlockRows);
    whole_.grow(count * row_bytes_);
    std::vector<std::int8_t> whole(static_cast<std::size_t>(row_bytes_));
    // Those that fill the last block are at 0; find_near leaves them out.
    for (auto* const values : {&steps_, &errors_, &lengths_, &squares_}) values->assign(static_cast<std::size_t>(count), 0.0f);
    for (std::int64_t list = 0; list < nlist; ++list) {
        const float* const row = rows + list * padded_dim;
        const std::size_t at = static_cast<std::size_t>(list);
        const QueryWeights of = kernels.weigh(row, dim, whole.data());
        const double length = length_of(row, dim);
        steps_[at] = static_cast<float>(of.step);
        errors_[at] = above(of.error_length);
        lengths_[at] = above(length);
        if (!inner_product) squares_[at] = static_cast<float>(length * length);
        std::uint8_t* const out = whole_.data() + list * row_bytes_;
        for (std::int64_t i = 0; i < dim; ++i) out[i] = static_cast<std::uint8_t>(whole[static_cast<std::size_t>(i)] + kZero);
    }
}

bool RoundedCentroids::find_near(const float* query, std::int64_t p, NearLists& near) const {
    const std::int64_t count = round_up(nlist_, kBlockRows);
    near.weights.grow(dim_), near.whole.grow(row_bytes_), near.lists.grow(count + 1);
    near.low.grow(count), near.high.grow(count), near.buckets.grow(count);
    // Smaller is nearer: -<q, c>, or |c|^2 - 2 <q, c>, which is |q - c|^2 less |q|^2.
    const float factor = inner_product_ ? -1.0f : -2.0f;
    float* const weights = near.weights.data();
    for (std::int64_t i = 0; i < dim_; ++i) weights[i] = factor * query[i];
    const double size = length_of(weights, dim_);
    if (!(size < kTooLarge)) return false;
    std::int8_t* const whole = near.whole.data();  // zeros behind dim
    const QueryWeights of = kernels_.weigh(weights, dim_, whole);
    std::int32_t sum = 0, squares = 0;
    for (std::int64_t i = 0; i < dim_; ++i) sum += whole[i], squares += whole[i] * whole[i];
    const std::int32_t shift = kZero * sum;
    const double relative = float_error(dim_);
    const float step = static_cast<float>(of.step), of_error = above(of.step * std::sqrt(static_cast<double>(squares))),
                of_length = above(of.error_length + relative * size);
    // Products of steps and of errors may be so small that float loses their last digits.
    const double lost = std::ldexp(static_cast<double>(dim_) * kZero * kZero, -148);
    const float of_square = static_cast<float>(relative), always = above(lost + (inner_product_ ? 0.0 : relative * size * size));
    float* const low = near.low.data();
    float* const high = near.high.data();
    const std::int64_t ahead = round_up(kBytesAhead, kBlockRows * row_bytes_);
    for (std::int64_t first = 0; first < count; first += kBlockRows) {
        std::int32_t dots[kBlockRows];
        const std::int64_t start = first * row_bytes_;
        kernels_.dots(whole_.data() + start, row_bytes_, whole, dots,
                      start + ahead < count * row_bytes_ ? whole_.data() + start + ahead : nullptr);
        const float* const steps = steps_.data() + first;
        const float* const errors = errors_.data() + first;
        const float* const lengths = lengths_.data() + first;
        const float* const own = squares_.data() + first;
        for (int r = 0; r < kBlockRows; ++r) {
            const float value = own[r] + static_cast<float>(dots[r] - shift) * (steps[r] * step);
            const float error = errors[r] * of_error + lengths[r] * of_length + (own[r] * of_square + always);
            low[first + r] = value - error;
            high[first + r] = value + error;
        }
    }
    std::fill(high + nlist_, high + count, std::numeric_limits<float>::quiet_NaN());
    // A bound that p lists keep: the largest one of the buckets that hold the p least.
    const std::size_t n = static_cast<std::size_t>(count);
    std::uint32_t counts[Buckets::kCount + 1];
    Buckets(high, n).number(high, n, near.buckets.data(), counts);
    std::int32_t last = 0;
    for (std::int64_t before = counts[0]; before < p; before += counts[last]) ++last;
    float bound = -kLargest;
    for (std::int64_t i = 0; i < nlist_; ++i) {
        const float wanted = near.buckets[i] <= last ? high[i] : -kLargest;
        bound = wanted > bound ? wanted : bound;
    }
    std::int64_t found = 0;
    for (std::int32_t list = 0; list < nlist_; ++list) {
        near.lists[found] = list;
        found += low[list] <= bound;
    }
    near.count = found;
    return 3 * found <= kMostOfThree * nlist_;
}

}  // namespace hybridindex
