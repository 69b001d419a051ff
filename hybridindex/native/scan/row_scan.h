// Compares rows with the queries that probe them, a block at a time: through a filter where that is faster, else exactly.
// The caller decides which rows, in what order and on which thread.
#pragma once
#include <cstdint>
#include <span>
#include <vector>

#include "simd/block_kernels.h"
#include "simd/codes.h"
#include "scan/kept_terms.h"
#include "scan/query_bounds.h"
#include "scan/query_heap.h"
#include "jobs/scan_items.h"
#include "simd/aligned_buffer.h"

namespace hybridindex {

// Stored bytes to dim floats; `centroid` is added, or nullptr.
void decode_row(const RowCodes& codes, const BlockKernels& kernels, const std::uint8_t* code, const float* centroid, float* row);

// What all threads of a scan share: how rows are stored, and the queries, as the kernels read them, each with the heap of
// its answer.
class RowQueries {
public:
    // `residual`: rows have a centroid added. Inner products are negated: smaller is nearer.
    RowQueries(const RowCodes& codes, bool residual, bool inner_product, const BlockKernels& kernels);

    // (n, dim) queries, whose answers go to (n, k) arrays. Filters are prepared for groups of up to `widest` queries.
    void prepare(const float* queries, std::int64_t n, std::int64_t k, std::int64_t widest, float* distances,
                 std::int64_t* ids);

    // Memory of the queries goes where it is more than `most` bytes.
    void let_go(std::size_t most) { queries_.let_go(most), filtered_.let_go(most); }

    QueryHeap& heap(std::int32_t query) { return heaps_[static_cast<std::size_t>(query)]; }
    // Whether there is a filter that is worth it for so many queries; bytes are always filtered.
    bool may_filter(std::int64_t n) const { return bytes_ || (halves_ && n >= kFewestHalves); }

    // What a scan needs while it runs, in bytes, with one thread: at most fixed + n * per_query.
    struct Need {
        std::int64_t fixed, per_query;
    };
    Need need(std::int64_t k) const;

private:
    friend class RowScan;
    void copy(const float* queries, std::int64_t n);
    void bound(std::int64_t n);
    const float* query(std::int32_t i) const { return queries_.data() + i * dim_; }
    std::int8_t* filtered(std::int32_t i) { return filtered_.data() + i * row_bytes_; }

    const RowCodes codes_;
    const bool inner_product_;
    const BlockKernels& kernels_;
    const std::int64_t dim_;        // of a row of floats, zeros included
    const bool bytes_, halves_;     // which filter there is
    const std::int64_t row_bytes_;  // of a row in the filter's numbers
    const bool direct_;             // whole blocks are read where they lie
    AlignedBuffer<float> queries_;         // (n, dim_), negated for inner products
    AlignedBuffer<std::int8_t> filtered_;  // (n, row_bytes_)
    std::vector<QueryBound> bounds_;
    std::vector<QueryHeap> heaps_;
};

// Up to kBlockRows rows, one after the other.
struct RowBlock {
    const std::uint8_t* codes;
    int n_rows;
    std::uint32_t wanted;      // of these, as bits
    const std::int64_t* ids;   // of the rows; nullptr: first_id, first_id + 1, ...
    std::int64_t first_id;
    KeptTerms::Block terms;    // where its terms are kept, rows of bytes only
    std::span<const std::uint8_t> next;  // a block that is read after this one, to be fetched ahead, or nothing
};

// One thread's part. Nothing here can fail once there is room.
class RowScan {
public:
    // Before the first group of a scan, for groups of up to `widest` queries.
    void make_room(RowQueries& queries, std::int64_t widest);
    // Calls to scan() stand between; others may use the CPU's registers only outside.
    void begin() const;
    void end() const;

    // What comes next is for these queries, of rows with `centroid` (dim) added; nullptr: none. `later` is what will be
    // read after all blocks of the group: fetched ahead while there is more to compute than to read. Rows that may be
    // answered go into `apart`, one heap for each query of the group; nullptr: into the queries' own heaps, which one
    // thread of a scan may do.
    void start_group(const std::int32_t* members, int n, const float* centroid, std::span<const std::uint8_t> later,
                     QueryHeap* apart = nullptr);
    void scan(const RowBlock& block);
    // Keeps the terms of a block of bytes, so that its first scan finds them. Needs room, and no group.
    void keep_terms(const RowBlock& block) { terms_of(block, bytes_of(block)); }

private:
    // Rows of bytes as the filter reads them.
    struct ByteRows {
        const std::uint8_t* rows;
        std::int64_t stride;
    };
    ByteRows bytes_of(const RowBlock& block);
    RowTerms terms_of(const RowBlock& block, const ByteRows& bytes) const;
    void decode(const std::uint8_t* code, float* row) const;
    const float* rows_of(const RowBlock& block);
    bool filter(const RowBlock& block, const float* rows);
    int filter_bytes(const RowBlock& block, const QueryLimits& limits);
    void compare(const RowBlock& block, const float* rows);
    void compare_found(const RowBlock& block, const float* rows, int n_found);
    void renew_limits();
    float limit(int member) const;
    float base_limit(int member) const;
    QueryHeap& heap(int member) const;

    RowQueries* shared_ = nullptr;
    bool filters_ = false;  // whether any group of this scan may be filtered
    const std::int32_t* members_ = nullptr;
    int n_ = 0;
    bool filtered_ = false;  // this group is
    const float* centroid_ = nullptr;
    QueryHeap* apart_ = nullptr;
    std::span<const std::uint8_t> later_;
    const float* queries_[kGroup];
    // Blocks that are still compared without the filter, and how many that were.
    int exact_left_ = 0, exact_run_ = 0;

    AlignedBuffer<float> rows_;          // a decoded block
    AlignedBuffer<std::uint8_t> codes_;  // a block in the filter's numbers
    AlignedBuffer<float> distances_;     // (group, kBlockRows)
    AlignedBuffer<std::int8_t> packed_;
    AlignedBuffer<float> base_, square_, length_;  // QueryLimits
    AlignedBuffer<std::uint32_t> found_;
};

}  // namespace hybridindex
