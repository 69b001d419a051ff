// Where the rows of a list are in the pages of an arena.
#pragma once
#include <cstdint>

#include "codes.h"

namespace hybridindex {

// Pages in main memory. A page holds rows_per_page whole rows.
struct PagedCodes {
    const std::uint8_t* base;
    std::int64_t n_pages;
    std::int64_t page_bytes;
    std::int64_t rows_per_page;
    RowCodes rows;
};

class PagedList {
public:
    PagedList(const PagedCodes& codes, const std::int32_t* pages)
        : codes_(codes), pages_(pages), dense_(codes.page_bytes == codes.rows_per_page * codes.rows.code_size) {}

    const std::uint8_t* row(std::int64_t i) const {
        return codes_.base + pages_[i / codes_.rows_per_page] * codes_.page_bytes +
               i % codes_.rows_per_page * codes_.rows.code_size;
    }

    // Of `count` rows from `first`, how many lie one after the other; at least one. Full pages that follow each other
    // in the arena are one run.
    std::int64_t run(std::int64_t first, std::int64_t count) const {
        std::int64_t page = first / codes_.rows_per_page, end = (page + 1) * codes_.rows_per_page;
        for (; end < first + count && dense_ && pages_[page + 1] == pages_[page] + 1; ++page) end += codes_.rows_per_page;
        return end < first + count ? end - first : count;
    }

private:
    const PagedCodes& codes_;
    const std::int32_t* pages_;
    const bool dense_;
};

}  // namespace hybridindex
