// Compiled with AVX2; called only where the CPU has it.
#include "rabitq/kernels.h"
#if defined(__AVX2__)
#define HYBRIDINDEX_RABITQ_AVX2
#include "rabitq/kernels_impl.h"

namespace hybridindex {

static constexpr RabitqKernels kernels{"avx2", kTogether, find, least_key};
const RabitqKernels* const avx2_rabitq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const RabitqKernels* const avx2_rabitq_kernels = nullptr;
}  // namespace hybridindex
#endif
