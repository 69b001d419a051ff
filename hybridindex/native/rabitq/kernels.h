// Estimates of coded rows: the inner loops of the scan of RaBitQ codes, once per instruction set. All give the same
// numbers, to the bit.
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

// Blocks of a list, one behind the other.
struct CodedRun {
    const std::uint8_t* blocks;
    std::int64_t rows;  // the last block may hold fewer than kCodedRows
    std::int64_t block_bytes;
    int bits;
    std::int64_t chunks;
    bool l2;
    void (*decode_f16)(const std::uint8_t* halves, std::int64_t count, float* out);
    // Blocks are fetched so many bytes ahead, whole ones; 0: none. Beyond the run they are those at `later`.
    std::int64_t ahead;
    const std::uint8_t* later;
    std::int64_t later_bytes;

    std::int64_t count() const { return (rows + kCodedRows - 1) / kCodedRows; }
};

// Queries with a list, one entry each: their tables and the whole numbers of these, what is theirs of an estimate (see
// docs/index-format.md), and the largest estimate that is of use.
struct QueriesOfRun {
    const std::uint8_t* const* tables;
    const std::int8_t* const* whole;
    const float* u;
    const float* w;
    const float* centre_products;
    const float* limits;
};

// Candidates of one query: estimates and positions of rows, `count` of them; there is room for `room`.
struct FoundRows {
    float* estimates;
    std::int64_t* positions;
    std::int64_t count, room;

    // Whether a block may have more than there is room for.
    bool full() const { return count > room - kCodedRows; }
};

struct RabitqKernels {
    const char* name;
    // Queries of one call, at most.
    int together;
    // Estimates the rows of block `first` and of those behind it for n queries, and appends those within the limit of a
    // query to what was found for it; `position` is that of the run's first row. Smaller is nearer. Returns the block
    // after the last one that it compared: it stops where somebody's room is full, and begins only where nobody's is.
    // `sums` and `out`: scratch of (n, kCodedRows).
    std::int64_t (*find)(const CodedRun& run, std::int64_t first, const QueriesOfRun& queries, int n,
                         std::int64_t position, FoundRows* const* found, std::int32_t* sums, float* out);
    // Numbers the n estimates, ordered as these, into `keys`; `last` is one that k or more do not exceed, and fewer would
    // not exceed a smaller one, or just k do not exceed it. Returns how many do not exceed it.
    std::int64_t (*least_key)(const float* estimates, std::int64_t n, std::int64_t k, std::int32_t* keys, std::int32_t* last);
};

// Keeps the k best of n > k rows, equal estimates ordered by position, and returns the estimate of the last of these.
// `keys`: scratch of n.
float keep_best_rows(float* estimates, std::int64_t* positions, std::int64_t n, std::int64_t k, std::int32_t* keys);

// The best of at most this level that this CPU runs and that agrees with the portable ones.
const RabitqKernels& rabitq_kernels_for(const BlockKernels& level);

extern const RabitqKernels* const portable_rabitq_kernels;
extern const RabitqKernels* const avx2_rabitq_kernels;
extern const RabitqKernels* const neon_rabitq_kernels;
extern const RabitqKernels* const neon_dot_rabitq_kernels;
extern const RabitqKernels* const avx512_rabitq_kernels;

}  // namespace hybridindex
