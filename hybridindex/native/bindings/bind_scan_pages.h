// Python functions of the stand-in's page scan.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_scan_pages(nanobind::module_& m);

}  // namespace hybridindex
