// Python classes of the native host scan.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_list_scan(nanobind::module_& m);

}  // namespace hybridindex
