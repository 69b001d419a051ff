// The k best of one query: a heap, worst on top, in the arrays of its answer. One thread changes it.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <utility>

namespace hybridindex {

// Smaller distances are better; equal ones are ordered by id. What comes in and when changes nothing of what stays.
class QueryHeap {
public:
    // Anything at or beyond the largest float is no candidate, nor is what is no number; as in faiss.
    static constexpr float kNoLimit = 0x1.fffffcp127f;
    // What is in it lies in the arrays of its answer.
    static constexpr bool kInArrays = true;
    static constexpr std::size_t kept_bytes() { return 0; }

    QueryHeap() = default;
    QueryHeap(QueryHeap&& other) noexcept : distances_(other.distances_), ids_(other.ids_), k_(other.k_) {}

    void reset(float* distances, std::int64_t* ids, std::int64_t k) {
        distances_ = distances;
        ids_ = ids;
        k_ = k;
        held_ = 0;
        limit_.store(kNoLimit, std::memory_order_relaxed);
    }

    // No distance above it can enter any more. Any thread may ask, until the next reset().
    float limit() const { return limit_.load(std::memory_order_relaxed); }

    void push(float distance, std::int64_t id) {
        if (held_ < k_) {
            if (distance <= kNoLimit) {
                sift_up(held_++, distance, id);
                if (held_ == k_) lower(distances_[0]);
            }
        } else if (before(distance, id, distances_[0], ids_[0])) {
            sift_down(k_, distance, id);
            lower(distances_[0]);
        }
    }

    // So many rows are known to be as near; any thread may say so. Where two do at once, the higher limit may stay: it
    // holds, too.
    void lower(float limit) {
        if (limit < limit_.load(std::memory_order_relaxed)) limit_.store(limit, std::memory_order_relaxed);
    }

    // What is in it, in no order: (distance, id).
    template <typename Visit>
    void each(const Visit& visit) const {
        for (std::int64_t i = 0; i < held_; ++i) visit(distances_[i], ids_[i]);
    }

    // Puts the answer in order, best first; `negate` gives similarities back their sign.
    void finish(bool negate) {
        for (std::int64_t left = held_; left > 1; --left) {
            const float distance = distances_[left - 1];
            const std::int64_t id = ids_[left - 1];
            distances_[left - 1] = distances_[0];
            ids_[left - 1] = ids_[0];
            sift_down(left - 1, distance, id);
        }
        for (std::int64_t i = held_; i < k_; ++i) {
            distances_[i] = std::numeric_limits<float>::infinity();
            ids_[i] = -1;
        }
        if (negate)
            for (std::int64_t i = 0; i < k_; ++i) distances_[i] = -distances_[i];
    }

private:
    static bool before(float a, std::int64_t a_id, float b, std::int64_t b_id) {
        return a != b ? a < b : a_id < b_id;
    }

    void put(std::int64_t at, float distance, std::int64_t id) {
        distances_[at] = distance;
        ids_[at] = id;
    }

    void sift_up(std::int64_t at, float distance, std::int64_t id) {
        while (at > 0) {
            const std::int64_t parent = (at - 1) / 2;
            if (!before(distances_[parent], ids_[parent], distance, id)) break;
            put(at, distances_[parent], ids_[parent]);
            at = parent;
        }
        put(at, distance, id);
    }

    // Replaces the top of a heap of `size`.
    void sift_down(std::int64_t size, float distance, std::int64_t id) {
        std::int64_t at = 0;
        for (;;) {
            std::int64_t child = 2 * at + 1;
            if (child >= size) break;
            if (child + 1 < size && before(distances_[child], ids_[child], distances_[child + 1], ids_[child + 1])) ++child;
            if (!before(distance, id, distances_[child], ids_[child])) break;
            put(at, distances_[child], ids_[child]);
            at = child;
        }
        put(at, distance, id);
    }

    float* distances_ = nullptr;
    std::int64_t* ids_ = nullptr;
    std::int64_t k_ = 0;
    std::int64_t held_ = 0;
    std::atomic<float> limit_{kNoLimit};
};

}  // namespace hybridindex
