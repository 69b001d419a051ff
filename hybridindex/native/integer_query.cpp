#include "integer_query.h"

#include <limits>

namespace hybridindex {
namespace {

// Below it the integer filter's own arithmetic would underflow.
constexpr double kLeastStep = 0x1p-90;

}  // namespace

IntegerQuery make_integer_query(const BlockKernels& kernels, const RowCodes& codes, bool inner_product,
                                const float* query, float* w, std::int8_t* weights) {
    double constant = 0, magnitude = 0;
    for (std::int64_t i = 0; i < codes.dim; ++i) {
        const double x = query[i], a = codes.offset[i], b = codes.scale[i];
        const double most = std::abs(a) + 255 * std::abs(b);
        if (inner_product) {  // distance = <x, a + b c>
            constant += x * a;
            w[i] = static_cast<float>(x * b);
            magnitude += std::abs(x) * most;
        } else {  // distance = sum of ((x - a) - b c)^2
            constant += (x - a) * (x - a);
            w[i] = static_cast<float>(-2 * (x - a) * b);
            magnitude += (std::abs(x) + most) * (std::abs(x) + most);
        }
    }
    const QueryWeights made = kernels.weigh(w, codes.dim, weights);
    // Too near the end of float's range to say anything: every row passes.
    if (!(made.step > kLeastStep)) return {-std::numeric_limits<double>::infinity(), 1, 0, 0};
    // Rounding: of w, of the exact distance and what it is compared with, of the row's square, of the filter.
    return {constant + 128 * made.error_sum, made.step, made.error_length,
            magnitude * static_cast<double>(codes.dim + 16) * 0x1p-20};
}

}  // namespace hybridindex
