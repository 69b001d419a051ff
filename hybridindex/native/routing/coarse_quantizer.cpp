#include "routing/coarse_quantizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <utility>

namespace hybridindex {
namespace {

// Queries that pass over the centroids together: at most, at least, and in between as many as keep so many keys.
constexpr std::int64_t kGroup = 64, kLeastGroup = 4, kKeysOfGroup = 1 << 20;
// Floats between what is read and what is fetched, a block at least.
constexpr std::int64_t kFloatsAhead = 8 << 10;
// Of so many lists one is probed, or more: then all are sorted.
constexpr std::int64_t kSortedShare = 6;
constexpr float kLargest = std::numeric_limits<float>::max();

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

// A distance and a list as one number: the nearer is the smaller; equal distances are ordered by list.
using Key = std::uint64_t;
constexpr std::uint32_t kSign = 0x80000000u;

Key key_of(float distance, std::uint32_t list) {
    const std::uint32_t bits = std::bit_cast<std::uint32_t>(distance + 0.0f);  // -0 becomes 0
    return static_cast<Key>(bits & kSign ? ~bits : bits | kSign) << 32 | list;
}

float distance_of(Key key) {
    const std::uint32_t ordered = static_cast<std::uint32_t>(key >> 32);
    return std::bit_cast<float>(ordered & kSign ? ordered ^ kSign : ~ordered);
}

// Keys of ascending lists, sorted; `other` has the same room. Returns the one of both where they are.
const Key* sort_ascending_lists(Key* keys, Key* other, std::int64_t n) {
    // Stable, so that the lists need no passes.
    constexpr int kDigits = 4, kValues = 256;
    std::int64_t starts[kDigits][kValues] = {};
    for (std::int64_t i = 0; i < n; ++i)
        for (int digit = 0; digit < kDigits; ++digit) ++starts[digit][keys[i] >> (32 + 8 * digit) & 255];
    for (int digit = 0; digit < kDigits; ++digit) {
        const int shift = 32 + 8 * digit;
        std::int64_t* const at = starts[digit];
        if (n == 0 || at[keys[0] >> shift & 255] == n) continue;  // the same in all
        std::int64_t before = 0;
        for (int value = 0; value < kValues; ++value) before += std::exchange(at[value], before);
        for (std::int64_t i = 0; i < n; ++i) other[at[keys[i] >> shift & 255]++] = keys[i];
        std::swap(keys, other);
    }
    return keys;
}

// The nearest of one query, out of blocks in the order of their lists.
class Nearest {
public:
    // Room for `room` keys, p + 2 blocks at least. Where that is as many as there are lists, all are kept and sorted.
    void reset(Key* keys, std::int64_t room, std::int64_t p) {
        keys_ = keys;
        room_ = room;
        p_ = p;
        held_ = 0;
        limit_ = kLargest;
    }

    void offer(const float* distances, std::uint32_t first, std::uint32_t valid, const BlockKernels& kernels) {
        for (std::uint32_t near = kernels.at_most(distances, limit_) & valid; near != 0; near &= near - 1) {
            const int row = std::countr_zero(near);
            keys_[held_++] = key_of(distances[row], first + static_cast<std::uint32_t>(row));
        }
        if (held_ > room_ - kBlockRows) narrow();
    }

    // `spare`: room for as many; nullptr where some may have been left out.
    void finish(Key* spare, bool negate, std::int64_t* lists, float* distances) {
        const Key* sorted = keys_;
        if (spare != nullptr) {
            sorted = sort_ascending_lists(keys_, spare, held_);
        } else {
            if (held_ > p_) narrow();
            std::sort(keys_, keys_ + held_);
        }
        const std::int64_t found = std::min(held_, p_);
        for (std::int64_t i = 0; i < found; ++i) {
            lists[i] = static_cast<std::int64_t>(sorted[i] & 0xffffffffu);
            const float distance = distance_of(sorted[i]);
            distances[i] = negate ? 0.0f - distance : distance;
        }
        std::fill(lists + found, lists + p_, std::int64_t{-1});
        std::fill(distances + found, distances + p_, negate ? -kLargest : kLargest);
    }

private:
    // To the p nearest so far; no other can be among them any more.
    void narrow() {
        std::nth_element(keys_, keys_ + (p_ - 1), keys_ + held_);
        held_ = p_;
        limit_ = distance_of(keys_[p_ - 1]);
    }

    Key* keys_ = nullptr;
    std::int64_t room_ = 0, p_ = 0, held_ = 0;
    float limit_ = kLargest;
};

}  // namespace

struct CoarseQuantizer::Scratch {
    AlignedBuffer<float> queries, distances;
    AlignedBuffer<Key> keys;
    const float* starts[kGroup];
    Nearest nearest[kGroup];
};

CoarseQuantizer::CoarseQuantizer(const float* centroids, std::int64_t nlist, std::int64_t dim, bool inner_product,
                                 const BlockKernels& kernels)
    : nlist_(nlist), dim_(dim), padded_dim_(round_up(dim, kDimStep)), inner_product_(inner_product), kernels_(kernels) {
    centroids_.grow(round_up(nlist, kBlockRows) * padded_dim_);
    for (std::int64_t list = 0; list < nlist; ++list)
        std::memcpy(centroids_.data() + list * padded_dim_, centroids + list * dim, static_cast<std::size_t>(dim) * 4);
}

CoarseQuantizer::~CoarseQuantizer() { delete idle_.load(std::memory_order_acquire); }

void CoarseQuantizer::quantize(const float* queries, std::int64_t n, std::int64_t p, std::int64_t* lists, float* distances) {
    const bool sorted = p * kSortedShare >= nlist_;
    const std::int64_t room = sorted ? round_up(nlist_, kBlockRows) + kBlockRows : 2 * p + 4 * kBlockRows;
    const std::int64_t group = std::min(n, std::clamp(kKeysOfGroup / room, kLeastGroup, kGroup));
    const std::int64_t block_floats = kBlockRows * padded_dim_;
    const std::int64_t ahead = (kFloatsAhead + block_floats - 1) / block_floats;
    const std::int64_t blocks = (nlist_ + kBlockRows - 1) / kBlockRows;
    const auto compare = inner_product_ ? kernels_.inner_products : kernels_.squared_l2;
    const float sign = inner_product_ ? -1.0f : 1.0f;

    std::unique_ptr<Scratch> scratch(idle_.exchange(nullptr, std::memory_order_acquire));
    if (scratch == nullptr) scratch = std::make_unique<Scratch>();
    scratch->queries.grow(group * padded_dim_);
    scratch->distances.grow(group * kBlockRows);
    scratch->keys.grow((group + (sorted ? 1 : 0)) * room);
    Key* const spare = sorted ? scratch->keys.data() + group * room : nullptr;
    for (std::int64_t first = 0; first < n; first += group) {
        const std::int64_t here = std::min(group, n - first);
        for (std::int64_t q = 0; q < here; ++q) {
            float* const copy = scratch->queries.data() + q * padded_dim_;
            const float* const query = queries + (first + q) * dim_;
            for (std::int64_t i = 0; i < dim_; ++i) copy[i] = sign * query[i];
            scratch->starts[q] = copy;
            scratch->nearest[q].reset(scratch->keys.data() + q * room, room, p);
        }
        for (std::int64_t block = 0; block < blocks; ++block) {
            const float* const rows = centroids_.data() + block * block_floats;
            const std::int64_t left = nlist_ - block * kBlockRows;
            const std::uint32_t valid = left >= kBlockRows ? 0xffffu : (1u << left) - 1u;
            compare(rows, padded_dim_, scratch->starts, static_cast<int>(here), padded_dim_, scratch->distances.data(),
                    block + ahead < blocks ? rows + ahead * block_floats : nullptr, nullptr);
            for (std::int64_t q = 0; q < here; ++q)
                scratch->nearest[q].offer(scratch->distances.data() + q * kBlockRows,
                                          static_cast<std::uint32_t>(block * kBlockRows), valid, kernels_);
        }
        for (std::int64_t q = 0; q < here; ++q)
            scratch->nearest[q].finish(spare, inner_product_, lists + (first + q) * p, distances + (first + q) * p);
    }
    scratch.reset(idle_.exchange(scratch.release(), std::memory_order_acq_rel));
}

}  // namespace hybridindex
