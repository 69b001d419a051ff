// Python classes of RaBitQ codes.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_rabitq(nanobind::module_& m);

}  // namespace hybridindex
