// The inner loops of the scan of product-quantized rows, once per instruction set. All give the same numbers.
#pragma once
#include <cstdint>

#include "pq/form.h"

namespace hybridindex {

struct BlockKernels;

// Largest number of a table of bytes. With 63, four lookups could be added up in a byte, but three times the rows would
// be left to compare.
constexpr int kMostLevel = 255;

// What a query's table of bytes says of its table: the sum of a row's bytes, times `step`, plus `low`, is at most the sum
// of its entries.
struct PqBound {
    float step;
    double low;
    // No sum of entries is larger than this; infinite or no number where the bound is of no use.
    double most;
};

struct PqKernels {
    const char* name;
    // The table of a query: (parts, words).
    void (*table)(const PqForm& form, const float* query, float* out);
    // Entries that add up to the terms of the rows of a list: (parts, words).
    void (*term_table)(const PqForm& form, const float* centroid, float* out);
    // (tables(), words) bytes.
    PqBound (*round)(const PqForm& form, const float* table, std::uint8_t* out);
    // What of the distance is the same for all rows of a list.
    float (*base)(const PqForm& form, const float* query, const float* centroid);
    // sums[q * 32 + r]: bytes of row r. Of a block of four-bit codes, while as many bytes are fetched from `ahead` on
    // (nullptr: none); and of rows that lie `stride` bytes apart.
    void (*sums_of_block)(const std::uint8_t* block, std::int64_t pairs, const std::uint8_t* const* tables, int n,
                          std::uint16_t* sums, const std::uint8_t* ahead);
    void (*sums_of_rows)(const std::uint8_t* rows, std::int64_t stride, int n_rows, std::int64_t parts,
                         const std::uint8_t* table, std::uint16_t* sums);
    // Of each of n queries, which of its 32 sums are at most its limit. And of one query, which are when multiplied by `step` and added to the row's term, up to
    // the rounding of that.
    void (*at_most)(const std::uint16_t* sums, int n, const std::uint16_t* limits, std::uint32_t* near);
    std::uint32_t (*at_most_with)(const std::uint16_t* sums, const float* terms, float step, float limit);
    // out[r]: sum of the entries of row r of a block, of the rows that `wanted` has; what is in the other places is nothing.
    void (*sums_in_block)(const std::uint8_t* block, std::uint32_t wanted, std::int64_t parts, const float* table, float* out);
    // The same of one row; and of one whose numbers follow each other.
    float (*sum_in_block)(const std::uint8_t* block, int row, std::int64_t parts, const float* table);
    float (*sum_of_row)(const std::uint8_t* row, std::int64_t parts, const float* table);
};

// The best of this level that this CPU runs.
const PqKernels& pq_kernels_for(const BlockKernels& level);

extern const PqKernels* const portable_pq_kernels;
extern const PqKernels* const avx2_pq_kernels;
extern const PqKernels* const avx512_pq_kernels;
extern const PqKernels* const neon_pq_kernels;

}  // namespace hybridindex
