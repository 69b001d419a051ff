// Scan of product-quantized rows of paged lists in main memory, on the calling thread: what the stand-in device does.
#pragma once
#include <cstdint>

#include "pq/queries.h"
#include "scan/scan_pages.h"

namespace hybridindex {

// Pages in main memory, of whole rows or, of four-bit codes, of whole blocks.
struct PqPages {
    const std::uint8_t* base;
    std::int64_t n_pages;
    std::int64_t page_bytes;
    std::int64_t rows_per_page;
};

// Ids of rows. They order equal distances, which are common: rows may have the same code.
struct PqIds {
    const std::int64_t* base;
    std::int64_t n;
    const std::int64_t* starts;  // (n_lists): where those of each list of the plan begin
};

// As scan_pages, but answers with ids in the place of positions. Throws std::out_of_range before it reads anything outside
// the arena, the ids or the queries.
void scan_pq_pages(const PqPages& pages, const PqForm& form, const PagePlan& plan, const PqIds& ids, const PageTask& task,
                   const PqKernels& kernels);

// As scratch_need.
RowQueries::Need pq_scratch_need(const PqForm& form, std::int64_t k);

}  // namespace hybridindex
