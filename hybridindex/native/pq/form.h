// What rows of a product quantizer are, and how they lie in memory.
#pragma once
#include <cstdint>

namespace hybridindex {

// Rows that are compared at a time, and of a block of four-bit codes.
constexpr int kPqRows = 32;

// The distance of a row, smaller is better, is base + term + sum over the parts of table[part][number], all in float32:
//   inner product        table -<q, y>                 base -<q, c>     no term
//   l2, whole vectors    table |q - y|^2               base 0           no term
//   l2, residuals        table -2 <q - middle, y>      base |q - c|^2   term |y|^2 + 2 <c - middle, y>
// where y is the codeword of a part and c the list's centroid, 0 where rows are whole vectors. The middle, of all
// centroids, keeps the digits where vectors lie far from the origin. A negative l2 distance is 0.
//
// Sums over parts and over dimensions are added in eight lanes, part i to lane i % 8, each from 0, which are then added as
// add_lanes() does. Entries of tables are added up over the dimensions of a part in order. Nothing is contracted: every
// implementation gives the same bits.
struct PqForm {
    std::int64_t dim;
    std::int64_t parts;
    // Of a number: 8, and a row's numbers follow each other; or 4, and rows lie in blocks of 32 as faiss scans them.
    int bits;
    bool l2, residual;
    const float* codewords;  // (dim, words()): one dimension of all codewords of its part
    const float* middle;     // (dim)

    std::int64_t words() const { return std::int64_t{1} << bits; }
    std::int64_t part_dims() const { return dim / parts; }
    std::int64_t code_size() const { return bits == 8 ? parts : (parts + 1) / 2; }
    bool has_terms() const { return l2 && residual; }
    // Of a row in a page: its term, where it has one, lies behind its code, or 32 terms behind a block.
    std::int64_t row_bytes() const { return code_size() + (has_terms() ? 4 : 0); }
    // Tables of small numbers, with that of the half byte that is left over.
    std::int64_t tables() const { return bits == 8 ? parts : 2 * code_size(); }
    std::int64_t entries() const { return parts * words(); }
};

inline float add_lanes(const float* lanes) {
    const float a = lanes[0] + lanes[4], b = lanes[1] + lanes[5], c = lanes[2] + lanes[6], d = lanes[3] + lanes[7];
    return (a + c) + (b + d);
}

// Where row `row` of a block of four-bit codes has its numbers: those of parts 2 i and 2 i + 1 at this byte of 32 i and of
// 32 i + 16, in the low half for rows below 16.
constexpr int lane_of(int row) { return (row & 7) << 1 | (row >> 3 & 1); }

}  // namespace hybridindex
