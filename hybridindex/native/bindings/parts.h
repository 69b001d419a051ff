// What the parts of the extension module add to it.
#pragma once
#include <nanobind/nanobind.h>

namespace hybridindex {

void bind_coarse(nanobind::module_& m);
void bind_device_copies(nanobind::module_& m);
void bind_device_tables(nanobind::module_& m);
void bind_pq(nanobind::module_& m);
void bind_rabitq(nanobind::module_& m);
void bind_watch(nanobind::module_& m);

}  // namespace hybridindex
