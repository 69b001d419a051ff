// The best candidates of one query, in no order until they are asked for: cheaper than a heap where hundreds are kept.
#pragma once
#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

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
        : held_(std::move(other.held_)), n_(other.n_), estimates_(other.estimates_), positions_(other.positions_), k_(other.k_) {}

    void reset(float* estimates, std::int64_t* positions, std::int64_t k) {
        estimates_ = estimates;
        positions_ = positions;
        k_ = static_cast<std::size_t>(k);
        n_ = 0;
        room_ = k_ + std::max(k_, kLeastSpare);
        limit_.store(QueryHeap::kNoLimit, std::memory_order_relaxed);
    }

    // That it may hold for the best k, with what two vectors that grow keep spare.
    static constexpr std::int64_t most_bytes(std::int64_t k) {
        return 4 * (k + std::max<std::int64_t>(k, kLeastSpare)) * static_cast<std::int64_t>(sizeof(Candidate));
    }

    std::size_t kept_bytes() const { return (held_.capacity() + undecided_.capacity()) * sizeof(Candidate); }

    // As QueryHeap's.
    float limit() const { return limit_.load(std::memory_order_relaxed); }
    void lower(float limit) {
        if (limit < limit_.load(std::memory_order_relaxed)) limit_.store(limit, std::memory_order_relaxed);
    }

    void push(float estimate, std::int64_t position) {
        if (!(estimate <= QueryHeap::kNoLimit)) return;
        if (n_ == held_.size()) held_.resize(std::max<std::size_t>(kLeastSpare, 2 * n_));
        held_[n_++] = {estimate, position};
        if (n_ == room_) keep_best();
    }

    // What is in it, in no order: (estimate, position).
    template <typename Visit>
    void each(const Visit& visit) {
        keep_best();
        for (std::size_t i = 0; i < n_; ++i) visit(held_[i].estimate, held_[i].position);
    }

    // Writes the answer, best first.
    void finish() {
        keep_best();
        sort();
        for (std::size_t i = 0; i < k_; ++i) {
            const bool there = i < n_;
            estimates_[i] = there ? held_[i].estimate : std::numeric_limits<float>::infinity();
            positions_[i] = there ? held_[i].position : -1;
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
    // Room beyond the best, so that few candidates do not mean a selection for each that comes.
    static constexpr std::size_t kLeastSpare = 64;
    static constexpr std::size_t kBuckets = 256;

    // Equal steps from the least estimate to the largest: a larger estimate is in no bucket before.
    class Buckets {
    public:
        Buckets(const Candidate* held, std::size_t n) {
            float least = held[0].estimate, most = least;
            for (std::size_t i = 1; i < n; ++i) {
                least = std::min(least, held[i].estimate);
                most = std::max(most, held[i].estimate);
            }
            least_ = least;
            const float width = most - least, factor = kLast / width;
            // Without one all are in the first bucket or in the last: where they are too near each other, or too far apart.
            if (width > 0 && width <= QueryHeap::kNoLimit && factor <= QueryHeap::kNoLimit) factor_ = factor;
            for (std::size_t i = 0; i < n; ++i) ++count[of(held[i].estimate)];
        }
        std::size_t of(float estimate) const {
            // What is no number, for want of a factor, goes into the last.
            return static_cast<std::size_t>(std::min(kLast, (estimate - least_) * factor_));
        }

        std::array<std::uint32_t, kBuckets> count{};

    private:
        static constexpr float kLast = kBuckets - 1;
        float least_, factor_ = 0;
    };

    void keep_best() {
        if (n_ < k_) return;
        if (n_ > k_) {
            const Buckets buckets(held_.data(), n_);
            // The bucket of the last that stays; of those before it all do.
            std::size_t last = 0, before = 0;
            while (before + buckets.count[last] < k_) before += buckets.count[last++];
            std::size_t kept = 0;
            undecided_.clear();
            for (std::size_t i = 0; i < n_; ++i) {
                const Candidate one = held_[i];
                const std::size_t bucket = buckets.of(one.estimate);
                if (bucket == last) undecided_.push_back(one);
                held_[kept] = one;
                kept += bucket < last;
            }
            const auto stay = undecided_.begin() + static_cast<std::ptrdiff_t>(k_ - before);
            std::nth_element(undecided_.begin(), stay - 1, undecided_.end());
            std::copy(undecided_.begin(), stay, held_.begin() + static_cast<std::ptrdiff_t>(before));
            n_ = k_;
            lower((stay - 1)->estimate);
            return;
        }
        float most = held_[0].estimate;
        for (std::size_t i = 1; i < n_; ++i) most = std::max(most, held_[i].estimate);
        lower(most);
    }

    // By buckets, and then by neighbours.
    void sort() {
        if (n_ < 2) return;
        Buckets buckets(held_.data(), n_);
        std::uint32_t start = 0;
        for (std::uint32_t& count : buckets.count) start += std::exchange(count, start);
        undecided_.resize(n_);
        for (std::size_t i = 0; i < n_; ++i) undecided_[buckets.count[buckets.of(held_[i].estimate)]++] = held_[i];
        // Each bucket ends where its count stands now.
        std::uint32_t begin = 0;
        for (const std::uint32_t end : buckets.count) {
            if (end - begin > 1) std::sort(undecided_.begin() + begin, undecided_.begin() + end);
            begin = end;
        }
        held_.swap(undecided_);
    }

    std::vector<Candidate> held_, undecided_;  // n_ of held_ count
    std::size_t n_ = 0, room_ = 0;
    float* estimates_ = nullptr;
    std::int64_t* positions_ = nullptr;
    std::size_t k_ = 0;
    std::atomic<float> limit_{QueryHeap::kNoLimit};
};

}  // namespace hybridindex
