// Compiled with AVX-512 VBMI and VNNI; called only where the CPU has them.
#include "rabitq/kernels.h"
#if defined(__AVX512VBMI__) && defined(__AVX512VNNI__)
#define HYBRIDINDEX_RABITQ_AVX512
#include "rabitq/kernels_impl.h"

namespace hybridindex {

static constexpr RabitqKernels kernels{"avx512", kTogether, find, least_key};
const RabitqKernels* const avx512_rabitq_kernels = &kernels;

}  // namespace hybridindex
#else
namespace hybridindex {
const RabitqKernels* const avx512_rabitq_kernels = nullptr;
}  // namespace hybridindex
#endif
