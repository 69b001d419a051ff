// Python functions of the stand-in's page scan, and the arrays that say which lists to scan.
#pragma once
#include <nanobind/nanobind.h>

#include <optional>
#include <string>

#include "bindings/arrays.h"
#include "scan/scan_pages.h"

namespace hybridindex {

// Of rows by the name of their code; without scale and offset. Throws std::invalid_argument.
RowCodes row_codes(const std::string& name, std::size_t dim);

// Throws std::invalid_argument where they do not agree.
PagePlan page_plan(const In<std::int64_t, 1>& list_ids, const In<std::int64_t, 1>& sizes,
                   const In<std::int64_t, 1>& page_starts, const In<std::int32_t, 1>& pages,
                   const In<std::int64_t, 1>& member_starts, const In<std::int32_t, 1>& members);

// Lets a scan of a plan answer with rows of a mask only, where there is one. Throws std::invalid_argument.
void mask_plan(PagePlan& plan, const std::optional<In<std::uint8_t, 1>>& mask,
               const std::optional<In<std::int64_t, 1>>& first_rows);

void bind_scan_pages(nanobind::module_& m);

}  // namespace hybridindex
