// Reading chosen rows of mapped lists from the disk: all their pages are asked for at once, so that the reads overlap.
// A page fault would wait for one page after the other.
#pragma once
#include <cstdint>

namespace hybridindex {

// Mapped lists: rows, then ids; `extents` has (size, capacity, byte offset) per list.
struct MappedRows {
    const std::uint8_t* base;  // at the beginning of a page
    const std::int64_t* extents;
    std::int64_t nlist;
    std::int64_t row_bytes;
};

// Asks the system to read the pages of the ids at `positions` (list << 32 | row; -1: none), and with `rows` those of
// their rows. Does not wait for them.
//
// With `seen` pages that are in memory are left out: the system tells who owns the file, or may write it. Returns the
// number of pages that were asked for. Throws std::out_of_range for a position that is no row.
std::int64_t ask_for_rows(const MappedRows& lists, const std::int64_t* positions, std::int64_t count, bool rows,
                          bool seen);

}  // namespace hybridindex
