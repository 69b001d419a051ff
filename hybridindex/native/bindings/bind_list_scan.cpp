#include "bindings/bind_list_scan.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "scan/list_scan.h"

namespace nb = nanobind;

namespace hybridindex {

Code code_named(const std::string& name) {
    if (name == "f32") return Code::f32;
    if (name == "f16") return Code::f16;
    if (name == "bf16") return Code::bf16;
    if (name == "sq8") return Code::u8;
    throw std::invalid_argument("code is \"" + name + "\"; expected f32, f16, bf16 or sq8");
}

const BlockKernels& kernels_for(const std::string& name) {
    if (name.empty()) return best_kernels();
    if (const BlockKernels* found = kernels_named(name.c_str())) return *found;
    throw std::invalid_argument("kernels \"" + name + "\" do not run on this CPU or were not built");
}

namespace {

// An empty array may have no address, but a filter without one is none.
template <typename T>
const T* or_nothing(const T* data) {
    static const T nothing{};
    return data == nullptr ? &nothing : data;
}

// Let go with the interpreter's lock: scans run without it.
template <typename Array>
std::shared_ptr<const void> kept(Array array) {
    return {new Array(std::move(array)), [](const Array* held) {
                const nb::gil_scoped_acquire acquire;
                delete held;
            }};
}

// A scanner and the arrays that it reads.
class PyListScanner {
public:
    PyListScanner(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, const std::string& code, std::int64_t dim,
                  In<float, 1> scale, In<float, 1> offset, In<float, 2> centroids, bool keep_max,
                  const std::string& kernels)
        : data_(std::move(data)), extents_(std::move(extents)), scale_(std::move(scale)), offset_(std::move(offset)),
          centroids_(std::move(centroids)), dim_(dim) {
        ListTable lists{};
        lists.base = data_.data();
        lists.nbytes = static_cast<std::int64_t>(data_.shape(0));
        if (extents_.shape(1) != 3) throw std::invalid_argument("extents must be (nlist, 3)");
        lists.extents = extents_.data();
        lists.nlist = static_cast<std::int64_t>(extents_.shape(0));
        lists.codes.code = code_named(code);
        lists.codes.dim = dim;
        if (dim < 1 || dim > (1 << 20)) throw std::invalid_argument("dim must be 1 to 2^20");
        lists.codes.code_size = dim * element_size(lists.codes.code);
        const std::size_t per_dim = lists.codes.code == Code::u8 ? static_cast<std::size_t>(dim) : 0;
        if (scale_.shape(0) != per_dim || offset_.shape(0) != per_dim)
            throw std::invalid_argument("scale and offset must have one entry per dimension for sq8, none otherwise");
        lists.codes.scale = scale_.data();
        lists.codes.offset = offset_.data();
        if (centroids_.shape(0) != 0) {
            if (centroids_.shape(0) != extents_.shape(0) || centroids_.shape(1) != static_cast<std::size_t>(dim))
                throw std::invalid_argument("centroids must be (nlist, dim), or have no rows");
            lists.centroids = centroids_.data();
        }
        scanner_ = std::make_unique<ListScanner>(lists, keep_max, kernels_for(kernels));
    }

    const char* kernels() const { return scanner_->kernels().name; }

    void scan(In<float, 2> queries, In<std::int64_t, 2> probes, InOut<float, 2> distances, InOut<std::int64_t, 2> ids,
              ThreadPool& pool, std::optional<In<std::uint8_t, 1>> bitmap, std::optional<In<std::int64_t, 1>> sorted,
              nb::object on_done) {
        ScanTask task{};
        task.n = static_cast<std::int64_t>(queries.shape(0));
        task.p = static_cast<std::int64_t>(probes.shape(1));
        task.k = static_cast<std::int64_t>(ids.shape(1));
        if (static_cast<std::int64_t>(queries.shape(1)) != dim_)
            throw std::invalid_argument("queries must be (n, " + std::to_string(dim_) + ")");
        if (probes.shape(0) != queries.shape(0) || ids.shape(0) != queries.shape(0) ||
            distances.shape(0) != queries.shape(0) || distances.shape(1) != ids.shape(1))
            throw std::invalid_argument("queries, probes, distances and ids must agree on n and k");
        if (task.k < 1) throw std::invalid_argument("k must be at least 1");
        if (task.n > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("too many queries");
        task.queries = queries.data();
        task.probes = probes.data();
        task.distances = distances.data();
        task.ids = ids.data();
        if (bitmap) {
            task.filter.bitmap = or_nothing(bitmap->data());
            task.filter.n_bits = static_cast<std::int64_t>(bitmap->shape(0)) * 8;
            task.filter.owner = kept(*std::move(bitmap));
        } else if (sorted) {
            task.filter.sorted = or_nothing(sorted->data());
            task.filter.n_sorted = static_cast<std::int64_t>(sorted->shape(0));
            task.filter.owner = kept(*std::move(sorted));
        }
        if (!on_done.is_none())
            task.on_done = [&on_done](const std::vector<std::int32_t>& rows) {
                const nb::gil_scoped_acquire acquire;
                on_done(rows);
            };
        const nb::gil_scoped_release release;
        scanner_->scan(task, pool);
    }

    void prepare(In<std::int64_t, 1> lists) {
        const std::int64_t n = static_cast<std::int64_t>(lists.shape(0));
        const nb::gil_scoped_release release;
        scanner_->prepare(lists.data(), n);
    }

private:
    // Held, not copied.
    In<std::uint8_t, 1> data_;
    In<std::int64_t, 2> extents_;
    In<float, 1> scale_, offset_;
    In<float, 2> centroids_;
    std::int64_t dim_;
    std::unique_ptr<ListScanner> scanner_;
};

}  // namespace

void bind_list_scan(nb::module_& m) {
    nb::class_<ThreadPool>(m, "ThreadPool").def(nb::init<int>(), nb::arg("n_helpers"));
    nb::class_<PyListScanner>(m, "ListScanner")
        .def(nb::init<In<std::uint8_t, 1>, In<std::int64_t, 2>, const std::string&, std::int64_t, In<float, 1>,
                      In<float, 1>, In<float, 2>, bool, const std::string&>(),
             nb::arg("data").noconvert(), nb::arg("extents").noconvert(), nb::arg("code"), nb::arg("dim"),
             nb::arg("scale").noconvert(), nb::arg("offset").noconvert(), nb::arg("centroids").noconvert(),
             nb::arg("keep_max"), nb::arg("kernels"))
        .def_prop_ro("kernels", &PyListScanner::kernels)
        .def("scan", &PyListScanner::scan, nb::arg("queries").noconvert(), nb::arg("probes").noconvert(),
             nb::arg("distances").noconvert(), nb::arg("ids").noconvert(), nb::arg("pool"),
             nb::arg("bitmap").none() = nb::none(), nb::arg("sorted").none() = nb::none(),
             nb::arg("on_done").none() = nb::none())
        .def("prepare", &PyListScanner::prepare, nb::arg("lists").noconvert());
    m.def("kernels_here", [] {
        std::vector<std::string> names;
        for (const char* name : {"amx", "avx512", "avx2", "portable"})
            if (kernels_named(name) != nullptr) names.emplace_back(name);
        return names;
    });
}

}  // namespace hybridindex
