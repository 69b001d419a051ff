#include "scan/kept_terms.h"

#include <cstring>

namespace hybridindex {

KeptTerms::KeptTerms(const std::int64_t* extents, std::int64_t nlist, bool squares) {
    starts_.reserve(static_cast<std::size_t>(nlist) + 1);
    std::int64_t blocks = 0;
    for (std::int64_t list = 0; list < nlist; ++list) {
        starts_.push_back(blocks);
        blocks += (extents[3 * list] + kBlockRows - 1) / kBlockRows;
    }
    starts_.push_back(blocks);
    const std::size_t n = static_cast<std::size_t>(blocks);
    states_ = std::make_unique<std::atomic<std::uint8_t>[]>(n);
    // Not set to zero: that would touch all of it.
    lengths_ = std::make_unique_for_overwrite<Values[]>(n);
    if (squares) squares_ = std::make_unique_for_overwrite<Values[]>(n);
}

bool KeptTerms::Block::load(RowTerms& out) const {
    if (all_ == nullptr || all_->states_[index_].load(std::memory_order_acquire) != kKnown) return false;
    std::memcpy(out.length, all_->lengths_[index_].of, sizeof(out.length));
    if (all_->squares_)
        std::memcpy(out.square, all_->squares_[index_].of, sizeof(out.square));
    else
        std::memset(out.square, 0, sizeof(out.square));
    return true;
}

void KeptTerms::Block::keep(const RowTerms& terms) const {
    if (all_ == nullptr) return;
    std::atomic<std::uint8_t>& state = all_->states_[index_];
    std::uint8_t expected = kUnknown;
    // Another thread may be here with the same numbers.
    if (!state.compare_exchange_strong(expected, kWriting, std::memory_order_relaxed)) return;
    std::memcpy(all_->lengths_[index_].of, terms.length, sizeof(terms.length));
    if (all_->squares_) std::memcpy(all_->squares_[index_].of, terms.square, sizeof(terms.square));
    expected = kWriting;  // not where it was told to forget meanwhile
    state.compare_exchange_strong(expected, kKnown, std::memory_order_release, std::memory_order_relaxed);
}

void KeptTerms::forget(std::int64_t list) {
    const std::size_t at = static_cast<std::size_t>(list);
    for (std::int64_t block = starts_[at]; block < starts_[at + 1]; ++block) states_[block].store(kNever);
}

void KeptTerms::Block::fetch() const {
    if (all_ == nullptr) return;
    __builtin_prefetch(&all_->lengths_[index_], 0, 2);
    if (all_->squares_) __builtin_prefetch(&all_->squares_[index_], 0, 2);
}

}  // namespace hybridindex
