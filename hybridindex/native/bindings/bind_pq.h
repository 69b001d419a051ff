// Python classes of scans of product-quantized rows.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_pq(nanobind::module_& m);

}  // namespace hybridindex
