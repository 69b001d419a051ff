// Scan of RaBitQ codes of paged lists in main memory, on the calling thread: what the stand-in device does with codes.
#pragma once
#include <cstdint>

#include "rabitq/code_scan.h"
#include "scan/scan_pages.h"

namespace hybridindex {

// Pages in main memory, of whole blocks.
struct CodePages {
    const std::uint8_t* base;
    std::int64_t n_pages;
    std::int64_t page_bytes;
    std::int64_t rows_per_page;  // a multiple of kCodedRows
    CodeFormat format;
};

// Estimates are answered for distances.
struct CodePageTask {
    PageTask answer;
    const float* centre_products;  // of each member of the plan
    const float* centre_squares;   // of each list of the plan
};

// Throws std::out_of_range before it reads anything outside the arena or the queries.
void scan_code_pages(const CodePages& pages, const PagePlan& plan, const CodePageTask& task, const BlockKernels& blocks,
                     const RabitqKernels& kernels);

// As scratch_need.
RowQueries::Need code_scratch_need(const CodeFormat& format, std::int64_t k);

}  // namespace hybridindex
