// Compiled with AVX2, FMA and F16C; called only where the CPU has them.
#include "block_kernels.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HYBRIDINDEX_LANES 8
#include "block_kernels_impl.h"

namespace hybridindex {

const BlockKernels* avx2_kernels() {
    static constexpr BlockKernels kernels = make_kernels("avx2");
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") ? &kernels
                                                                                                          : nullptr;
}

}  // namespace hybridindex
#else
namespace hybridindex {
const BlockKernels* avx2_kernels() { return nullptr; }
}  // namespace hybridindex
#endif
