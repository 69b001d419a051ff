// Rows that were added to lists: extents in one buffer, each with the codes of its rows, then for each row its id and its
// number. Copying them is what a writer does most, beside searches that must not wait for it.
#pragma once
#include <cstdint>

namespace hybridindex {

struct ExtentBuffer {
    std::uint8_t* base;  // at a multiple of 8 bytes
    std::int64_t nbytes;
    std::int64_t code_size;
};

// What changes of one extent: (size, capacity, byte offset) before and after.
struct ExtentMoves {
    const std::int64_t* before;  // (n, 3)
    const std::int64_t* after;   // (n, 3)
    std::int64_t n;
    // Rows that are left out, ascending, of extent i: gone[gone_starts[i] .. gone_starts[i + 1]).
    const std::int64_t* gone_starts;  // (n + 1)
    const std::int64_t* gone;
};

// Copies rows to other extents, in their order, of the same buffer or of another. Throws std::out_of_range before it reads
// or writes outside of either, std::invalid_argument where sizes do not agree.
void move_extents(const ExtentBuffer& from, const ExtentBuffer& to, const ExtentMoves& moves);

// Puts row order[i] of (n, code_size) codes at byte at[i] of the buffer. Throws std::out_of_range as above.
void put_rows(const ExtentBuffer& to, const std::uint8_t* codes, const std::int64_t* order, const std::int64_t* at,
              std::int64_t n);

// Has the system give the memory of these bytes now, and changes none: others may write there meanwhile. Throws
// std::out_of_range as above.
void touch_ahead(const ExtentBuffer& buffer, std::int64_t start, std::int64_t nbytes);

}  // namespace hybridindex
