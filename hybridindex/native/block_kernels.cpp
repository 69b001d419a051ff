#include "block_kernels.h"

#include <cstring>

namespace hybridindex {

const BlockKernels* kernels_named(const char* name) {
    const BlockKernels* const all[] = {amx_kernels(), avx512_kernels(), avx2_kernels(), portable_kernels()};
    for (const BlockKernels* kernels : all)
        if (kernels != nullptr && (name == nullptr || std::strcmp(kernels->name, name) == 0)) return kernels;
    return nullptr;
}

const BlockKernels& best_kernels() { return *kernels_named(nullptr); }

}  // namespace hybridindex
