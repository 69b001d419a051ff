#include "pq/kernels.h"

#include <cstring>

namespace hybridindex {

const PqKernels& pq_kernels_for(const char* name) {
#if defined(__x86_64__)
    if (std::strcmp(name, "portable") != 0 && avx2_pq_kernels != nullptr && __builtin_cpu_supports("avx2"))
        return *avx2_pq_kernels;
#endif
    return *portable_pq_kernels;
}

}  // namespace hybridindex
