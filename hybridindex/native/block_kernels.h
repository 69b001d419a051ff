// Distances of a block of rows to a group of queries: the inner loops of the host scan, once per instruction set.
//
// Every (row, query) pair is summed in the same order whatever the shape of the tile it falls into, so that results
// depend neither on the number of threads nor on which queries share a batch.
#pragma once
#include <cstdint>

namespace hybridindex {

// Rows in a block. Row pointers may have any alignment.
constexpr int kBlockRows = 16;
// Dimensions are padded with zeros to a multiple of this, codes of the integer filter to a multiple of the second.
constexpr std::int64_t kDimStep = 16;
constexpr std::int64_t kCodeStep = 64;

struct BlockKernels {
    const char* name;
    // out[q * kBlockRows + r] = -<queries[q], row r>, as queries come negated, or |queries[q] - row r|^2. `next` is the
    // block that will be read after this one: it is fetched ahead.
    void (*inner_products)(const float* rows, std::int64_t stride, const float* const* queries, int n_queries,
                           std::int64_t dim, float* out, const void* next);
    void (*squared_l2)(const float* rows, std::int64_t stride, const float* const* queries, int n_queries,
                       std::int64_t dim, float* out, const void* next);
    // The same for one row and one query.
    float (*inner_product)(const float* row, const float* query, std::int64_t dim);
    float (*squared_l2_one)(const float* row, const float* query, std::int64_t dim);
    // Bit r is set where values[r] <= limit, for kBlockRows values.
    std::uint32_t (*at_most)(const float* values, float limit);
    // Codes to floats, dim elements: IEEE half, bfloat16, and offset + scale * byte.
    void (*decode_f16)(const std::uint8_t* codes, std::int64_t dim, float* out);
    void (*decode_bf16)(const std::uint8_t* codes, std::int64_t dim, float* out);
    void (*decode_u8)(const std::uint8_t* codes, const float* scale, const float* offset, std::int64_t dim, float* out);
    // Sum of (weight[i] * codes[i])^2.
    float (*weighted_square)(const std::uint8_t* codes, const float* weight, std::int64_t dim);

    // The integer filter. Queries are packed once for many blocks: `packed` has room for packed_bytes(n, dim).
    std::int64_t (*packed_bytes)(int n_queries, std::int64_t dim);
    void (*pack)(const std::int8_t* const* queries, int n_queries, std::int64_t dim, std::int8_t* packed);
    // Pairs where dot + slopes[q] * row_terms[r] <= bases[q], dot being the exact integer product, as (q << 4 | r) into
    // found (n_queries * kBlockRows). bases and slopes have room for a multiple of 16. begin/end surround calls on one
    // thread.
    int (*filter)(const std::uint8_t* rows, std::int64_t stride, const std::int8_t* packed, int n_queries,
                  std::int64_t dim, const float* bases, const float* slopes, const float* row_terms,
                  std::uint32_t* found, const void* next);
    void (*begin)();
    void (*end)();
};

// The best that this CPU runs, and by name ("portable", "avx2", "avx512", "amx"); nullptr: not for this CPU or build.
const BlockKernels& best_kernels();
const BlockKernels* kernels_named(const char* name);

// Defined where the compiler can make them.
const BlockKernels* portable_kernels();
const BlockKernels* avx2_kernels();
const BlockKernels* avx512_kernels();
const BlockKernels* amx_kernels();

}  // namespace hybridindex
