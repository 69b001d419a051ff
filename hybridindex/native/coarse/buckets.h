// Numbers in buckets: the first steps of sorting them, or of finding those that are among the least.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace hybridindex {

// Equal steps from the least number to the largest: a larger one is in no bucket before. What is no number is in one of
// its own, behind all.
class Buckets {
public:
    static constexpr int kCount = 1024;
    static constexpr std::size_t kLanes = 16;

    // n is a multiple of kLanes.
    Buckets(const float* values, std::size_t n) {
        constexpr float kMost = std::numeric_limits<float>::max();
        float low[kLanes], high[kLanes];
        std::fill(low, low + kLanes, kMost), std::fill(high, high + kLanes, -kMost);
        for (std::size_t i = 0; i < n; i += kLanes)
            for (std::size_t lane = 0; lane < kLanes; ++lane) {
                const float value = values[i + lane];
                low[lane] = value < low[lane] ? value : low[lane];
                high[lane] = value > high[lane] ? value : high[lane];
            }
        least_ = *std::min_element(low, low + kLanes);
        const float width = *std::max_element(high, high + kLanes) - least_;
        // Without a factor all are in the first bucket or the last: where they are too near each other, or too far apart.
        if (width > 0 && width <= kMost && kLast / width <= kMost) factor_ = kLast / width;
    }

    // Numbers the bucket of each value, and counts them: kCount + 1 entries.
    void number(const float* values, std::size_t n, std::int32_t* buckets, std::uint32_t* counts) const {
        for (std::size_t i = 0; i < n; ++i) {
            const float step = (values[i] - least_) * factor_, within = step < kLast ? step : kLast;
            buckets[i] = static_cast<std::int32_t>(values[i] == values[i] ? within : kLast + 1);
        }
        std::fill(counts, counts + kCount + 1, 0u);
        for (std::size_t i = 0; i < n; ++i) ++counts[buckets[i]];
    }

private:
    static constexpr float kLast = kCount - 1;
    float least_, factor_ = 0;
};

}  // namespace hybridindex
