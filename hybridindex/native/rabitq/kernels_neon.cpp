// For every CPU of 64-bit Arm: all have NEON.
#include "rabitq/kernels.h"
#if defined(__aarch64__)
#define HYBRIDINDEX_RABITQ_NEON
#include "rabitq/kernels_impl.h"

namespace hybridindex {

static constexpr RabitqKernels kernels{"neon", kTogether, find, least_key};
const RabitqKernels* const neon_rabitq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const RabitqKernels* const neon_rabitq_kernels = nullptr;
}  // namespace hybridindex
#endif
