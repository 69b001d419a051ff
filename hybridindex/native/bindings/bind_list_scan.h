// Python classes of the native host scan, and the names of codes and kernels.
#pragma once
#include <nanobind/nanobind.h>

#include <string>

#include "simd/block_kernels.h"
#include "simd/codes.h"

namespace hybridindex {

void bind_list_scan(nanobind::module_& m);

// Both throw std::invalid_argument. No name: the best kernels that this CPU runs.
Code code_named(const std::string& name);
const BlockKernels& kernels_for(const std::string& name);

}  // namespace hybridindex
