// The best candidates of one query, in no order until they are asked for: cheaper than a heap where hundreds are kept.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "rabitq/kernels.h"
#include "scan/query_heap.h"

namespace hybridindex {

// Smaller estimates are better; equal ones are ordered by position. What comes in and when changes nothing of what
// stays. One thread changes it.
class Candidates {
public:
    // Arrays of the answer are for finish() alone: nullptr without it.
    static constexpr bool kInArrays = false;

    Candidates() = default;
    Candidates(Candidates&& other) noexcept
        : estimates_(std::move(other.estimates_)), positions_(std::move(other.positions_)),
          found_{estimates_.data(), positions_.data(), other.found_.count, other.found_.room},
          answer_(other.answer_), answer_positions_(other.answer_positions_), k_(other.k_), most_(other.most_) {}

    void reset(float* estimates, std::int64_t* positions, std::int64_t k) {
        answer_ = estimates;
        answer_positions_ = positions;
        k_ = k;
        most_ = most_rows(k);
        found_.count = 0;
        found_.room = std::min(most_, static_cast<std::int64_t>(estimates_.size()));
        limit_.store(QueryHeap::kNoLimit, std::memory_order_relaxed);
    }

    // That it may hold for the best k, with what vectors that grow keep spare, and what it sorts in.
    static constexpr std::int64_t most_bytes(std::int64_t k) {
        return 2 * most_rows(k) * static_cast<std::int64_t>(sizeof(float) + sizeof(std::int64_t)) +
               2 * most_rows(k) * static_cast<std::int64_t>(sizeof(Candidate));
    }

    std::size_t kept_bytes() const {
        return estimates_.capacity() * (sizeof(float) + sizeof(std::int64_t)) + keys_.capacity() * sizeof(std::int32_t) +
               (sorted_.capacity() + other_.capacity()) * sizeof(Candidate);
    }

    // As QueryHeap's.
    float limit() const { return limit_.load(std::memory_order_relaxed); }
    void lower(float limit) {
        if (limit < limit_.load(std::memory_order_relaxed)) limit_.store(limit, std::memory_order_relaxed);
    }

    // Where kernels put what they find; make_room() comes first.
    FoundRows& found() { return found_; }
    // For the rows of a block.
    void make_room() {
        while (found_.full()) {
            if (found_.room == most_) return keep_best();
            found_.room = std::min(most_, std::max(most_rows(0), 2 * found_.room));
            estimates_.resize(static_cast<std::size_t>(found_.room));
            positions_.resize(estimates_.size());
            found_.estimates = estimates_.data(), found_.positions = positions_.data();
        }
    }

    void push(float estimate, std::int64_t position) {
        if (!(estimate <= QueryHeap::kNoLimit)) return;
        make_room();
        found_.estimates[found_.count] = estimate + 0.0f;  // -0 becomes 0
        found_.positions[found_.count++] = position;
    }

    // What is in it, in no order: (estimate, position).
    template <typename Visit>
    void each(const Visit& visit) {
        keep_best();
        for (std::int64_t i = 0; i < found_.count; ++i) visit(found_.estimates[i], found_.positions[i]);
    }

    // Writes the answer, best first.
    void finish() {
        keep_best();
        sort();
        for (std::int64_t i = 0; i < k_; ++i) {
            const bool there = i < found_.count;
            const Candidate one = there ? sorted_[static_cast<std::size_t>(i)]
                                        : Candidate{std::numeric_limits<float>::infinity(), -1};
            answer_[i] = one.estimate;
            answer_positions_[i] = one.position;
        }
    }

private:
    struct Candidate {
        float estimate;
        std::int64_t position;
        bool operator<(const Candidate& other) const {
            return estimate != other.estimate ? estimate < other.estimate : position < other.position;
        }
    };
    // The best, so many more that few candidates do not mean a selection for each that comes, and a block.
    static constexpr std::int64_t most_rows(std::int64_t k) { return k + std::max<std::int64_t>(k, 64) + kCodedRows; }

    void keep_best() {
        if (found_.count <= k_) {
            if (found_.count < k_ || k_ == 0) return;
            return lower(*std::max_element(found_.estimates, found_.estimates + k_));
        }
        if (keys_.size() < static_cast<std::size_t>(found_.count)) keys_.resize(static_cast<std::size_t>(found_.room));
        lower(keep_best_rows(found_.estimates, found_.positions, found_.count, k_, keys_.data()));
        found_.count = k_;
    }

    // By equal steps of the estimates, and then by neighbours.
    void sort() {
        const std::size_t n = static_cast<std::size_t>(found_.count);
        sorted_.resize(n);
        for (std::size_t i = 0; i < n; ++i) sorted_[i] = {found_.estimates[i], found_.positions[i]};
        if (n <= kFew) return std::sort(sorted_.begin(), sorted_.end());
        const auto [first, last] = std::minmax_element(sorted_.begin(), sorted_.end());
        const float least = first->estimate, width = last->estimate - least, factor = kLast / width;
        // Without one all are in the first bucket or in the last: where they are too near each other, or too far apart.
        const bool apart = width > 0 && width <= QueryHeap::kNoLimit && factor <= QueryHeap::kNoLimit;
        const auto bucket = [&](float estimate) {
            // What is no number, for want of a factor, goes into the last.
            return static_cast<std::size_t>(std::min(kLast, (estimate - least) * (apart ? factor : 0.0f)));
        };
        std::array<std::uint32_t, kBuckets> starts{};
        for (const Candidate& one : sorted_) ++starts[bucket(one.estimate)];
        std::uint32_t start = 0;
        for (std::uint32_t& count : starts) start += std::exchange(count, start);
        other_.resize(n);
        for (const Candidate& one : sorted_) other_[starts[bucket(one.estimate)]++] = one;
        // Each bucket ends where its start stands now.
        std::uint32_t begin = 0;
        for (const std::uint32_t end : starts) {
            if (end - begin > 1) std::sort(other_.begin() + begin, other_.begin() + end);
            begin = end;
        }
        sorted_.swap(other_);
    }

    static constexpr std::size_t kBuckets = 256, kFew = 24;
    static constexpr float kLast = kBuckets - 1;

    std::vector<float> estimates_;
    std::vector<std::int64_t> positions_;
    std::vector<std::int32_t> keys_;
    std::vector<Candidate> sorted_, other_;
    FoundRows found_{};
    float* answer_ = nullptr;
    std::int64_t* answer_positions_ = nullptr;
    std::int64_t k_ = 0, most_ = 0;
    std::atomic<float> limit_{QueryHeap::kNoLimit};
};

}  // namespace hybridindex
