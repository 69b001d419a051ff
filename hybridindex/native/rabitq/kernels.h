// Products of coded rows with queries in whole numbers: the inner loops of the scan of RaBitQ codes, once per instruction
// set. All give the same numbers, to the bit.
#pragma once
#include <cstdint>

namespace hybridindex {

struct BlockKernels;

// Rows of a block; and dimensions of a chunk, which holds kChunkBytes of a plane for all rows of a block.
constexpr int kCodedRows = 16;
constexpr std::int64_t kChunkDims = 32, kChunkBytes = 64;
// Largest size of a query's whole numbers. Coarse enough that sums of several tables fit a byte; finer ones were measured
// to need no fewer candidates.
constexpr int most_whole(int bits) { return bits == 1 ? 7 : 15; }
constexpr int table_bias(int bits) { return 4 * most_whole(bits); }
// Of a query's tables, for a chunk: 8 of 16 bytes. Byte v of a table is the sum of the query's four dimensions, those
// whose bit in v is 0 taken negative, plus table_bias(bits). Tables 0 to 3 belong to the low halves of a row's 4 bytes, 4
// to 7 to the high ones.
constexpr std::int64_t kTableBytes = 128;
// Tables of chunks * kChunkDims whole numbers, of the size most_whole(bits) at most.
void fill_tables(const std::int8_t* whole, std::int64_t chunks, int bits, std::uint8_t* tables);

// Of queries with a list, one entry each.
struct QueryFactors {
    const float* u;
    const float* w;
    const float* centre_products;
    const float* limits;
};

struct RabitqKernels {
    const char* name;
    // sums[q * kCodedRows + r] = <V of row r, query q>. `planes` are those of a block; of each query its whole numbers,
    // and the tables of these.
    void (*products)(const std::uint8_t* planes, int bits, std::int64_t chunks, const std::uint8_t* const* tables,
                     const std::int8_t* const* whole, int n, std::int32_t* sums);
    // Estimates of a block for n queries, (n, kCodedRows) into out, and into `near` which of them are at most the query's
    // limit, as bits. f and g are multiples of their scales; h: |o|^2, or nullptr for inner products. Smaller is nearer:
    // see docs/index-format.md.
    void (*estimates)(const float* f, const float* g, const float* h, const std::int32_t* sums, int n,
                      const QueryFactors& queries, float* out, std::uint32_t* near);
};

// The best of at most this level that this CPU runs and that agrees with the portable ones.
const RabitqKernels& rabitq_kernels_for(const BlockKernels& level);

extern const RabitqKernels* const portable_rabitq_kernels;
extern const RabitqKernels* const avx2_rabitq_kernels;
extern const RabitqKernels* const neon_rabitq_kernels;
extern const RabitqKernels* const neon_dot_rabitq_kernels;
extern const RabitqKernels* const avx512_rabitq_kernels;

}  // namespace hybridindex
