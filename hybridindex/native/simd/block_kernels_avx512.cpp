// Compiled with AVX-512 F, BW, DQ, VL and VNNI; called only where the CPU has them.
#include "simd/block_kernels.h"
#if defined(__AVX512F__) && defined(__AVX512VNNI__)
#define HYBRIDINDEX_LANES 16
#include "simd/block_kernels_impl.h"

namespace hybridindex {

static constexpr BlockKernels kernels = make_kernels("avx512");
const BlockKernels* const avx512_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const BlockKernels* const avx512_kernels = nullptr;
}  // namespace hybridindex
#endif
