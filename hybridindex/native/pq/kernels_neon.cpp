// For every CPU of 64-bit Arm: all have NEON.
#include "pq/kernels.h"
#if defined(__aarch64__)
#define HYBRIDINDEX_PQ_NEON
#include "pq/kernels_impl.h"

namespace hybridindex {

static constexpr PqKernels kernels{"neon",       table,   term_table,   round_table,  base,      sums_of_block,
                                   sums_of_rows, at_most, at_most_with, sums_in_block, sum_in_block, sum_of_row};
const PqKernels* const neon_pq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const PqKernels* const neon_pq_kernels = nullptr;
}  // namespace hybridindex
#endif
