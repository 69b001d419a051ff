// What a scan has to do, in pieces: which queries probe each list, and ranges of rows in the order they are scanned.
// Pure; no threads.
#pragma once
#include <cstdint>
#include <vector>

namespace hybridindex {

// Queries compared with a block before the next block is read: bounds the scratch of a thread.
constexpr std::int64_t kGroup = 256;

// Lists with rows that somebody probes, in the order of their best rank: near lists first, so that heaps fill early
// with what stays in them. Members of list i are members[starts[i] .. starts[i + 1]).
struct ProbedLists {
    std::vector<std::int64_t> lists;
    std::vector<std::int64_t> starts;
    std::vector<std::int32_t> members;
    // Of each member, where its probe stands in (n, p); only where asked for.
    std::vector<std::int64_t> places;
};

// Rows [first, first + count) of probed list `list` (an index into ProbedLists).
struct ScanItem {
    std::int32_t list;
    std::int32_t count;
    std::int64_t first;
};

// Turns (n, p) probes around. `slot_of` is (nlist) of -1, and is left so.
// Throws std::out_of_range for a probe outside [-1, nlist).
void group_probes(const std::int64_t* probes, std::int64_t n, std::int64_t p, const std::int64_t* extents,
                  std::int64_t nlist, std::vector<std::int32_t>& slot_of, ProbedLists& out, bool with_places = false);

// How lists are stored, as far as it decides the work of a scan: `extents` has (size, capacity, byte offset) per list.
struct ListShape {
    const std::int64_t* extents;
    std::int64_t code_size;
    std::int64_t dim;
};

// Cuts lists into items of about equal work for `threads` threads and counts them for each of `n` queries. With
// `finish_early` the lists of the query with the least work come first, then those of the next: every list is still read
// once. Returns the work of all items, about in bytes read.
std::int64_t make_items(const ProbedLists& probed, const ListShape& shape, std::int64_t n, int threads, bool finish_early,
                        std::vector<ScanItem>& items, std::vector<std::int32_t>& items_of_query);

}  // namespace hybridindex
