#include "rabitq/encode.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "simd/aligned_buffer.h"
#include "rabitq/kernels.h"

namespace hybridindex {
namespace {

constexpr float kLargestHalf = 65504.0f;

// The nearest half, ties to even. |x| is at most the largest one.
std::uint16_t to_half(float x) {
    std::uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const std::uint32_t sign = bits >> 16 & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits >= 0x38800000u) {  // a normal half: rounds the mantissa, which may carry into the exponent
        bits += 0xfffu + (bits >> 13 & 1u);
        return static_cast<std::uint16_t>(sign | (bits - 0x38000000u) >> 13);
    }
    // The place of a subnormal half's last bit is the unit of this sum, which rounds to even.
    float size;
    std::memcpy(&size, &bits, 4);
    size += 0.5f;
    std::memcpy(&bits, &size, 4);
    return static_cast<std::uint16_t>(sign | (bits - 0x3f000000u));
}

float from_half(std::uint16_t half) {
    const std::uint32_t magnitude = static_cast<std::uint32_t>(half & 0x7fffu) << 13;
    float value;
    std::memcpy(&value, &magnitude, 4);
    value *= 0x1p112f;
    return half & 0x8000u ? -value : value;
}

// A multiple of `scale`, within the finite halves; 0 for what is no number.
std::uint16_t half_of(float x, float scale) {
    const float scaled = x / scale;
    if (std::isnan(scaled)) return 0;
    return to_half(std::clamp(scaled, -kLargestHalf, kLargestHalf));
}

// Of more than one bit: distances of neighbouring levels that are tried, in root mean squares of a rotated residual.
constexpr int kFirstStep = 9, kLastStep = 24;
constexpr float step_unit(int bits) { return bits == 2 ? 16.0f : 48.0f; }

class Encoder {
public:
    Encoder(const CodeFormat& format, const float* centroid) : format_(format), dims_(format.dims()) {
        for (AlignedBuffer<float>* buffer : {&centroid_, &turned_centroid_, &row_, &residual_, &turned_, &size_, &levels_, &tried_})
            buffer->grow(dims_);
        std::copy(centroid, centroid + format.dim, centroid_.data());
        std::copy(centroid, centroid + format.dim, turned_centroid_.data());
        format.rotation.apply(turned_centroid_.data());
    }

    // Into place `r` of a block of zeros.
    void encode(const float* row, int r, std::uint8_t* block) {
        std::copy(row, row + format_.dim, row_.data());
        for (std::int64_t i = 0; i < dims_; ++i) residual_[i] = row_[i] - centroid_[i];
        const float squares = lane_product(residual_.data(), residual_.data(), dims_);
        std::copy(residual_.data(), residual_.data() + dims_, turned_.data());
        format_.rotation.apply(turned_.data());
        for (std::int64_t i = 0; i < dims_; ++i) size_[i] = std::fabs(turned_[i]);
        choose_levels(squares);
        for (std::int64_t i = 0; i < dims_; ++i) levels_[i] = turned_[i] < 0 ? -levels_[i] : levels_[i];
        const float along = lane_product(levels_.data(), turned_.data(), dims_);
        const float f = along > 0 ? squares / along : 0.0f;
        const std::uint16_t f16 = half_of(f, format_.f_scale);
        const float towards = lane_product(residual_.data(), centroid_.data(), dims_);
        const float g = towards - from_half(f16) * format_.f_scale * lane_product(levels_.data(), turned_centroid_.data(), dims_);
        const std::uint16_t g16 = half_of(g, format_.g_scale);
        put_levels(r, block);
        std::uint8_t* const factors = block + format_.plane_bytes();
        std::memcpy(factors + 2 * r, &f16, 2);
        std::memcpy(factors + 32 + 2 * r, &g16, 2);
        if (!format_.l2) return;
        const float h = lane_product(row_.data(), row_.data(), dims_);
        std::memcpy(factors + 64 + 4 * r, &h, 4);
    }

private:
    // Sizes of V: the first of the best.
    void choose_levels(float squares) {
        std::fill(levels_.data(), levels_.data() + dims_, 1.0f);
        if (format_.bits == 1) return;
        const float top = static_cast<float>((1 << (format_.bits - 1)) - 1);
        const float rms = std::sqrt(squares / static_cast<float>(dims_));
        float best = -1;
        for (int step = kFirstStep; step <= kLastStep; ++step) {
            const float wide = static_cast<float>(step) / step_unit(format_.bits) * rms, inverse = wide > 0 ? 1.0f / wide : 0.0f;
            float* const tried = tried_.data();
            const float* const size = size_.data();
            for (std::int64_t i = 0; i < dims_; ++i) {
                const float level = size[i] * inverse;
                const float bounded = level < top ? level : top;
                tried[i] = 2.0f * static_cast<float>(static_cast<std::int32_t>(bounded)) + 1.0f;
            }
            const float along = lane_product(tried, size, dims_);
            const float score = along * along / lane_product(tried, tried, dims_);
            if (!(score > best)) continue;
            best = score;
            std::copy(tried, tried + dims_, levels_.data());
        }
    }

    void put_levels(int r, std::uint8_t* block) const {
        const int highest = (1 << format_.bits) - 1;
        for (std::int64_t c = 0; c < format_.chunks(); ++c)
            for (int p = 0; p < format_.bits; ++p) {
                std::uint32_t word = 0;
                for (int i = 0; i < kChunkDims; ++i) {
                    const int whole = (static_cast<int>(levels_.data()[c * kChunkDims + i]) + highest) / 2;
                    word |= static_cast<std::uint32_t>(whole >> (format_.bits - 1 - p) & 1) << i;
                }
                std::memcpy(block + (p * format_.chunks() + c) * kChunkBytes + 4 * r, &word, 4);
            }
    }

    const CodeFormat& format_;
    const std::int64_t dims_;
    AlignedBuffer<float> centroid_, turned_centroid_, row_, residual_, turned_, size_, levels_, tried_;
};

}  // namespace

std::int64_t CodeFormat::chunks() const { return rotation.dims / kChunkDims; }

void encode_rows(const CodeFormat& format, const float* rows, std::int64_t n, const float* centroid, std::uint8_t* out) {
    std::memset(out, 0, static_cast<std::size_t>((n + kCodedRows - 1) / kCodedRows * format.block_bytes()));
    Encoder encoder(format, centroid);
    for (std::int64_t i = 0; i < n; ++i)
        encoder.encode(rows + i * format.dim, static_cast<int>(i % kCodedRows), out + i / kCodedRows * format.block_bytes());
}

}  // namespace hybridindex
