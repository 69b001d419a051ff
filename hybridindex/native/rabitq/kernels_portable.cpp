// For every CPU.
#include "rabitq/kernels.h"
#include "rabitq/kernels_impl.h"

namespace hybridindex {

static constexpr RabitqKernels kernels{"portable", products, estimates};
const RabitqKernels* const portable_rabitq_kernels = &kernels;

}  // namespace hybridindex
