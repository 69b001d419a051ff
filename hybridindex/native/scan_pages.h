// List-major scan of paged lists in main memory: the kernel of the stand-in device.
#pragma once
#include <cstddef>
#include <cstdint>

namespace hybridindex {

enum class CodeKind : int { f32 = 0, f16 = 1, sq8 = 2 };

// Where codes are and how they decode. A page holds whole rows.
struct PagedCodes {
    const std::uint8_t* base;
    std::int64_t n_pages;
    std::int64_t page_bytes;
    std::int64_t rows_per_page;
    std::int64_t code_size;
    std::int64_t dim;
    CodeKind kind;
    const float* scale;   // (dim) sq8 only: decoded = offset + scale * code
    const float* offset;  // (dim) sq8 only
};

// Lists to scan, each with the queries that probe it. Ragged arrays by their starts, (n_lists + 1).
struct ScanPlan {
    std::int64_t n_lists;
    const std::int64_t* list_ids;
    const std::int64_t* sizes;
    const std::int64_t* page_starts;
    const std::int32_t* pages;
    const std::int64_t* member_starts;
    const std::int64_t* members;  // rows of queries
    const float* centroids;       // (n_lists, dim) added to decoded rows, or null
};

// Top-k of (n, dim) queries: distances (n, k), best first, and positions (n, k) = list id << 32 | row in list, -1 empty.
// Throws std::out_of_range before it reads anything outside the arena or the queries.
void scan_pages(const PagedCodes& codes, const ScanPlan& plan, const float* queries, std::int64_t n, std::int64_t k,
                bool keep_max, float* distances, std::int64_t* positions);

}  // namespace hybridindex
