#include "coarse/device_bounds.h"

#include <cmath>
#include <limits>

#include "coarse/centroid_rows.h"

namespace hybridindex {
namespace {

// TF32 keeps 10 bits behind the first; where it cuts the rest off, each factor of a product loses 2^-10 of itself at most.
constexpr double kOfProducts = 1.01 / 512;

// Sums of dim products lose so much of the product of both lengths, at most: on the host, which rounds each sum, and on
// matrix units, which may cut it.
double of_host_sums(std::int64_t dim) { return std::ldexp(static_cast<double>(dim + 64), -22); }
double of_device_sums(std::int64_t dim) { return std::ldexp(static_cast<double>(dim + 64), -21); }

}  // namespace

DeviceBounds::DeviceBounds(const float* rows, std::int64_t nlist, std::int64_t dim, std::int64_t padded_dim,
                           bool inner_product)
    : dim_(dim), inner_product_(inner_product) {
    for (std::int64_t list = 0; list < nlist; ++list) {
        const double length = length_of(rows + list * padded_dim, dim);
        if (!(length <= longest_)) longest_ = length;
        if (std::isnan(longest_)) return;
    }
}

double DeviceBounds::least_distance(const float* query, float farthest) const {
    const double length = length_of(query, dim_), most = length * longest_, far = static_cast<double>(farthest);
    if (!(length < kTooLarge && longest_ < kTooLarge && std::isfinite(far))) return std::numeric_limits<double>::quiet_NaN();
    // Numbers below the smallest normal one may count as 0.
    const double lost = std::ldexp(static_cast<double>(dim_), -125) * (1 + length + longest_);
    double of_device = (kOfProducts + of_device_sums(dim_)) * most + lost;
    if (inner_product_) return far - of_device - of_host_sums(dim_) * most - lost;
    // Halves of squares are rounded, and may be what the sums begin with.
    of_device += of_device_sums(dim_) * longest_ * longest_;
    const double least = length * length + 2 * (far - of_device);
    return least - of_host_sums(dim_) * std::abs(least) - lost;
}

}  // namespace hybridindex
