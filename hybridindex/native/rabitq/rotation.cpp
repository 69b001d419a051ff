#include "rabitq/rotation.h"

#include <bit>
#include <cmath>

namespace hybridindex {
namespace {

void hadamard(float* x, std::int64_t p) {
    std::int64_t h = 1;
    for (; h < 4 && h < p; h *= 2)
        for (std::int64_t i = 0; i < p; i += 2 * h)
            for (std::int64_t j = i; j < i + h; ++j) {
                const float a = x[j], b = x[j + h];
                x[j] = a + b;
                x[j + h] = a - b;
            }
    for (; h < p; h *= 2)
        for (std::int64_t i = 0; i < p; i += 2 * h) {
            float* const front = x + i;
            float* const back = front + h;
#pragma GCC ivdep
            for (std::int64_t j = 0; j < h; ++j) {
                const float a = front[j], b = back[j];
                front[j] = a + b;
                back[j] = a - b;
            }
        }
}

}  // namespace

void Rotation::apply(float* x) const {
    const std::int64_t p = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(dims)));
    const float norm = static_cast<float>(1 / std::sqrt(static_cast<double>(p)));
    for (std::int64_t round = 0; round < rounds; ++round) {
        const float* const sign = signs + round * dims;
        for (std::int64_t i = 0; i < dims; ++i) x[i] *= sign[i];
        float* const part = round % 2 == 0 ? x : x + (dims - p);
        hadamard(part, p);
        for (std::int64_t i = 0; i < p; ++i) part[i] *= norm;
    }
}

float lane_product(const float* a, const float* b, std::int64_t n) {
    constexpr int kLanes = 16;
    float sums[kLanes] = {};
    for (std::int64_t i = 0; i < n; i += kLanes)
        for (int lane = 0; lane < kLanes; ++lane) sums[lane] += a[i + lane] * b[i + lane];
    for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) sums[lane] += sums[lane + half];
    return sums[0];
}

}  // namespace hybridindex
