// Python bindings of the native kernels. Argument checks live here and in the Python callers; the kernels below trust
// shapes but never indices.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "merge.h"
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

nb::tuple split(In<std::int64_t, 2> probes, In<float, 2> coarse, In<std::int16_t, 1> list_device,
                In<std::int64_t, 1> list_bytes, int n_devices) {
    if (coarse.shape(0) != probes.shape(0) || coarse.shape(1) != probes.shape(1))
        throw std::invalid_argument("coarse distances must have the shape of probes");
    if (list_bytes.shape(0) != list_device.shape(0))
        throw std::invalid_argument("list_bytes and list_device must have one entry per list");
    if (n_devices < 0) throw std::invalid_argument("n_devices must not be negative");
    SplitResult result;
    {
        nb::gil_scoped_release release;
        result = split_probes(probes.data(), coarse.data(), static_cast<std::int64_t>(probes.shape(0)),
                              static_cast<std::int64_t>(probes.shape(1)), list_device.data(), list_bytes.data(),
                              static_cast<std::int64_t>(list_device.shape(0)), n_devices);
    }
    nb::list parts;
    for (ProbePart& part : result.parts) {
        const std::size_t m = part.rows.size(), w = static_cast<std::size_t>(part.width);
        parts.append(nb::make_tuple(part.device, to_numpy(std::move(part.rows), {m}),
                                    to_numpy(std::move(part.probes), {m, w}), to_numpy(std::move(part.coarse), {m, w}),
                                    to_numpy(std::move(part.work_bytes), {m})));
    }
    const std::size_t n = probes.shape(0);
    return nb::make_tuple(parts, to_numpy(std::move(result.hit_rate), {n}), to_numpy(std::move(result.n_parts), {n}));
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

}  // namespace

NB_MODULE(_native, m) {
    m.doc() = "Native kernels of hybridindex.";
    m.def("split_probes", &split, nb::arg("probes"), nb::arg("coarse"), nb::arg("list_device"), nb::arg("list_bytes"),
          nb::arg("n_devices"));
    m.def("merge_topk", &merge, nb::arg("best_distances"), nb::arg("best_ids"), nb::arg("rows"), nb::arg("distances"),
          nb::arg("ids"), nb::arg("keep_max"));
}
