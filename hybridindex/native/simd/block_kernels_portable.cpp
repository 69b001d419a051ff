// For any CPU: four floats are a register on every one that matters (SSE2, NEON).
#define HYBRIDINDEX_LANES 4
#include "simd/block_kernels_impl.h"

namespace hybridindex {

static constexpr BlockKernels kernels = make_kernels("portable");
const BlockKernels* const portable_kernels = &kernels;

}  // namespace hybridindex
