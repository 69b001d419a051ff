// Where the rows of a list are in the pages of an arena.
#pragma once
#include <algorithm>
#include <cstdint>

#include "simd/block_kernels.h"
#include "simd/codes.h"

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

    std::int64_t row_bytes() const { return codes_.rows.code_size; }

private:
    const PagedCodes& codes_;
    const std::int32_t* pages_;
    const bool dense_;
};

// Goes over rows [first, end) of a list block by block. Looks pages up once a run: that takes divisions.
class BlockWalk {
public:
    BlockWalk(const PagedList& pages, std::int64_t first, std::int64_t end) : pages_(pages), first_(first), end_(end) {
        if (more()) look_up();
    }

    bool more() const { return first_ < end_; }
    void advance() {
        first_ += kBlockRows;
        if (first_ < run_end_)
            at_ += kBlockRows * pages_.row_bytes();
        else if (more())
            look_up();
    }

    std::int64_t first() const { return first_; }
    // Of this block: kBlockRows, fewer in the last one.
    int rows() const { return static_cast<int>(std::min<std::int64_t>(kBlockRows, end_ - first_)); }
    // Whether they lie one after the other.
    bool whole() const { return first_ + rows() <= run_end_; }
    const std::uint8_t* row(int r) const {
        return first_ + r < run_end_ ? at_ + r * pages_.row_bytes() : pages_.row(first_ + r);
    }

    // Where the next block begins, for the kernels to fetch ahead, or `after` behind the last one. They fetch one
    // stretch: a block that is cut is asked for here, and nullptr returned.
    const std::uint8_t* fetch_next(const std::uint8_t* after) const {
        const std::int64_t next = first_ + kBlockRows, last = std::min(next + kBlockRows, end_);
        if (next >= end_) return after;
        if (last <= run_end_) return at_ + kBlockRows * pages_.row_bytes();
        if (pages_.run(next, last - next) == last - next) return pages_.row(next);
        for (std::int64_t row = next, run; row < last; row += run) {
            run = pages_.run(row, last - row);
            const std::uint8_t* piece = pages_.row(row);
            for (std::int64_t i = 0; i < run * pages_.row_bytes(); i += 64) __builtin_prefetch(piece + i, 0, 2);
        }
        return nullptr;
    }

private:
    void look_up() {
        at_ = pages_.row(first_);
        run_end_ = first_ + pages_.run(first_, end_ - first_);
    }

    const PagedList& pages_;
    std::int64_t first_;
    const std::int64_t end_;
    const std::uint8_t* at_ = nullptr;  // row first_
    std::int64_t run_end_ = 0;
};

}  // namespace hybridindex
