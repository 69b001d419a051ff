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
#include "bindings/bind_scan_pages.h"
#include "bindings/scan_arguments.h"
#include "scan/list_scan.h"
#include "scan/row_reranker.h"
#include "scan/scattered_rows.h"

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

// Its end joins the helpers.
class PyThreadPool : public ThreadPool {
public:
    using ThreadPool::ThreadPool;
    ~PyThreadPool() {
        const nb::gil_scoped_release release;
        stop();
    }
};

class PyListScanner {
public:
    PyListScanner(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, const std::string& code, std::int64_t dim,
                  In<float, 1> scale, In<float, 1> offset, In<float, 2> centroids, bool keep_max,
                  const std::string& kernels, bool apart)
        : lists_(std::move(data), std::move(extents), code, dim, std::move(scale), std::move(offset), std::move(centroids),
                 apart),
          scanner_(lists_.table, keep_max, kernels_for(kernels)) {}

    const char* kernels() const { return scanner_->kernels().name; }

    void scan(In<float, 2> queries, In<std::int64_t, 2> probes, InOut<float, 2> distances, InOut<std::int64_t, 2> ids,
              ThreadPool& pool, std::optional<In<std::uint8_t, 1>> bitmap, std::optional<In<std::int64_t, 1>> sorted,
              nb::object on_done, std::optional<In<std::uint8_t, 1>> mask,
              std::optional<In<std::int64_t, 1>> first_rows) {
        ScanTask task = scan_task(queries, lists_.table.codes.dim, probes, distances, ids, std::move(bitmap), std::move(sorted),
                                  std::move(mask), std::move(first_rows), lists_.table.extents, lists_.table.nlist);
        task.on_done = reporting(on_done);
        const nb::gil_scoped_release release;
        scanner_->scan(task, pool);
    }

    void prepare(In<std::int64_t, 1> lists) {
        const std::int64_t n = static_cast<std::int64_t>(lists.shape(0));
        const nb::gil_scoped_release release;
        scanner_->prepare(lists.data(), n);
    }

    void forget(In<std::int64_t, 1> lists) { scanner_->forget(lists.data(), static_cast<std::int64_t>(lists.shape(0))); }

private:
    LentLists lists_;
    EndsUnlocked<ListScanner> scanner_;
};

class PyRowReranker {
public:
    PyRowReranker(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, const std::string& code, std::int64_t dim,
                  In<float, 1> scale, In<float, 1> offset, In<float, 2> centroids, bool keep_max,
                  const std::string& kernels)
        : lists_(std::move(data), std::move(extents), code, dim, std::move(scale), std::move(offset), std::move(centroids)),
          reranker_(lists_.table, keep_max, kernels_for(kernels)) {}

    void rerank(In<float, 2> queries, In<std::int64_t, 2> positions, InOut<float, 2> distances,
                InOut<std::int64_t, 2> ids, ThreadPool& pool) {
        RerankTask task{};
        take_answer(task, queries, lists_.table.codes.dim, positions, distances, ids);
        task.positions = positions.data();
        task.p = static_cast<std::int64_t>(positions.shape(1));
        const nb::gil_scoped_release release;
        reranker_->rerank(task, pool);
    }

private:
    LentLists lists_;
    EndsUnlocked<RowReranker> reranker_;
};

class PyScatteredScanner {
public:
    PyScatteredScanner(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, const std::string& code, std::int64_t dim,
                       In<float, 1> scale, In<float, 1> offset, In<float, 2> centroids, bool keep_max,
                       const std::string& kernels)
        : lists_(std::move(data), std::move(extents), code, dim, std::move(scale), std::move(offset), std::move(centroids)),
          scanner_(lists_.table, keep_max, kernels_for(kernels)) {}

    void scan(In<float, 2> queries, In<std::int64_t, 2> positions, InOut<float, 2> distances, InOut<std::int64_t, 2> ids,
              ThreadPool& pool) {
        ScatteredTask task{};
        task.sets = length(positions, 0), task.w = length(positions, 1);
        // One set is for all queries.
        if (task.sets == 1)
            take_answer(task, queries, lists_.table.codes.dim, ids, distances, ids);
        else
            take_answer(task, queries, lists_.table.codes.dim, positions, distances, ids);
        task.positions = positions.data();
        const nb::gil_scoped_release release;
        scanner_->scan(task, pool);
    }

private:
    LentLists lists_;
    EndsUnlocked<ScatteredScanner> scanner_;
};

// Rows of lists in pages; the arrays of pages are those of a residency.
void distances_in_pages(In<std::uint8_t, 2> arena, const std::string& code, In<float, 1> scale, In<float, 1> offset,
                        In<float, 2> centroids, In<std::int64_t, 1> sizes, In<std::int64_t, 1> first_pages,
                        In<std::int32_t, 1> page_counts, In<std::int32_t, 1> page_numbers, In<float, 2> queries,
                        In<std::int64_t, 2> positions, bool keep_max, InOut<float, 2> distances,
                        const std::string& kernels) {
    const std::size_t nlist = sizes.shape(0), dim = queries.shape(1);
    if (first_pages.shape(0) != nlist || page_counts.shape(0) != nlist)
        throw std::invalid_argument("sizes, first_pages and page_counts must have one entry per list");
    if (dim < 1 || positions.shape(0) != queries.shape(0) || distances.shape(0) != positions.shape(0) ||
        distances.shape(1) != positions.shape(1))
        throw std::invalid_argument("queries, positions and distances must agree on their shapes");
    PagedRows rows{arena.data(), length(arena, 0), length(arena, 1), sizes.data(), first_pages.data(),
                   page_counts.data(), length(sizes, 0), page_numbers.data(), length(page_numbers, 0),
                   row_codes(code, dim), nullptr};
    const std::size_t per_dim = rows.codes.code == Code::u8 ? dim : 0;
    if (scale.shape(0) != per_dim || offset.shape(0) != per_dim)
        throw std::invalid_argument("scale and offset must have one entry per dimension for sq8, none otherwise");
    rows.codes.scale = scale.data();
    rows.codes.offset = offset.data();
    if (centroids.shape(0) != 0) {
        if (centroids.shape(0) != nlist || centroids.shape(1) != dim)
            throw std::invalid_argument("centroids must be (nlist, dim), or have no rows");
        rows.centroids = centroids.data();
    }
    const BlockKernels& chosen = kernels_for(kernels);
    const nb::gil_scoped_release release;
    paged_distances(rows, queries.data(), length(queries, 0), positions.data(), length(positions, 1), keep_max, chosen,
                    distances.data());
}

void products_of_pairs(In<float, 2> queries, In<float, 2> centroids, In<std::int64_t, 2> probes, InOut<float, 2> out,
                       const std::string& kernels) {
    if (queries.shape(1) != centroids.shape(1) || probes.shape(0) != queries.shape(0) || out.shape(0) != probes.shape(0) ||
        out.shape(1) != probes.shape(1))
        throw std::invalid_argument("queries, centroids, probes and out must agree on their shapes");
    const BlockKernels& chosen = kernels_for(kernels);
    const nb::gil_scoped_release release;
    pair_products(queries.data(), length(queries, 0), centroids.data(), length(centroids, 0), length(queries, 1),
                  probes.data(), length(probes, 1), chosen, out.data());
}

}  // namespace

void bind_list_scan(nb::module_& m) {
    nb::class_<ThreadPool>(m, "Threads");
    nb::class_<PyThreadPool, ThreadPool>(m, "ThreadPool").def(nb::init<int>(), nb::arg("n_helpers"));
    nb::class_<PyListScanner>(m, "ListScanner")
        .def(nb::init<In<std::uint8_t, 1>, In<std::int64_t, 2>, const std::string&, std::int64_t, In<float, 1>,
                      In<float, 1>, In<float, 2>, bool, const std::string&, bool>(),
             nb::arg("data").noconvert(), nb::arg("extents").noconvert(), nb::arg("code"), nb::arg("dim"),
             nb::arg("scale").noconvert(), nb::arg("offset").noconvert(), nb::arg("centroids").noconvert(),
             nb::arg("keep_max"), nb::arg("kernels"), nb::arg("apart") = false)
        .def_prop_ro("kernels", &PyListScanner::kernels)
        .def("scan", &PyListScanner::scan, nb::arg("queries").noconvert(), nb::arg("probes").noconvert(),
             nb::arg("distances").noconvert(), nb::arg("ids").noconvert(), nb::arg("pool"),
             nb::arg("bitmap").none() = nb::none(), nb::arg("sorted").none() = nb::none(),
             nb::arg("on_done").none() = nb::none(), nb::arg("mask").none() = nb::none(),
             nb::arg("first_rows").none() = nb::none())
        .def("prepare", &PyListScanner::prepare, nb::arg("lists").noconvert())
        .def("forget", &PyListScanner::forget, nb::arg("lists").noconvert());
    nb::class_<PyRowReranker>(m, "RowReranker")
        .def(nb::init<In<std::uint8_t, 1>, In<std::int64_t, 2>, const std::string&, std::int64_t, In<float, 1>,
                      In<float, 1>, In<float, 2>, bool, const std::string&>(),
             nb::arg("data").noconvert(), nb::arg("extents").noconvert(), nb::arg("code"), nb::arg("dim"),
             nb::arg("scale").noconvert(), nb::arg("offset").noconvert(), nb::arg("centroids").noconvert(),
             nb::arg("keep_max"), nb::arg("kernels"))
        .def("rerank", &PyRowReranker::rerank, nb::arg("queries").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("distances").noconvert(), nb::arg("ids").noconvert(), nb::arg("pool"));
    nb::class_<PyScatteredScanner>(m, "ScatteredScanner")
        .def(nb::init<In<std::uint8_t, 1>, In<std::int64_t, 2>, const std::string&, std::int64_t, In<float, 1>,
                      In<float, 1>, In<float, 2>, bool, const std::string&>(),
             nb::arg("data").noconvert(), nb::arg("extents").noconvert(), nb::arg("code"), nb::arg("dim"),
             nb::arg("scale").noconvert(), nb::arg("offset").noconvert(), nb::arg("centroids").noconvert(),
             nb::arg("keep_max"), nb::arg("kernels"))
        .def("scan", &PyScatteredScanner::scan, nb::arg("queries").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("distances").noconvert(), nb::arg("ids").noconvert(), nb::arg("pool"));
    m.def("distances_in_pages", &distances_in_pages, nb::arg("arena").noconvert(), nb::arg("code"),
          nb::arg("scale").noconvert(), nb::arg("offset").noconvert(), nb::arg("centroids").noconvert(),
          nb::arg("sizes").noconvert(), nb::arg("first_pages").noconvert(), nb::arg("page_counts").noconvert(),
          nb::arg("page_numbers").noconvert(), nb::arg("queries").noconvert(), nb::arg("positions").noconvert(),
          nb::arg("keep_max"), nb::arg("distances").noconvert(), nb::arg("kernels") = "");
    m.def(
        "distances_in_pages_need",
        [](const std::string& code, std::size_t dim) { return paged_distances_need(row_codes(code, dim)); },
        nb::arg("code"), nb::arg("dim"));
    m.def("pair_products", &products_of_pairs, nb::arg("queries").noconvert(), nb::arg("centroids").noconvert(),
          nb::arg("probes").noconvert(), nb::arg("out").noconvert(), nb::arg("kernels") = "");
    m.def("kernels_here", [] {
        std::vector<std::string> names;
        for (const char* name : {"amx", "avx512", "avx2", "neon", "portable"})
            if (kernels_named(name) != nullptr) names.emplace_back(name);
        return names;
    });
}

}  // namespace hybridindex
