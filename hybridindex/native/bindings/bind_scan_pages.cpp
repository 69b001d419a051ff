#include "bindings/bind_scan_pages.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bind_list_scan.h"
#include "bindings/scan_arguments.h"
#include "jobs/scan_items.h"
#include "scan/scan_pages.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

// Which lists are probed, and by which queries.
nb::tuple group(In<std::int64_t, 2> probes, In<std::int64_t, 2> extents, bool with_places) {
    if (extents.shape(1) != 3) throw std::invalid_argument("extents must be (nlist, 3)");
    if (probes.shape(0) > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
        throw std::invalid_argument("too many queries");
    ProbedLists probed;
    {
        const nb::gil_scoped_release release;
        std::vector<std::int32_t> slot_of(extents.shape(0), -1);
        group_probes(probes.data(), length(probes, 0), length(probes, 1),
                     extents.data(), length(extents, 0), slot_of, probed, with_places);
    }
    const std::size_t n_lists = probed.lists.size(), n_members = probed.members.size(), n_places = probed.places.size();
    return nb::make_tuple(to_numpy(std::move(probed.lists), {n_lists}), to_numpy(std::move(probed.starts), {n_lists + 1}),
                          to_numpy(std::move(probed.members), {n_members}), to_numpy(std::move(probed.places), {n_places}));
}

bool ascends(const In<std::int64_t, 1>& starts, std::size_t total) {
    const std::size_t last = starts.shape(0) - 1;
    if (starts.data()[0] != 0 || starts.data()[last] != static_cast<std::int64_t>(total)) return false;
    for (std::size_t i = 0; i < last; ++i)
        if (starts.data()[i] > starts.data()[i + 1]) return false;
    return true;
}

// Which lists to scan: flat arrays, ragged ones with their starts.
void scan(In<std::uint8_t, 2> arena, std::int64_t rows_per_page, const std::string& code, In<float, 1> scale,
          In<float, 1> offset, In<std::int64_t, 1> list_ids, In<std::int64_t, 1> sizes, In<std::int64_t, 1> page_starts,
          In<std::int32_t, 1> pages, In<std::int64_t, 1> member_starts, In<std::int32_t, 1> members,
          In<float, 2> centroids, In<float, 2> queries, bool keep_max, InOut<float, 2> distances,
          InOut<std::int64_t, 2> positions, const std::string& kernels, std::optional<In<std::uint8_t, 1>> mask,
          std::optional<In<std::int64_t, 1>> first_rows) {
    const std::size_t n_lists = list_ids.shape(0), dim = queries.shape(1), n = queries.shape(0);
    RowCodes rows = row_codes(code, dim);
    if (rows_per_page < 1 || rows_per_page > length(arena, 1) / rows.code_size)
        throw std::invalid_argument("rows_per_page is " + std::to_string(rows_per_page) + "; pages of " +
                                    std::to_string(arena.shape(1)) + " bytes hold " +
                                    std::to_string(length(arena, 1) / rows.code_size));
    if (rows.code == Code::f32 && (arena.shape(1) % 4 != 0 || reinterpret_cast<std::uintptr_t>(arena.data()) % 4 != 0))
        throw std::invalid_argument("f32 pages must be aligned to 4 bytes");
    const std::size_t per_dim = rows.code == Code::u8 ? dim : 0;
    if (scale.shape(0) != per_dim || offset.shape(0) != per_dim)
        throw std::invalid_argument("scale and offset must have one entry per dimension for sq8, none otherwise");
    rows.scale = scale.data();
    rows.offset = offset.data();
    PagePlan plan = page_plan(list_ids, sizes, page_starts, pages, member_starts, members);
    mask_plan(plan, mask, first_rows);
    const bool residual = centroids.shape(0) != 0;
    if (residual && (centroids.shape(0) != n_lists || centroids.shape(1) != dim))
        throw std::invalid_argument("centroids must be (n_lists, dim), or have no rows");
    if (distances.shape(0) != n || positions.shape(0) != n || distances.shape(1) != positions.shape(1) ||
        distances.shape(1) < 1)
        throw std::invalid_argument("distances and positions must be (n, k), k at least 1");
    if (n > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
        throw std::invalid_argument("too many queries");
    const PagedCodes codes{arena.data(), length(arena, 0),
                           length(arena, 1), rows_per_page, rows};
    if (residual) plan.centroids = centroids.data();
    const PageTask task{queries.data(), static_cast<std::int64_t>(n), length(distances, 1),
                        keep_max, distances.data(), positions.data()};
    const BlockKernels& chosen = kernels_for(kernels);
    const nb::gil_scoped_release release;
    scan_pages(codes, plan, task, chosen);
}

}  // namespace

RowCodes row_codes(const std::string& name, std::size_t dim) {
    if (dim < 1 || dim > (1u << 20)) throw std::invalid_argument("dim must be 1 to 2^20");
    const Code code = code_named(name);
    const std::int64_t elements = static_cast<std::int64_t>(dim);
    return {code, elements * element_size(code), elements, nullptr, nullptr};
}

PagePlan page_plan(const In<std::int64_t, 1>& list_ids, const In<std::int64_t, 1>& sizes,
                   const In<std::int64_t, 1>& page_starts, const In<std::int32_t, 1>& pages,
                   const In<std::int64_t, 1>& member_starts, const In<std::int32_t, 1>& members) {
    const std::size_t n_lists = list_ids.shape(0);
    if (sizes.shape(0) != n_lists || page_starts.shape(0) != n_lists + 1 || member_starts.shape(0) != n_lists + 1)
        throw std::invalid_argument("sizes and starts must match list_ids");
    if (!ascends(page_starts, pages.shape(0)) || !ascends(member_starts, members.shape(0)))
        throw std::invalid_argument("starts must ascend from 0 to the length of what they index");
    return {static_cast<std::int64_t>(n_lists), list_ids.data(), sizes.data(), page_starts.data(), pages.data(),
            member_starts.data(), members.data(), nullptr};
}

void mask_plan(PagePlan& plan, const std::optional<In<std::uint8_t, 1>>& mask,
               const std::optional<In<std::int64_t, 1>>& first_rows) {
    if (!mask) return;
    if (!first_rows || first_rows->shape(0) < 1) throw std::invalid_argument("mask is given without first_rows");
    const std::int64_t nbytes = length(*mask, 0);
    if (nbytes % 8 != 0) throw std::invalid_argument("mask must be a multiple of 8 bytes");
    plan.mask = {or_nothing(mask->data()), nbytes * 8, first_rows->data(), length(*first_rows, 0) - 1};
}

void bind_scan_pages(nb::module_& m) {
    m.def("group_probes", &group, nb::arg("probes").noconvert(), nb::arg("extents").noconvert(),
          nb::arg("places") = false);
    m.def(
        "page_scratch_need",
        [](const std::string& code, std::size_t dim, bool residual, std::int64_t k) {
            const RowQueries::Need need = scratch_need(row_codes(code, dim), residual, k);
            return nb::make_tuple(need.fixed, need.per_query);
        },
        nb::arg("code"), nb::arg("dim"), nb::arg("residual"), nb::arg("k"));
    m.def("scan_pages", &scan, nb::arg("arena").noconvert(), nb::arg("rows_per_page"), nb::arg("code"),
          nb::arg("scale").noconvert(), nb::arg("offset").noconvert(), nb::arg("list_ids").noconvert(),
          nb::arg("sizes").noconvert(), nb::arg("page_starts").noconvert(), nb::arg("pages").noconvert(),
          nb::arg("member_starts").noconvert(), nb::arg("members").noconvert(), nb::arg("centroids").noconvert(),
          nb::arg("queries").noconvert(), nb::arg("keep_max"), nb::arg("distances").noconvert(),
          nb::arg("positions").noconvert(), nb::arg("kernels") = "", nb::arg("mask").none() = nb::none(),
          nb::arg("first_rows").none() = nb::none());
}

}  // namespace hybridindex
