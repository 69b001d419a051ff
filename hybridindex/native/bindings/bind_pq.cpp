#include "bindings/parts.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/arrays.h"
#include "bindings/bind_list_scan.h"
#include "bindings/bind_scan_pages.h"
#include "bindings/scan_arguments.h"
#include "pq/pq_pages.h"
#include "pq/pq_scan.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

// A form and the arrays that it is of.
class PyPqForm {
public:
    PyPqForm(In<float, 2> codewords, In<float, 1> middle, std::int64_t parts, bool l2, bool residual, const std::string& kernels)
        : codewords_(std::move(codewords)), middle_(std::move(middle)), kernels_(pq_kernels_for(kernels_for(kernels))) {
        const std::int64_t dim = length(codewords_, 0), words = length(codewords_, 1);
        if (words != 16 && words != 256) throw std::invalid_argument("codewords must be (dim, 16 or 256)");
        if (parts < 1 || parts > 65535 || dim % parts != 0)
            throw std::invalid_argument("parts is " + std::to_string(parts) + "; expected a divisor of " + std::to_string(dim) +
                                        " of at most 65535");
        if (length(middle_, 0) != dim) throw std::invalid_argument("middle must be (dim,)");
        form_ = {dim, parts, words == 16 ? 4 : 8, l2, residual, codewords_.data(), middle_.data()};
    }

    const PqForm& form() const { return form_; }
    const PqKernels& kernels() const { return kernels_; }
    const char* kernels_name() const { return kernels_.name; }

    void tables(In<float, 2> queries, InOut<float, 2> out) const {
        const std::int64_t n = length(queries, 0);
        if (length(queries, 1) != form_.dim || length(out, 0) != n || length(out, 1) != form_.entries())
            throw std::invalid_argument("queries must be (n, dim), out (n, entries of a table)");
        const nb::gil_scoped_release release;
        for (std::int64_t q = 0; q < n; ++q)
            kernels_.table(form_, queries.data() + q * form_.dim, out.data() + q * form_.entries());
    }

    void bases(In<float, 2> queries, In<float, 2> centroids, In<std::int64_t, 2> probes, InOut<float, 2> out) const {
        const std::int64_t n = length(queries, 0), p = length(probes, 1), nlist = length(centroids, 0);
        if (length(queries, 1) != form_.dim || length(centroids, 1) != form_.dim || length(probes, 0) != n ||
            length(out, 0) != n || length(out, 1) != p)
            throw std::invalid_argument("queries, centroids, probes and out must agree on their shapes");
        const nb::gil_scoped_release release;
        for (std::int64_t i = 0; i < n * p; ++i) {
            const std::int64_t list = probes.data()[i];
            if (list < -1 || list >= nlist) throw std::out_of_range("probe " + std::to_string(list) + " is not a list");
            out.data()[i] = list < 0 ? 0.0f
                                     : kernels_.base(form_, queries.data() + i / p * form_.dim, centroids.data() + list * form_.dim);
        }
    }

    void terms(In<std::uint8_t, 1> codes, In<float, 1> centroid, InOut<float, 1> out) const {
        const std::int64_t n = length(out, 0), group = form_.bits == 8 ? 1 : kPqRows;
        if (length(centroid, 0) != form_.dim || length(codes, 0) < (n + group - 1) / group * group * form_.code_size())
            throw std::invalid_argument("codes must hold the rows of out, centroid be (dim,)");
        const nb::gil_scoped_release release;
        row_terms(form_, kernels_, codes.data(), n, centroid.data(), out.data());
    }

    nb::tuple scratch_need(std::int64_t k) const {
        const RowQueries::Need need = pq_scratch_need(form_, k);
        return nb::make_tuple(need.fixed, need.per_query);
    }

    void scan_pages(In<std::uint8_t, 2> arena, std::int64_t rows_per_page, In<std::int64_t, 1> list_ids,
                    In<std::int64_t, 1> sizes, In<std::int64_t, 1> page_starts, In<std::int32_t, 1> pages,
                    In<std::int64_t, 1> member_starts, In<std::int32_t, 1> members, In<float, 2> centroids,
                    In<std::int64_t, 1> all_ids, In<std::int64_t, 1> id_starts, In<float, 2> queries,
                    InOut<float, 2> distances, InOut<std::int64_t, 2> ids, std::optional<In<std::uint8_t, 1>> mask,
                    std::optional<In<std::int64_t, 1>> first_rows) const {
        if (rows_per_page < 1 || rows_per_page > length(arena, 1) / form_.row_bytes() ||
            (form_.bits == 4 && rows_per_page % kPqRows != 0))
            throw std::invalid_argument("rows_per_page is " + std::to_string(rows_per_page) + "; pages of " +
                                        std::to_string(arena.shape(1)) + " bytes do not hold so many");
        PagePlan plan = page_plan(list_ids, sizes, page_starts, pages, member_starts, members);
        mask_plan(plan, mask, first_rows);
        if (form_.residual) {
            if (centroids.shape(0) != list_ids.shape(0) || length(centroids, 1) != form_.dim)
                throw std::invalid_argument("centroids must be (n_lists, dim)");
            plan.centroids = centroids.data();
        }
        if (id_starts.shape(0) != list_ids.shape(0)) throw std::invalid_argument("id_starts must be (n_lists,)");
        const std::size_t n = queries.shape(0);
        if (length(queries, 1) != form_.dim || distances.shape(0) != n || ids.shape(0) != n ||
            distances.shape(1) != ids.shape(1) || distances.shape(1) < 1)
            throw std::invalid_argument("queries must be (n, dim), distances and ids (n, k), k at least 1");
        if (n > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
            throw std::invalid_argument("too many queries");
        const PqPages held{arena.data(), length(arena, 0), length(arena, 1), rows_per_page};
        const PageTask task{queries.data(), static_cast<std::int64_t>(n), length(distances, 1), !form_.l2, distances.data(),
                            ids.data()};
        const nb::gil_scoped_release release;
        scan_pq_pages(held, form_, plan, {all_ids.data(), length(all_ids, 0), id_starts.data()}, task, kernels_);
    }

private:
    In<float, 2> codewords_;
    In<float, 1> middle_;
    const PqKernels& kernels_;
    PqForm form_;
};

class PyPqScanner {
public:
    PyPqScanner(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, const PyPqForm& form, In<float, 2> centroids)
        : data_(std::move(data)), extents_(std::move(extents)), centroids_(std::move(centroids)),
          scanner_(table(form.form()), form.kernels()) {}

    const char* kernels() const { return scanner_->kernels().name; }

    void scan(In<float, 2> queries, In<std::int64_t, 2> probes, InOut<float, 2> distances, InOut<std::int64_t, 2> ids,
              ThreadPool& pool, std::optional<In<std::uint8_t, 1>> bitmap, std::optional<In<std::int64_t, 1>> sorted,
              nb::object on_done, std::optional<In<std::uint8_t, 1>> mask,
              std::optional<In<std::int64_t, 1>> first_rows) {
        ScanTask task = scan_task(queries, dim_, probes, distances, ids, std::move(bitmap), std::move(sorted), std::move(mask),
                                  std::move(first_rows), extents_.data(), length(extents_, 0));
        task.on_done = reporting(on_done);
        const nb::gil_scoped_release release;
        scanner_->scan(task, pool);
    }

    void prepare(In<std::int64_t, 1> lists) {
        const nb::gil_scoped_release release;
        scanner_->prepare(lists.data(), length(lists, 0));
    }

    void forget(In<std::int64_t, 1> lists) { scanner_->forget(lists.data(), length(lists, 0)); }

private:
    PqTable table(const PqForm& form) {
        if (extents_.shape(1) != 3) throw std::invalid_argument("extents must be (nlist, 3)");
        if (form.residual && (centroids_.shape(0) != extents_.shape(0) || length(centroids_, 1) != form.dim))
            throw std::invalid_argument("centroids must be (nlist, dim)");
        dim_ = form.dim;
        return {data_.data(), length(data_, 0), extents_.data(), length(extents_, 0), form,
                form.residual ? centroids_.data() : nullptr};
    }

    In<std::uint8_t, 1> data_;
    In<std::int64_t, 2> extents_;
    In<float, 2> centroids_;
    std::int64_t dim_ = 0;
    EndsUnlocked<PqScanner> scanner_;
};

}  // namespace

void bind_pq(nb::module_& m) {
    nb::class_<PyPqForm>(m, "PqForm")
        .def(nb::init<In<float, 2>, In<float, 1>, std::int64_t, bool, bool, const std::string&>(),
             nb::arg("codewords").noconvert(), nb::arg("middle").noconvert(), nb::arg("parts"), nb::arg("l2"),
             nb::arg("residual"), nb::arg("kernels") = "")
        .def_prop_ro("kernels", &PyPqForm::kernels_name)
        .def("tables", &PyPqForm::tables, nb::arg("queries").noconvert(), nb::arg("out").noconvert())
        .def("bases", &PyPqForm::bases, nb::arg("queries").noconvert(), nb::arg("centroids").noconvert(),
             nb::arg("probes").noconvert(), nb::arg("out").noconvert())
        .def("terms", &PyPqForm::terms, nb::arg("codes").noconvert(), nb::arg("centroid").noconvert(),
             nb::arg("out").noconvert())
        .def("scratch_need", &PyPqForm::scratch_need, nb::arg("k"))
        .def("scan_pages", &PyPqForm::scan_pages, nb::arg("arena").noconvert(), nb::arg("rows_per_page"),
             nb::arg("list_ids").noconvert(), nb::arg("sizes").noconvert(), nb::arg("page_starts").noconvert(),
             nb::arg("pages").noconvert(), nb::arg("member_starts").noconvert(), nb::arg("members").noconvert(),
             nb::arg("centroids").noconvert(), nb::arg("all_ids").noconvert(), nb::arg("id_starts").noconvert(),
             nb::arg("queries").noconvert(), nb::arg("distances").noconvert(), nb::arg("ids").noconvert(),
             nb::arg("mask").none() = nb::none(), nb::arg("first_rows").none() = nb::none());
    nb::class_<PyPqScanner>(m, "PqScanner")
        .def(nb::init<In<std::uint8_t, 1>, In<std::int64_t, 2>, const PyPqForm&, In<float, 2>>(),
             nb::arg("data").noconvert(), nb::arg("extents").noconvert(), nb::arg("form"), nb::arg("centroids").noconvert(),
             nb::keep_alive<1, 4>())
        .def_prop_ro("kernels", &PyPqScanner::kernels)
        .def("scan", &PyPqScanner::scan, nb::arg("queries").noconvert(), nb::arg("probes").noconvert(),
             nb::arg("distances").noconvert(), nb::arg("ids").noconvert(), nb::arg("pool"),
             nb::arg("bitmap").none() = nb::none(), nb::arg("sorted").none() = nb::none(),
             nb::arg("on_done").none() = nb::none(), nb::arg("mask").none() = nb::none(),
             nb::arg("first_rows").none() = nb::none())
        .def("prepare", &PyPqScanner::prepare, nb::arg("lists").noconvert())
        .def("forget", &PyPqScanner::forget, nb::arg("lists").noconvert());
}

}  // namespace hybridindex
