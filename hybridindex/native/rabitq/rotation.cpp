#include "rabitq/rotation.h"

#include <bit>
#include <cmath>
#include <vector>

namespace hybridindex {
namespace {

// Sums and differences of numbers h apart, of groups of 2 * h.
void combine(float* x, std::int64_t n, std::int64_t h) {
    for (std::int64_t i = 0; i < n; i += 2 * h) {
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

constexpr std::int64_t kRow = 16;

// (rows, columns) to (columns, rows).
void transpose(const float* from, std::int64_t rows, std::int64_t columns, float* to) {
    for (std::int64_t row = 0; row < rows; ++row)
        for (std::int64_t column = 0; column < columns; ++column) to[column * rows + row] = from[row * columns + column];
}

// `other` has room for p numbers.
void hadamard(float* x, std::int64_t p, float* other) {
    std::int64_t h = 1;
    if (p > 4 * kRow) {
        // Neighbours are combined as rows of the transpose, in vectors; the sums are the same.
        transpose(x, p / kRow, kRow, other);
        for (; h < kRow; h *= 2) combine(other, p, h * (p / kRow));
        transpose(other, kRow, p / kRow, x);
    }
    for (; h < p; h *= 2) combine(x, p, h);
}

}  // namespace

void Rotation::apply(float* x) const {
    const std::int64_t p = static_cast<std::int64_t>(std::bit_floor(static_cast<std::uint64_t>(dims)));
    std::vector<float> other(static_cast<std::size_t>(p));
    const float norm = static_cast<float>(1 / std::sqrt(static_cast<double>(p)));
    for (std::int64_t round = 0; round < rounds; ++round) {
        const float* const sign = signs + round * dims;
        for (std::int64_t i = 0; i < dims; ++i) x[i] *= sign[i];
        float* const part = round % 2 == 0 ? x : x + (dims - p);
        hadamard(part, p, other.data());
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
