// Pages and copies of a device's mover: hybridindex/tiers/paged/arena.py, staging.py and streams.py.
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/parts.h"
#include "device/copies.h"
#include "device/free_runs.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

nb::object allocate(FreeRuns& runs, std::int32_t n, bool whole) {
    std::vector<std::int32_t> pages;
    if (!runs.allocate(n, whole, pages)) return nb::none();
    return to_numpy(std::move(pages));
}

nb::tuple allocate_each(FreeRuns& runs, In<std::int64_t, 1> counts) {
    std::vector<std::int32_t> pages;
    nb::list found;
    for (std::int64_t i = 0; i < length(counts, 0); ++i) {
        const std::int64_t n = counts.data()[i];
        found.append(n <= runs.n_free() && runs.allocate(static_cast<std::int32_t>(n), false, pages));
    }
    return nb::make_tuple(to_numpy(std::move(pages)), found);
}

void free_pages(FreeRuns& runs, In<std::int32_t, 1> pages) {
    const std::int32_t* const all = pages.data();
    for (std::int64_t i = 0, n = length(pages, 0); i < n;) {
        std::int64_t end = i + 1;
        while (end < n && all[end] == all[end - 1] + 1) ++end;
        runs.free(all[i], static_cast<std::int32_t>(end - i));
        i = end;
    }
}

nb::object all_free(const FreeRuns& runs) {
    std::vector<std::int32_t> pages;
    for (const auto& [start, n] : runs.runs())
        for (std::int32_t page = start; page < start + n; ++page) pages.push_back(page);
    return to_numpy(std::move(pages));
}

nb::tuple merge(In<std::int32_t, 1> pages, In<std::int64_t, 1> counts, In<std::int64_t, 1> sources,
                In<std::int64_t, 1> regions, std::int64_t base, std::int64_t page_bytes, std::int64_t most) {
    const std::int64_t n = length(counts, 0);
    if (length(sources, 0) != n || length(regions, 0) != n)
        throw std::invalid_argument("each part must have a count, a source and a region");
    Copies made = merge_runs(pages.data(), length(pages, 0), counts.data(), sources.data(), regions.data(), n, base,
                             page_bytes, most);
    return nb::make_tuple(to_numpy(std::move(made.targets)), to_numpy(std::move(made.sources)), to_numpy(std::move(made.sizes)));
}

int start(In<std::int64_t, 1> targets, In<std::int64_t, 1> sources, In<std::int64_t, 1> sizes, std::uintptr_t copy,
          std::uintptr_t batch, std::uintptr_t stream) {
    const std::int64_t n = length(targets, 0);
    if (length(sources, 0) != n || length(sizes, 0) != n)
        throw std::invalid_argument("each copy must have a target, a source and a size");
    // The driver may wait for room in its queue.
    const nb::gil_scoped_release release;
    return start_copies(targets.data(), sources.data(), sizes.data(), n, reinterpret_cast<CopyFunction>(copy),
                        reinterpret_cast<BatchFunction>(batch), reinterpret_cast<void*>(stream));
}

}  // namespace

void bind_device_copies(nb::module_& m) {
    nb::class_<FreeRuns>(m, "FreeRuns")
        .def(nb::init<>())
        .def_prop_ro("n_free", &FreeRuns::n_free)
        .def_prop_ro("end", &FreeRuns::end)
        .def("allocate", &allocate, nb::arg("n"), nb::arg("whole"))
        .def("allocate_each", &allocate_each, nb::arg("counts").noconvert())
        .def("add", &FreeRuns::free, nb::arg("start"), nb::arg("n"))
        .def("free", &free_pages, nb::arg("pages").noconvert())
        .def("withdraw", &FreeRuns::withdraw, nb::arg("start"), nb::arg("n"))
        .def("pages", &all_free);
    m.def("merge_runs", &merge, nb::arg("pages").noconvert(), nb::arg("counts").noconvert(),
          nb::arg("sources").noconvert(), nb::arg("regions").noconvert(), nb::arg("base"), nb::arg("page_bytes"),
          nb::arg("most"));
    m.def("start_copies", &start, nb::arg("targets").noconvert(), nb::arg("sources").noconvert(),
          nb::arg("sizes").noconvert(), nb::arg("copy"), nb::arg("batch"), nb::arg("stream"));
}

}  // namespace hybridindex
