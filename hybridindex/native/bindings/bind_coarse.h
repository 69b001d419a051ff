// Coarse quantization for Python.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_coarse(nanobind::module_& m);

}  // namespace hybridindex
