// Compiled with AVX-512 F, BW, DQ, VL and VNNI; called only where the CPU has them.
#include "block_kernels.h"
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define HYBRIDINDEX_LANES 16
#include "block_kernels_impl.h"

namespace hybridindex {

const BlockKernels* avx512_kernels() {
    static constexpr BlockKernels kernels = make_kernels("avx512");
    const bool runs = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
    return runs ? &kernels : nullptr;
}

}  // namespace hybridindex
#else
namespace hybridindex {
const BlockKernels* avx512_kernels() { return nullptr; }
}  // namespace hybridindex
#endif
