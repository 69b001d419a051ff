// Python bindings of the native kernels. Argument checks live here and in the Python callers; the kernels below trust
// shapes but never indices.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>

#include <cstdint>
#include <optional>
#include <stdexcept>

#include "added/extents.h"
#include "bindings/arrays.h"
#include "bindings/bind_list_scan.h"
#include "bindings/bind_scan_pages.h"
#include "bindings/parts.h"
#include "routing/cover.h"
#include "routing/matching_rows.h"
#include "routing/merge.h"
#include "routing/split.h"
#include "simd/row_norms.h"

namespace nb = nanobind;
using namespace hybridindex;

namespace {

nb::list split(In<std::int64_t, 2> probes, In<float, 2> coarse, In<std::int16_t, 1> list_device,
               In<std::int64_t, 1> list_bytes, int n_devices, InOut<float, 1> hit_rate,
               InOut<std::int32_t, 1> n_parts, InOut<std::int32_t, 1> n_probes,
               std::optional<In<std::int16_t, 2>> where, int n_nodes, std::optional<InOut<std::int64_t, 1>> work,
               std::optional<InOut<std::int64_t, 1>> lost) {
    const std::size_t n = probes.shape(0);
    if (coarse.shape(0) != n || coarse.shape(1) != probes.shape(1))
        throw std::invalid_argument("coarse distances must have the shape of probes");
    if (list_bytes.shape(0) != list_device.shape(0))
        throw std::invalid_argument("list_bytes and list_device must have one entry per list");
    if (hit_rate.shape(0) != n || n_parts.shape(0) != n || n_probes.shape(0) != n)
        throw std::invalid_argument("hit_rate, n_parts and n_probes must have one entry per query");
    if (n_devices < 0) throw std::invalid_argument("n_devices must not be negative");
    std::optional<ProbeNodes> nodes;
    if (where) {
        if (where->shape(0) != n || where->shape(1) != probes.shape(1))
            throw std::invalid_argument("where must have the shape of probes");
        if (!work || !lost || work->shape(0) != n || lost->shape(0) != n || n_nodes < 0)
            throw std::invalid_argument("where needs work and lost, with one entry per query, and n_nodes");
        nodes = ProbeNodes{where->data(), n_nodes, work->data(), lost->data()};
    }
    std::vector<ProbePart> found;
    {
        const Release release(length(probes, 0) * length(probes, 1));
        found = split_probes({probes.data(), coarse.data(), length(probes, 0), length(probes, 1)},
                             {list_device.data(), list_bytes.data(), length(list_device, 0), n_devices},
                             {hit_rate.data(), n_parts.data(), n_probes.data()}, nodes ? &*nodes : nullptr);
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

void cover(In<std::int64_t, 2> probes, In<bool, 1> here, In<std::uint64_t, 1> holders, std::uint64_t usable,
           std::optional<In<double, 1>> to_do, In<std::int64_t, 2> places, std::int64_t turn,
           InOut<std::int16_t, 2> found) {
    if (here.shape(0) != holders.shape(0)) throw std::invalid_argument("here and holders must have one entry per list");
    if (found.shape(0) != probes.shape(0) || found.shape(1) != probes.shape(1))
        throw std::invalid_argument("found must have the shape of probes");
    const std::int64_t n_nodes = length(places, 1);
    if (n_nodes > 64 || (n_nodes < 64 && (usable >> n_nodes) != 0))
        throw std::invalid_argument("places must have one entry per usable node, 64 at most");
    if (length(places, 0) < 1 || turn < 0) throw std::invalid_argument("places must have a row per turn");
    if (to_do && length(*to_do, 0) < n_nodes) throw std::invalid_argument("to_do must have one entry per node");
    const Release release(length(probes, 0) * length(probes, 1));
    cover_probes({probes.data(), length(probes, 0), length(probes, 1), here.data(), holders.data(), length(here, 0)},
                 {usable, static_cast<int>(n_nodes), to_do ? to_do->data() : nullptr, places.data(), length(places, 0),
                  turn},
                 found.data());
}

void positions_of_matches(In<std::uint8_t, 1> mask, In<std::int64_t, 1> first, In<std::int64_t, 2> probes,
                          InOut<std::int64_t, 2> positions) {
    if (length(first, 0) < 1) throw std::invalid_argument("first must have one entry per list, and one more");
    if (length(mask, 0) % 8 != 0) throw std::invalid_argument("mask must be a multiple of 8 bytes");
    if (positions.shape(0) != probes.shape(0)) throw std::invalid_argument("probes and positions must agree on n");
    const RowMask rows{mask.data(), length(mask, 0) * 8, first.data(), length(first, 0) - 1};
    const nb::gil_scoped_release release;
    matching_rows(rows, probes.data(), length(probes, 0), length(probes, 1), length(positions, 1), positions.data());
}

void merge(InOut<float, 2> best_distances, InOut<std::int64_t, 2> best_ids, In<std::int32_t, 1> rows,
           In<float, 2> distances, In<std::int64_t, 2> ids, bool keep_max) {
    if (best_distances.shape(0) != best_ids.shape(0) || best_distances.shape(1) != best_ids.shape(1))
        throw std::invalid_argument("best_distances and best_ids must have the same shape");
    if (distances.shape(0) != ids.shape(0) || distances.shape(1) != ids.shape(1) ||
        distances.shape(0) != rows.shape(0))
        throw std::invalid_argument("distances, ids and rows must agree on the number of rows");
    const Release release(length(ids, 0) * length(ids, 1));
    merge_topk({best_distances.data(), best_ids.data(), length(best_ids, 0), length(best_ids, 1)},
               {rows.data(), distances.data(), ids.data(), length(ids, 0), length(ids, 1)}, keep_max);
}

bool leave_gone_out(InOut<float, 2> best_distances, InOut<std::int64_t, 2> best_ids, In<float, 2> distances,
                    In<std::int64_t, 2> ids, In<std::int64_t, 1> gone, bool keep_max) {
    const std::int64_t n = length(ids, 0), width = length(ids, 1), k = length(best_ids, 1);
    if (length(best_distances, 0) != n || length(best_ids, 0) != n || length(best_distances, 1) != k ||
        length(distances, 0) != n || length(distances, 1) != width || k > width || width < 1)
        throw std::invalid_argument("distances and ids must be (n, w), best_distances and best_ids (n, k), k at most w");
    const Release release(n * width);
    return leave_out({best_distances.data(), best_ids.data(), n, k}, distances.data(), ids.data(), width, gone.data(),
                     length(gone, 0), keep_max);
}

std::int64_t first_beyond(In<float, 2> rows, float limit) {
    return first_row_beyond(rows.data(), length(rows, 0), length(rows, 1), limit);
}

void finish(InOut<float, 2> distances, InOut<std::int64_t, 2> ids, bool keep_max) {
    if (distances.shape(0) != ids.shape(0) || distances.shape(1) != ids.shape(1))
        throw std::invalid_argument("distances and ids must have the same shape");
    const Release release(length(ids, 0) * length(ids, 1));
    finish_topk({distances.data(), ids.data(), length(ids, 0), length(ids, 1)}, keep_max);
}

ExtentBuffer extent_buffer(const InOut<std::uint8_t, 1>& data, std::int64_t code_size) {
    if (code_size < 1 || code_size > (1 << 30)) throw std::invalid_argument("code_size must be 1 to 2^30");
    if (reinterpret_cast<std::uintptr_t>(data.data()) % 8 != 0)
        throw std::invalid_argument("buffers must start at a multiple of 8 bytes");
    return {data.data(), length(data, 0), code_size};
}

void move(InOut<std::uint8_t, 1> from, InOut<std::uint8_t, 1> to, std::int64_t code_size, In<std::int64_t, 2> before,
          In<std::int64_t, 2> after, In<std::int64_t, 1> gone_starts, In<std::int64_t, 1> gone) {
    const std::int64_t n = length(before, 0);
    if (length(before, 1) != 3 || length(after, 1) != 3 || length(after, 0) != n || length(gone_starts, 0) != n + 1)
        throw std::invalid_argument("before and after must be (n, 3), gone_starts (n + 1,)");
    if (gone_starts.data()[0] != 0 || gone_starts.data()[n] != length(gone, 0))
        throw std::invalid_argument("gone_starts must go from 0 to the length of gone");
    const ExtentBuffer source = extent_buffer(from, code_size), target = extent_buffer(to, code_size);
    const nb::gil_scoped_release release;
    move_extents(source, target, {before.data(), after.data(), n, gone_starts.data(), gone.data()});
}

void put(InOut<std::uint8_t, 1> to, In<std::uint8_t, 2> codes, In<std::int64_t, 1> order, In<std::int64_t, 1> at) {
    const std::int64_t n = length(codes, 0);
    if (length(order, 0) != n || length(at, 0) != n) throw std::invalid_argument("codes, order and at must agree on n");
    const ExtentBuffer target = extent_buffer(to, length(codes, 1));
    const nb::gil_scoped_release release;
    put_rows(target, codes.data(), order.data(), at.data(), n);
}

void touch(InOut<std::uint8_t, 1> to, std::int64_t start, std::int64_t nbytes) {
    const ExtentBuffer buffer{to.data(), length(to, 0), 1};
    const nb::gil_scoped_release release;
    touch_ahead(buffer, start, nbytes);
}

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of hybridindex.";
    // Objects that live until the interpreter ends are no leak.
    nb::set_leak_warnings(false);
    bind_list_scan(m);
    bind_rabitq(m);
    bind_pq(m);
    bind_coarse(m);
    bind_device_copies(m);
    bind_device_tables(m);
    m.def("move_extents", &move, nb::arg("from_").noconvert(), nb::arg("to").noconvert(), nb::arg("code_size"),
          nb::arg("before").noconvert(), nb::arg("after").noconvert(), nb::arg("gone_starts").noconvert(),
          nb::arg("gone").noconvert());
    m.def("put_rows", &put, nb::arg("to").noconvert(), nb::arg("codes").noconvert(), nb::arg("order").noconvert(),
          nb::arg("at").noconvert());
    m.def("touch_ahead", &touch, nb::arg("to").noconvert(), nb::arg("start"), nb::arg("nbytes"));
    m.def("matching_rows", &positions_of_matches, nb::arg("mask").noconvert(), nb::arg("first").noconvert(),
          nb::arg("probes").noconvert(), nb::arg("positions").noconvert());
    m.def("split_probes", &split, nb::arg("probes"), nb::arg("coarse"), nb::arg("list_device"), nb::arg("list_bytes"),
          nb::arg("n_devices"), nb::arg("hit_rate").noconvert(), nb::arg("n_parts").noconvert(),
          nb::arg("n_probes").noconvert(), nb::arg("where").none() = nb::none(), nb::arg("n_nodes") = 0,
          nb::arg("work").none() = nb::none(), nb::arg("lost").none() = nb::none());
    m.def("cover_probes", &cover, nb::arg("probes"), nb::arg("here"), nb::arg("holders"), nb::arg("usable"),
          nb::arg("to_do").none(), nb::arg("places"), nb::arg("turn"), nb::arg("found").noconvert());
    m.def("merge_topk", &merge, nb::arg("best_distances").noconvert(), nb::arg("best_ids").noconvert(), nb::arg("rows"), nb::arg("distances"),
          nb::arg("ids"), nb::arg("keep_max"));
    m.def("leave_out", &leave_gone_out, nb::arg("best_distances").noconvert(), nb::arg("best_ids").noconvert(),
          nb::arg("distances").noconvert(), nb::arg("ids").noconvert(), nb::arg("gone").noconvert(), nb::arg("keep_max"));
    m.def("finish_topk", &finish, nb::arg("distances").noconvert(), nb::arg("ids").noconvert(),
          nb::arg("keep_max"));
    m.def("first_row_beyond", &first_beyond, nb::arg("rows"), nb::arg("limit"));
    bind_scan_pages(m);
    bind_watch(m);
}
