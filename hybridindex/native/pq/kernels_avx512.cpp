// Compiled with AVX-512 VBMI and VNNI; called only where the CPU has them.
#include "pq/kernels.h"
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define HYBRIDINDEX_PQ_AVX512
#include "pq/kernels_impl.h"

namespace hybridindex {

static constexpr PqKernels kernels{"avx512", table, term_table, round_table, base, sums_of_block, sums_of_rows, at_most,
                                   at_most_with, sums_in_block, sum_in_block, sum_of_row};
const PqKernels* const avx512_pq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const PqKernels* const avx512_pq_kernels = nullptr;
}  // namespace hybridindex
#endif
