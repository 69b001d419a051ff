#include "bindings/parts.h"

#include <nanobind/stl/string.h>

#include <limits>
#include <stdexcept>
#include <string>

#include "bindings/arrays.h"
#include "bindings/bind_list_scan.h"
#include "coarse/coarse_quantizer.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

class PyCoarseQuantizer {
public:
    PyCoarseQuantizer(In<float, 2> centroids, bool keep_max, const std::string& kernels)
        : quantizer_(centroids.data(), checked(length(centroids, 0), std::numeric_limits<std::int32_t>::max(), "nlist"),
                     checked(length(centroids, 1), 1 << 20, "dim"), keep_max, kernels_for(kernels)) {}

    const char* kernels() const { return quantizer_->kernels().name; }

    void quantize(In<float, 2> queries, InOut<std::int64_t, 2> probes, InOut<float, 2> distances, ThreadPool* pool) {
        const std::int64_t n = length(queries, 0), p = length(probes, 1);
        if (length(queries, 1) != quantizer_->dim())
            throw std::invalid_argument("queries must be (n, " + std::to_string(quantizer_->dim()) + ")");
        if (length(probes, 0) != n || length(distances, 0) != n || length(distances, 1) != p)
            throw std::invalid_argument("queries, probes and distances must agree on n and p");
        checked(p, quantizer_->nlist(), "p");
        const nb::gil_scoped_release release;
        quantizer_->quantize(queries.data(), n, p, probes.data(), distances.data(), pool != nullptr ? *pool : nobody_);
    }

    void nearest_of(In<float, 2> queries, In<std::int32_t, 2> candidates, In<float, 1> farthest,
                    InOut<std::int64_t, 2> probes, InOut<float, 2> distances, InOut<bool, 1> settled) {
        const std::int64_t n = length(queries, 0), m = length(candidates, 1), p = length(probes, 1);
        if (length(queries, 1) != quantizer_->dim())
            throw std::invalid_argument("queries must be (n, " + std::to_string(quantizer_->dim()) + ")");
        if (length(probes, 0) != n || length(distances, 0) != n || length(distances, 1) != p || length(candidates, 0) != n ||
            length(farthest, 0) != n || length(settled, 0) != n)
            throw std::invalid_argument("queries, candidates, farthest, probes, distances and settled must agree on n and p");
        checked(m, quantizer_->nlist(), "candidates");
        checked(p, m, "p");
        const nb::gil_scoped_release release;
        quantizer_->nearest_of(queries.data(), n, p, candidates.data(), m, farthest.data(), probes.data(), distances.data(),
                              settled.data());
    }

private:
    static std::int64_t checked(std::int64_t value, std::int64_t most, const char* name) {
        if (value < 1 || value > most)
            throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + "; expected 1 to " +
                                        std::to_string(most));
        return value;
    }

    EndsUnlocked<CoarseQuantizer> quantizer_;
    ThreadPool nobody_{0};
};

}  // namespace

void bind_coarse(nb::module_& m) {
    nb::class_<PyCoarseQuantizer>(m, "CoarseQuantizer")
        .def(nb::init<In<float, 2>, bool, const std::string&>(), nb::arg("centroids"), nb::arg("keep_max"),
             nb::arg("kernels"))
        .def_prop_ro("kernels", &PyCoarseQuantizer::kernels)
        .def("quantize", &PyCoarseQuantizer::quantize, nb::arg("queries").noconvert(), nb::arg("probes").noconvert(),
             nb::arg("distances").noconvert(), nb::arg("pool").none() = nb::none())
        .def("nearest_of", &PyCoarseQuantizer::nearest_of, nb::arg("queries").noconvert(), nb::arg("candidates").noconvert(),
             nb::arg("farthest").noconvert(), nb::arg("probes").noconvert(), nb::arg("distances").noconvert(),
             nb::arg("settled").noconvert());
}

}  // namespace hybridindex
