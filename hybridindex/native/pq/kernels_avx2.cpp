// Compiled with AVX2; called only where the CPU has it.
#include "pq/kernels.h"
#if defined(__AVX2__)
#define HYBRIDINDEX_PQ_AVX2
#include "pq/kernels_impl.h"

namespace hybridindex {

static constexpr PqKernels kernels{"avx2", table, term_table, round_table, base, sums_of_block, sums_of_rows, at_most,
                                   at_most_with, sums_in_block, sum_in_block, sum_of_row};
const PqKernels* const avx2_pq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const PqKernels* const avx2_pq_kernels = nullptr;
}  // namespace hybridindex
#endif
