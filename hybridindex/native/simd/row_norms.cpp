// Compiled with reassociation of sums (see CMakeLists.txt), which lets the compiler vectorise reductions. NaN and
// infinity keep their meaning. On x86-64 with glibc the loader picks the widest of three versions.
#include "simd/row_norms.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define HYBRIDINDEX_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define HYBRIDINDEX_CLONES
#endif

namespace hybridindex {

HYBRIDINDEX_CLONES
std::int64_t first_row_beyond(const float* rows, std::int64_t n, std::int64_t dim, float limit) {
    for (std::int64_t row = 0; row < n; ++row, rows += dim) {
        float sum = 0;
        for (std::int64_t i = 0; i < dim; ++i) sum += rows[i] * rows[i];
        if (!(sum <= limit)) return row;
    }
    return n;
}

}  // namespace hybridindex
