// What the filter needs of every block of stored bytes, kept from the first scan of the block: later scans read it once
// and not twice. 4 bytes a row, 8 where distances are compared; memory that no scan has reached is not touched.
#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "simd/block_kernels.h"

namespace hybridindex {

// Safe to use from several threads at once.
class KeptTerms {
public:
    // `extents` has (size, capacity, byte offset) per list.
    KeptTerms(const std::int64_t* extents, std::int64_t nlist, bool squares);

    // One block's; a default one keeps nothing.
    class Block {
    public:
        Block() = default;
        // False where no scan was here yet.
        bool load(RowTerms& out) const;
        void keep(const RowTerms& terms) const;
        void fetch() const;

    private:
        friend class KeptTerms;
        Block(const KeptTerms* all, std::int64_t index) : all_(all), index_(index) {}
        const KeptTerms* all_ = nullptr;
        std::int64_t index_ = 0;
    };

    // Of rows `row` and on; row is a multiple of kBlockRows.
    Block block(std::int64_t list, std::int64_t row) const {
        return {this, starts_[static_cast<std::size_t>(list)] + row / kBlockRows};
    }

    // Keeps nothing of this list from now on: its bytes were not what they should be, and scans that read them may still
    // be under way.
    void forget(std::int64_t list);

private:
    enum State : std::uint8_t { kUnknown, kWriting, kKnown, kNever };
    struct alignas(64) Values {
        float of[kBlockRows];
    };
    std::vector<std::int64_t> starts_;  // blocks before each list, and all
    std::unique_ptr<std::atomic<std::uint8_t>[]> states_;
    std::unique_ptr<Values[]> lengths_, squares_;  // squares_ is empty where none are needed
};

}  // namespace hybridindex
