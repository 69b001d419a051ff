// Python bindings of the native kernels. Argument checks live here and in the Python callers; the kernels below trust
// shapes but never indices.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>

#include "bind_list_scan.h"
#include "distances.h"
#include "merge.h"
#include "scan_pages.h"
#include "split.h"

namespace nb = nanobind;
using namespace hybridindex;

namespace {

template <typename T, int Dim>
using In = nb::ndarray<const T, nb::ndim<Dim>, nb::c_contig, nb::device::cpu>;
template <typename T, int Dim>
using InOut = nb::ndarray<T, nb::ndim<Dim>, nb::c_contig, nb::device::cpu>;

// Hands a vector's memory to numpy without a copy.
template <typename T>
nb::object to_numpy(std::vector<T>&& values, std::initializer_list<std::size_t> shape) {
    auto* owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T>(owned->data(), shape, owner));
}

nb::list split(In<std::int64_t, 2> probes, In<float, 2> coarse, In<std::int16_t, 1> list_device,
               In<std::int64_t, 1> list_bytes, int n_devices, InOut<float, 1> hit_rate,
               InOut<std::int32_t, 1> n_parts, InOut<std::int32_t, 1> n_probes) {
    const std::size_t n = probes.shape(0);
    if (coarse.shape(0) != n || coarse.shape(1) != probes.shape(1))
        throw std::invalid_argument("coarse distances must have the shape of probes");
    if (list_bytes.shape(0) != list_device.shape(0))
        throw std::invalid_argument("list_bytes and list_device must have one entry per list");
    if (hit_rate.shape(0) != n || n_parts.shape(0) != n || n_probes.shape(0) != n)
        throw std::invalid_argument("hit_rate, n_parts and n_probes must have one entry per query");
    if (n_devices < 0) throw std::invalid_argument("n_devices must not be negative");
    std::vector<ProbePart> found;
    {
        nb::gil_scoped_release release;
        found = split_probes(probes.data(), coarse.data(), static_cast<std::int64_t>(n),
                             static_cast<std::int64_t>(probes.shape(1)), list_device.data(), list_bytes.data(),
                             static_cast<std::int64_t>(list_device.shape(0)), n_devices, hit_rate.data(),
                             n_parts.data(), n_probes.data());
    }
    nb::list parts;
    for (ProbePart& part : found) {
        if (part.whole) {
            parts.append(nb::make_tuple(part.device, part.total_bytes, nb::none(), nb::none(), nb::none()));
            continue;
        }
        const std::size_t m = part.rows.size(), w = static_cast<std::size_t>(part.width);
        parts.append(nb::make_tuple(part.device, part.total_bytes, to_numpy(std::move(part.rows), {m}),
                                    to_numpy(std::move(part.probes), {m, w}),
                                    to_numpy(std::move(part.coarse), {m, w})));
    }
    return parts;
}

void merge(InOut<float, 2> best_distances, InOut<std::int64_t, 2> best_ids, In<std::int32_t, 1> rows,
           In<float, 2> distances, In<std::int64_t, 2> ids, bool keep_max) {
    if (best_distances.shape(0) != best_ids.shape(0) || best_distances.shape(1) != best_ids.shape(1))
        throw std::invalid_argument("best_distances and best_ids must have the same shape");
    if (distances.shape(0) != ids.shape(0) || distances.shape(1) != ids.shape(1) ||
        distances.shape(0) != rows.shape(0))
        throw std::invalid_argument("distances, ids and rows must agree on the number of rows");
    nb::gil_scoped_release release;
    merge_topk(best_distances.data(), best_ids.data(), static_cast<std::int64_t>(best_ids.shape(0)),
               static_cast<std::int64_t>(best_ids.shape(1)), rows.data(), distances.data(), ids.data(),
               static_cast<std::int64_t>(ids.shape(0)), static_cast<std::int64_t>(ids.shape(1)), keep_max);
}

std::int64_t first_beyond(In<float, 2> rows, float limit) {
    return first_row_beyond(rows.data(), static_cast<std::int64_t>(rows.shape(0)),
                            static_cast<std::int64_t>(rows.shape(1)), limit);
}

void finish(InOut<float, 2> distances, InOut<std::int64_t, 2> ids, bool keep_max) {
    if (distances.shape(0) != ids.shape(0) || distances.shape(1) != ids.shape(1))
        throw std::invalid_argument("distances and ids must have the same shape");
    nb::gil_scoped_release release;
    finish_topk(distances.data(), ids.data(), static_cast<std::int64_t>(ids.shape(0)),
                static_cast<std::int64_t>(ids.shape(1)), keep_max);
}

// Which lists to scan: flat arrays, ragged ones with their starts.
void scan(In<std::uint8_t, 2> arena, std::int64_t rows_per_page, std::int64_t code_size, int kind,
          In<float, 1> scale, In<float, 1> offset, In<std::int64_t, 1> list_ids, In<std::int64_t, 1> sizes,
          In<std::int64_t, 1> page_starts, In<std::int32_t, 1> pages, In<std::int64_t, 1> member_starts,
          In<std::int64_t, 1> members, In<float, 2> centroids, In<float, 2> queries, bool keep_max,
          InOut<float, 2> distances, InOut<std::int64_t, 2> positions) {
    const std::size_t n_lists = list_ids.shape(0), dim = queries.shape(1), n = queries.shape(0);
    if (kind < 0 || kind > 2) throw std::invalid_argument("kind must be 0 (f32), 1 (f16) or 2 (sq8)");
    const std::size_t element = kind == 0 ? 4 : kind == 1 ? 2 : 1;
    if (code_size < 1 || static_cast<std::size_t>(code_size) != dim * element || rows_per_page < 1 ||
        static_cast<std::size_t>(rows_per_page) > arena.shape(1) / static_cast<std::size_t>(code_size))
        throw std::invalid_argument("code_size or rows_per_page do not fit the queries and the arena");
    if (kind == 0 && (arena.shape(1) % 4 != 0 || reinterpret_cast<std::uintptr_t>(arena.data()) % 4 != 0))
        throw std::invalid_argument("f32 pages must be aligned to 4 bytes");
    if (kind == 2 && (scale.shape(0) != dim || offset.shape(0) != dim))
        throw std::invalid_argument("scale and offset must have one entry per dimension");
    if (sizes.shape(0) != n_lists || page_starts.shape(0) != n_lists + 1 || member_starts.shape(0) != n_lists + 1)
        throw std::invalid_argument("sizes and starts must match list_ids");
    const auto starts_ok = [n_lists](const std::int64_t* starts, std::size_t total) {
        if (starts[0] != 0 || starts[n_lists] != static_cast<std::int64_t>(total)) return false;
        for (std::size_t i = 0; i < n_lists; ++i)
            if (starts[i] > starts[i + 1]) return false;
        return true;
    };
    if (!starts_ok(page_starts.data(), pages.shape(0)) || !starts_ok(member_starts.data(), members.shape(0)))
        throw std::invalid_argument("starts must ascend from 0 to the length of what they index");
    const bool residual = centroids.shape(0) != 0;
    if (residual && (centroids.shape(0) != n_lists || centroids.shape(1) != dim))
        throw std::invalid_argument("centroids must be (n_lists, dim), or have no rows");
    if (distances.shape(0) != n || positions.shape(0) != n || distances.shape(1) != positions.shape(1) ||
        distances.shape(1) < 1)
        throw std::invalid_argument("distances and positions must be (n, k), k at least 1");
    const PagedCodes codes{arena.data(),
                           static_cast<std::int64_t>(arena.shape(0)),
                           static_cast<std::int64_t>(arena.shape(1)),
                           rows_per_page,
                           code_size,
                           static_cast<std::int64_t>(dim),
                           static_cast<CodeKind>(kind),
                           scale.data(),
                           offset.data()};
    const ScanPlan plan{static_cast<std::int64_t>(n_lists), list_ids.data(), sizes.data(), page_starts.data(), pages.data(),
                        member_starts.data(), members.data(), residual ? centroids.data() : nullptr};
    nb::gil_scoped_release release;
    scan_pages(codes, plan, queries.data(), static_cast<std::int64_t>(n),
               static_cast<std::int64_t>(distances.shape(1)), keep_max, distances.data(), positions.data());
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of hybridindex.";
    // Objects that live until the interpreter ends are no leak.
    nb::set_leak_warnings(false);
    bind_list_scan(m);
    m.def("split_probes", &split, nb::arg("probes"), nb::arg("coarse"), nb::arg("list_device"), nb::arg("list_bytes"),
          nb::arg("n_devices"), nb::arg("hit_rate").noconvert(), nb::arg("n_parts").noconvert(),
          nb::arg("n_probes").noconvert());
    m.def("merge_topk", &merge, nb::arg("best_distances").noconvert(), nb::arg("best_ids").noconvert(), nb::arg("rows"), nb::arg("distances"),
          nb::arg("ids"), nb::arg("keep_max"));
    m.def("finish_topk", &finish, nb::arg("distances").noconvert(), nb::arg("ids").noconvert(),
          nb::arg("keep_max"));
    m.def("first_row_beyond", &first_beyond, nb::arg("rows"), nb::arg("limit"));
    m.def("scan_pages", &scan, nb::arg("arena"), nb::arg("rows_per_page"), nb::arg("code_size"), nb::arg("kind"),
          nb::arg("scale"), nb::arg("offset"), nb::arg("list_ids"), nb::arg("sizes"), nb::arg("page_starts"),
          nb::arg("pages"), nb::arg("member_starts"), nb::arg("members"), nb::arg("centroids"), nb::arg("queries"),
          nb::arg("keep_max"), nb::arg("distances").noconvert(), nb::arg("positions").noconvert());
}
