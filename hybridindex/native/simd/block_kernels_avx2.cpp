// Compiled with AVX2, FMA and F16C; called only where the CPU has them.
#include "simd/block_kernels.h"
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define HYBRIDINDEX_LANES 8
#include "simd/block_kernels_impl.h"

namespace hybridindex {

static constexpr BlockKernels kernels = make_kernels("avx2");
const BlockKernels* const avx2_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const BlockKernels* const avx2_kernels = nullptr;
}  // namespace hybridindex
#endif
