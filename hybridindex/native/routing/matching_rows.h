// The rows of probed lists that a filter leaves.
#pragma once
#include <bit>
#include <cstdint>
#include <cstring>

namespace hybridindex {

// A bit for each row of all lists, one list after the other.
struct RowMask {
    const std::uint8_t* bits;  // bit r & 7 of byte r >> 3 is row r's
    std::int64_t n_bits;       // a multiple of 64
    const std::int64_t* first; // (nlist + 1): the first row of each list
    std::int64_t nlist;

    static constexpr std::int64_t kWordBits = 64;
    static_assert(std::endian::native == std::endian::little, "bytes of the mask are read as words");

    std::uint64_t word(std::int64_t at) const {
        std::uint64_t found;
        std::memcpy(&found, bits + at * 8, sizeof found);
        return found;
    }
    // Of rows `row` and on of a list, `count` of them, at most 32: as bits.
    std::uint32_t of_rows(std::int64_t list, std::int64_t row, std::int64_t count) const {
        const std::int64_t at = first[list] + row, shift = at % kWordBits;
        std::uint64_t found = word(at / kWordBits) >> shift;
        if (shift + count > kWordBits) found |= word(at / kWordBits + 1) << (kWordBits - shift);
        return static_cast<std::uint32_t>(found) & (count >= 32 ? ~0u : (1u << count) - 1u);
    }
    // Calls visit(row) for each such row of a list from `begin` to `end`, in order, until it returns false: then false.
    template <typename Visit>
    bool each(std::int64_t list, std::int64_t begin, std::int64_t end, const Visit& visit) const {
        const std::int64_t start = first[list], from = start + begin, to = start + end;
        for (std::int64_t at = from / kWordBits; at * kWordBits < to; ++at) {
            std::uint64_t left = word(at);
            if (at * kWordBits < from) left &= ~std::uint64_t{0} << (from % kWordBits);
            if (to < (at + 1) * kWordBits) left &= (std::uint64_t{1} << (to % kWordBits)) - 1;
            for (; left != 0; left &= left - 1)
                if (!visit(at * kWordBits + std::countr_zero(left) - start)) return false;
        }
        return true;
    }
};

// Writes (n, width) positions, list << 32 | row in the list: of each query the rows that `mask` leaves of its lists, in
// the order of its (p) probes, then -1. Probe -1: none. Throws std::out_of_range for a probe that is no list, or a list
// that leaves the mask; std::length_error where a query has more than `width` rows.
void matching_rows(const RowMask& mask, const std::int64_t* probes, std::int64_t n, std::int64_t p, std::int64_t width,
                   std::int64_t* positions);

}  // namespace hybridindex
