// Tables of device scans: hybridindex/tiers/paged/scan_tables.py.
#include <array>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/parts.h"
#include "device/scan_tables.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

template <std::size_t N>
nb::tuple numbers(const std::array<std::int64_t, N>& values, int n) {
    nb::object list = nb::steal(PyTuple_New(n));
    for (int i = 0; i < n; ++i) PyTuple_SET_ITEM(list.ptr(), i, PyLong_FromLongLong(values[i]));
    return nb::borrow<nb::tuple>(list);
}

std::int64_t first_absent(In<std::int64_t, 2> probes, In<std::int64_t, 1> list_sizes, In<std::int16_t, 1> list_device,
                          std::int16_t device) {
    // A snapshot has more pieces than lists where rows lie beside codes.
    if (list_device.shape(0) < list_sizes.shape(0)) throw std::invalid_argument("list_device must have every list");
    const std::int64_t n = length(probes, 0) * length(probes, 1);
    const Release release(n);
    return ScanTables::first_absent(probes.data(), n, list_sizes.data(), list_device.data(), length(list_sizes, 0),
                                    device);
}

std::int64_t take(ScanTables& tables, In<std::int64_t, 2> probes, In<std::int64_t, 1> list_sizes,
                  std::int64_t max_pages) {
    const Release release(length(probes, 0) * length(probes, 1));
    return tables.take(probes.data(), length(probes, 0), length(probes, 1), list_sizes.data(), length(list_sizes, 0),
                       max_pages);
}

nb::tuple write(ScanTables& tables, std::int64_t start, std::int64_t end, In<std::int64_t, 1> list_log,
                In<std::int32_t, 1> page_log, std::int64_t heavy_from, std::int64_t chunk, std::int64_t kept,
                InOut<std::int32_t, 1> out) {
    StagedTile tile;
    {
        const Release release(end - start);
        tile = tables.write(start, end, {list_log.data(), length(list_log, 0), page_log.data(), length(page_log, 0)},
                            heavy_from, {chunk, kept}, out.data(), length(out, 0));
    }
    return nb::make_tuple(tile.first_query, tile.n_queries, tile.n_light, tile.n_items, tile.most_rows, tile.n_slots,
                          tile.used, numbers(tile.at, StagedTile::kTables), numbers(tile.starts, tile.n_levels + 1),
                          numbers(tile.programs, tile.n_levels), numbers(tile.places, tile.n_levels + 1));
}

std::int64_t answers(const ScanTables& tables, InOut<std::int64_t, 2> keys, bool keep_max, InOut<float, 2> distances,
             InOut<std::int64_t, 2> positions) {
    const std::int64_t n = length(keys, 0), k = length(distances, 1);
    if (length(distances, 0) != n || length(positions, 0) != n || length(positions, 1) != k)
        throw std::invalid_argument("keys, distances and positions must agree on n, distances and positions on k");
    const Release release(n * length(keys, 1));
    return tables.answers(keys.data(), n, length(keys, 1), k, keep_max, distances.data(), positions.data());
}

// (m,) int64: `of` at `at`, which count from `from`.
nb::object taken(const std::vector<std::int32_t>& of, const std::vector<std::int32_t>& at, std::int64_t from) {
    std::vector<std::int64_t> values(at.size());
    for (std::size_t i = 0; i < at.size(); ++i) values[i] = of[from + at[i]];
    return to_numpy(std::move(values));
}

// (n,) int64: what each pair of the tile has.
template <typename Of>
nb::object of_pairs(const ScanTables& tables, Of of) {
    std::vector<std::int64_t> values;
    for (std::int64_t pair = tables.start(); pair < tables.end(); ++pair) values.push_back(of(pair));
    return to_numpy(std::move(values));
}

}  // namespace

void bind_device_tables(nb::module_& m) {
    m.def("first_absent", &first_absent, nb::arg("probes").noconvert(), nb::arg("list_sizes").noconvert(),
          nb::arg("list_device").noconvert(), nb::arg("device"));
    nb::class_<ScanTables>(m, "ScanTables")
        .def(nb::init<std::int64_t, std::int64_t>(), nb::arg("rows_per_page"), nb::arg("group"))
        .def("take", &take, nb::arg("probes").noconvert(), nb::arg("list_sizes").noconvert(), nb::arg("max_pages"))
        .def(
            "tiles",
            [](ScanTables& tables, double per_row, std::int64_t per_item, std::int64_t per_pair,
               std::int64_t per_query, std::int64_t limit) {
                nb::list ends;
                for (const std::int64_t end : tables.tiles({per_row, per_item, per_pair, per_query, limit}))
                    ends.append(end);
                return ends;
            },
            nb::arg("per_row"), nb::arg("per_item"), nb::arg("per_pair"), nb::arg("per_query"), nb::arg("limit"))
        .def("write", &write, nb::arg("start"), nb::arg("end"), nb::arg("list_log").noconvert(),
             nb::arg("page_log").noconvert(), nb::arg("heavy_from"), nb::arg("chunk"), nb::arg("kept"),
             nb::arg("out").noconvert())
        .def("answers", &answers, nb::arg("keys").noconvert(), nb::arg("keep_max"), nb::arg("distances").noconvert(),
             nb::arg("positions").noconvert())
        .def("member_probes", [](const ScanTables& t) { return taken(t.probes(), t.member_pairs(), t.start()); })
        .def("stretch_lists", [](const ScanTables& t) { return taken(t.lists(), t.stretch_pairs(), t.start()); })
        .def("pairs", [](const ScanTables& t) {
            return nb::make_tuple(of_pairs(t, [&](std::int64_t i) { return t.query_of(i); }),
                                  of_pairs(t, [&](std::int64_t i) { return t.lists()[i]; }),
                                  of_pairs(t, [&](std::int64_t i) { return t.first_row(i); }),
                                  of_pairs(t, [&](std::int64_t i) { return t.rows()[i]; }),
                                  of_pairs(t, [&](std::int64_t i) { return t.pair_slots()[i - t.start()]; }));
        });
}

}  // namespace hybridindex
