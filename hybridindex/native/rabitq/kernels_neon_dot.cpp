// Compiled with the dot products of Armv8.2; called only where the CPU has them.
#include "rabitq/kernels.h"
#if defined(__ARM_FEATURE_DOTPROD)
#define HYBRIDINDEX_RABITQ_NEON
#define HYBRIDINDEX_RABITQ_NEON_DOT
#include "rabitq/kernels_impl.h"

namespace hybridindex {

static constexpr RabitqKernels kernels{"neon_dot", kTogether, find, least_key};
const RabitqKernels* const neon_dot_rabitq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const RabitqKernels* const neon_dot_rabitq_kernels = nullptr;
}  // namespace hybridindex
#endif
