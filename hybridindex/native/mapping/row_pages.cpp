#include "mapping/row_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridindex {
namespace {

// Pages between two wanted ones that are looked at beside them: a call takes as long as a look at so many.
constexpr std::int64_t kGap = 256;

// Asks for the pages of one run, ascending; those in memory are left out where `memory` has room for a look.
std::int64_t ask_for_run(const MappedRows& lists, std::int64_t page_bytes, const std::int64_t* first,
                         const std::int64_t* last, std::vector<unsigned char>* memory) {
    const auto at = [&](std::int64_t page) { return const_cast<std::uint8_t*>(lists.base) + page * page_bytes; };
    const std::int64_t begin = *first;
    if (memory != nullptr) {
        memory->resize(static_cast<std::size_t>(*(last - 1) - begin + 1));
        if (mincore(at(begin), memory->size() * static_cast<std::size_t>(page_bytes), memory->data()) != 0)
            memory = nullptr;
    }
    const auto wanted = [&](std::int64_t page) {
        return memory == nullptr || ((*memory)[static_cast<std::size_t>(page - begin)] & 1) == 0;
    };
    std::int64_t asked = 0;
    while (first != last) {
        if (!wanted(*first)) {
            ++first;
            continue;
        }
        const std::int64_t start = *first;
        std::int64_t stop = start;
        for (; first != last && *first == stop && wanted(*first); ++first) ++stop;
        // Advice: where it is not taken, the fault reads the page.
        madvise(at(start), static_cast<std::size_t>((stop - start) * page_bytes), MADV_WILLNEED);
        asked += stop - start;
    }
    return asked;
}

}  // namespace

std::int64_t ask_for_rows(const MappedRows& lists, const std::int64_t* positions, std::int64_t count, bool rows,
                          bool seen) {
    const std::int64_t page_bytes = sysconf(_SC_PAGESIZE);
    std::vector<std::int64_t> pages;
    pages.reserve(static_cast<std::size_t>(2 * count));
    const auto add = [&](std::int64_t start, std::int64_t nbytes) {
        for (std::int64_t page = start / page_bytes; page <= (start + nbytes - 1) / page_bytes; ++page)
            pages.push_back(page);
    };
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t position = positions[i], list = position >> 32, row = position & 0xffffffff;
        if (position == -1) continue;
        if (position < 0 || list >= lists.nlist || row >= lists.extents[3 * list])
            throw std::out_of_range("position " + std::to_string(position) + " is no row");
        const std::int64_t* const extent = lists.extents + 3 * list;
        if (rows) add(extent[2] + row * lists.row_bytes, lists.row_bytes);
        add(extent[2] + extent[1] * lists.row_bytes + 8 * row, 8);
    }
    std::sort(pages.begin(), pages.end());
    pages.erase(std::unique(pages.begin(), pages.end()), pages.end());
    std::vector<unsigned char> memory;
    std::int64_t asked = 0;
    for (const std::int64_t *first = pages.data(), *const end = first + pages.size(); first != end;) {
        const std::int64_t* last = first + 1;
        while (last != end && *last - *(last - 1) <= kGap) ++last;
        asked += ask_for_run(lists, page_bytes, first, last, seen ? &memory : nullptr);
        first = last;
    }
    return asked;
}

}  // namespace hybridindex
