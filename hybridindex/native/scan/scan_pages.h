// List-major scan of paged lists in main memory, on the calling thread: the kernel of the stand-in device.
#pragma once
#include <cstdint>

#include "routing/matching_rows.h"
#include "simd/block_kernels.h"
#include "scan/paged_list.h"
#include "scan/row_scan.h"

namespace hybridindex {

// Lists to scan, each with the queries that probe it. Ragged arrays by their starts, (n_lists + 1). Lists that come
// early are scanned first: the nearer they are, the more of the later ones is ruled out.
struct PagePlan {
    std::int64_t n_lists;
    const std::int64_t* list_ids;
    const std::int64_t* sizes;
    const std::int64_t* page_starts;
    const std::int32_t* pages;
    const std::int64_t* member_starts;
    const std::int32_t* members;  // rows of queries
    const float* centroids;       // (n_lists, dim) added to decoded rows, or nullptr
    RowMask mask{};               // by list ids, the rows that may be answered; no bits: all

    // Of rows `row` and on of list `l` of the plan, `count` of them, at most 32: as bits.
    std::uint32_t wanted(std::int64_t l, std::int64_t row, std::int64_t count) const {
        if (mask.bits != nullptr) return mask.of_rows(list_ids[l], row, count);
        return count >= 32 ? ~0u : (1u << count) - 1u;
    }
};

struct PageTask {
    const float* queries;  // (n, dim)
    std::int64_t n;
    std::int64_t k;
    bool keep_max;
    float* distances;         // (n, k), best first
    std::int64_t* positions;  // (n, k) list id << 32 | row in list, which orders equal distances; -1 in empty places
};

// Throws std::out_of_range where a plan names what lies outside the arena or the mask, or a query that is none of the n.
void check_plan(const PagePlan& plan, std::int64_t n_pages, std::int64_t rows_per_page, std::int64_t n);

// Throws std::out_of_range before it reads anything outside the arena or the queries.
void scan_pages(const PagedCodes& codes, const PagePlan& plan, const PageTask& task, const BlockKernels& kernels);

// What a scan needs while it runs: queries as the kernels read them, the places of their answers, the rows being
// compared. What says which rows to read is not in it.
RowQueries::Need scratch_need(const RowCodes& codes, bool has_centroids, std::int64_t k);

}  // namespace hybridindex
