// Runs everywhere.
#include "pq/kernels_impl.h"

namespace hybridindex {

static constexpr PqKernels kernels{"portable", table, term_table, round_table, base, sums_of_block, sums_of_rows, at_most,
                                   at_most_with, sums_in_block, sum_in_block, sum_of_row};
const PqKernels* const portable_pq_kernels = &kernels;

}  // namespace hybridindex
