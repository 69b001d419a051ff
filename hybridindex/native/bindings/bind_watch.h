// Watched mappings for Python.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_watch(nanobind::module_& m);

}  // namespace hybridindex
