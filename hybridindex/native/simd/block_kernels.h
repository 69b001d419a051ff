// Distances of a block of rows to a group of queries: the inner loops of the host scan, once per instruction set.
//
// Every (row, query) pair is summed in the same order whatever the shape of the tile it falls into, so that results
// depend neither on the number of threads nor on which queries share a batch.
#pragma once
#include <cstdint>

namespace hybridindex {

// Rows in a block. Row pointers may have any alignment.
constexpr int kBlockRows = 16;
// Queries that pass over a block together; and how many it takes until the next block is on its way.
constexpr int kTileQueries = 4, kFetchQueries = 16;
// Dimensions are padded with zeros to a multiple of this; rows of a filter to a multiple of so many bytes.
constexpr std::int64_t kDimStep = 16;
constexpr std::int64_t kFilterStep = 64;

// Of a block of rows.
struct RowTerms {
    float length[kBlockRows];
    float square[kBlockRows];
};

// Of a group of queries, one entry each: see BlockKernels::filter. The arrays have room for a multiple of 16.
struct QueryLimits {
    const float* base;
    const float* square;
    const float* length;
};

// Of a query against rows of bytes, offset + scale * byte. With most[i] = |offset[i]| + 255 |scale[i]|, for inner products:
// constant = <query, offset>, magnitude = sum of |query[i]| most[i]; for distances: |query - offset|^2 and the sum of
// (|query[i]| + most[i])^2.
struct ScaledQuery {
    double constant, magnitude;
};

// w[i] = step * weights[i] + error[i].
struct QueryWeights {
    double step;
    double error_sum;     // sum of error[i]
    double error_length;  // |error|
};

// Of w and w', which is w rounded to bfloat16.
struct RoundedQuery {
    double square, lost, kept;  // |w|^2, |w - w'|^2, |w'|^2
};

struct BlockKernels {
    const char* name;
    // out[q * kBlockRows + r] = -<queries[q], row r>, as queries come negated, or |queries[q] - row r|^2. Fetches ahead the
    // block that will be read after this one, `next`; and, a quarter block for every kTileQueries beyond kFetchQueries,
    // what comes later, `later`. Either may be nullptr. One query without `next` takes the rows in turn, as a stream
    // that the CPU fetches ahead by itself.
    void (*inner_products)(const float* rows, std::int64_t stride, const float* const* queries, int n_queries,
                           std::int64_t dim, float* out, const void* next, const void* later);
    void (*squared_l2)(const float* rows, std::int64_t stride, const float* const* queries, int n_queries,
                       std::int64_t dim, float* out, const void* next, const void* later);
    // The same for n pairs of a row and a query, to the bit. Fetches as many rows that will be read later, `ahead`;
    // nullptr: none.
    void (*inner_product_pairs)(const float* const* rows, const float* const* queries, int n, std::int64_t dim, float* out,
                                const float* const* ahead);
    void (*squared_l2_pairs)(const float* const* rows, const float* const* queries, int n, std::int64_t dim, float* out,
                             const float* const* ahead);
    // Bit r is set where values[r] <= limit, for kBlockRows values.
    std::uint32_t (*at_most)(const float* values, float limit);
    // Codes to floats, dim elements: IEEE half, bfloat16, and offset + scale * byte.
    void (*decode_f16)(const std::uint8_t* codes, std::int64_t dim, float* out);
    void (*decode_bf16)(const std::uint8_t* codes, std::int64_t dim, float* out);
    void (*decode_u8)(const std::uint8_t* codes, const float* scale, const float* offset, std::int64_t dim, float* out);

    // out[r] = <row r, query>, the exact integer, of kBlockRows rows of unsigned bytes and a query of signed ones.
    // Fetches as many bytes from `next` on; nullptr: none. row_bytes is a multiple of kFilterStep.
    void (*dots)(const std::uint8_t* rows, std::int64_t row_bytes, const std::int8_t* query, std::int32_t* out,
                 const void* next);
    // Whether that takes less time than products of floats.
    bool fast_dots;

    // The filters: cheap dot products of a block with queries, to find the pairs that are worth an exact distance. Rows
    // and queries are `row_bytes` bytes of whole numbers, or of bfloat16, a multiple of kFilterStep.
    //
    // Queries are packed once for many blocks: `packed` has room for packed_bytes(n, row_bytes), at a multiple of 64.
    std::int64_t (*packed_bytes)(int n_queries, std::int64_t row_bytes);
    void (*pack)(const std::int8_t* const* queries, int n_queries, std::int64_t row_bytes, std::int8_t* packed);
    // Pairs that are not above their limit, dot + limits.square * terms.square[r] - limits.length * terms.length[r] <=
    // limits.base, as (q << 4 | r) into found (n_queries * kBlockRows). Fetches the block `next` ahead; it may be
    // nullptr. Calls on one thread stand between begin and end.
    //
    // Rows of bytes, queries of signed bytes; dot is the exact integer product.
    int (*filter)(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n_queries,
                  std::int64_t row_bytes, const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found,
                  const void* next);
    // The same, to the pair and in the same order, of rows and queries that interleave() has put in groups of kBlockRows;
    // queries that are missing in the last group are zeros. nullptr where the CPU has nothing that pays.
    int (*filter_interleaved)(const std::uint8_t* rows, const std::int8_t* queries, int n_queries, std::int64_t row_bytes,
                              const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found, const void* next);
    // Both bfloat16, sums in float32; kFewestHalves queries at least. Fetches next_bytes ahead. nullptr where the CPU has
    // nothing that pays.
    int (*filter_halves)(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n_queries,
                         std::int64_t row_bytes, const QueryLimits& limits, const RowTerms& terms, std::uint32_t* found,
                         const void* next, std::int64_t next_bytes);
    void (*begin)();
    void (*end)();

    // Of each row, |c - 128|, and for distances the sum of (scale[i] * c[i])^2 over code_dim elements; scale may be
    // nullptr, then that sum is 0.
    void (*row_terms)(const std::uint8_t* rows, std::int64_t stride, int n_rows, std::int64_t code_dim,
                      const float* scale, RowTerms* out);
    // w: query * scale, or -2 (query - offset) * scale.
    ScaledQuery (*scale_query)(const float* query, const float* scale, const float* offset, std::int64_t dim,
                               bool inner_product, float* w);
    // weights[i] = round(w[i] / step), with the step that makes the largest 127; and what that loses.
    QueryWeights (*weigh)(const float* w, std::int64_t dim, std::int8_t* weights);
    // A block of floats as bfloat16, row_bytes a row, with |x| and |x|^2; rows beyond n_rows will not pass. Fetches
    // next_bytes ahead, n_rows * row_bytes at most. nullptr where filter_halves is.
    void (*round_rows)(const float* rows, std::int64_t stride, int n_rows, std::int64_t dim, std::int64_t row_bytes,
                       std::uint8_t* halves, RowTerms* out, const void* next, std::int64_t next_bytes);
    // w = factor * query as bfloat16; dim is a multiple of kDimStep. nullptr where filter_halves is.
    RoundedQuery (*round_query)(const float* query, float factor, std::int64_t dim, std::uint16_t* halves);
};

// Puts kBlockRows rows into as many bytes: the first 4 bytes of each, then the next 4 of each, and so on. n of them are
// there; the others are zeros. row_bytes is a multiple of kFilterStep.
void interleave(const std::uint8_t* const* rows, int n, std::int64_t row_bytes, std::uint8_t* out);

// Fewer queries are compared faster as they are.
constexpr int kFewestHalves = 6;

// Whether the CPU fetches one stream of memory ahead faster by itself than when it is told to. So do AMD's (measured on
// Zen 4).
bool streams_by_itself();

// The best that this CPU runs, and by name ("portable", "neon", "avx2", "avx512", "amx"); nullptr: not for this CPU or
// build.
const BlockKernels& best_kernels();
const BlockKernels* kernels_named(const char* name);

// nullptr where the compiler could not make them. Data, not functions: nothing compiled for a newer CPU runs before it
// is known to be there.
extern const BlockKernels* const portable_kernels;
extern const BlockKernels* const avx2_kernels;
extern const BlockKernels* const avx512_kernels;
extern const BlockKernels* const amx_kernels;

}  // namespace hybridindex
