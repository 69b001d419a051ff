#include "bindings/parts.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <limits>
#include <algorithm>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bind_list_scan.h"
#include "bindings/bind_scan_pages.h"
#include "bindings/scan_arguments.h"
#include "rabitq/code_pages.h"
#include "rabitq/code_scan.h"
#include "rabitq/encode.h"
#include "rabitq/kernels.h"

namespace nb = nanobind;

namespace hybridindex {
namespace {

// The rotation's signs, as the scanner and the encoder take them.
Rotation rotation_of(const In<float, 2>& signs) {
    const std::int64_t dims = length(signs, 1);
    if (dims < kChunkDims || dims % kChunkDims != 0) throw std::invalid_argument("signs must be (rounds, a multiple of 32)");
    return {signs.data(), length(signs, 0), dims};
}

CodeFormat format_of(const In<float, 2>& signs, int bits, std::int64_t dim, float f_scale, float g_scale, bool l2) {
    if (bits != 1 && bits != 2 && bits != 4) throw std::invalid_argument("bits must be 1, 2 or 4");
    const Rotation rotation = rotation_of(signs);
    if (dim < 1 || dim > rotation.dims) throw std::invalid_argument("dim must be 1 to the dimensions of signs");
    return {bits, dim, f_scale, g_scale, l2, rotation};
}

class PyRabitqScanner {
public:
    PyRabitqScanner(In<std::uint8_t, 1> data, In<std::int64_t, 1> list_sizes, int bits, std::int64_t dim,
                    In<float, 2> signs, In<float, 1> centroid_squares, float f_scale, float g_scale, bool l2,
                    const std::string& kernels)
        : data_(std::move(data)), sizes_(std::move(list_sizes)), signs_(std::move(signs)),
          squares_(std::move(centroid_squares)), dim_(dim),
          scanner_(table(bits, f_scale, g_scale, l2), kernels_for(kernels), rabitq_kernels_for(kernels_for(kernels))) {}

    const char* kernels() const { return scanner_->kernels().name; }

    void scan(In<float, 2> queries, In<std::int64_t, 2> probes, In<float, 2> centre_products, InOut<float, 2> estimates,
              InOut<std::int64_t, 2> positions, ThreadPool& pool, nb::object on_done) {
        CodeTask task{};
        take_answer(task, queries, dim_, probes, estimates, positions);
        if (centre_products.shape(0) != probes.shape(0) || centre_products.shape(1) != probes.shape(1))
            throw std::invalid_argument("centre_products must have the shape of probes");
        task.probes = probes.data();
        task.centre_products = centre_products.data();
        task.p = static_cast<std::int64_t>(probes.shape(1));
        task.on_done = reporting(on_done);
        const nb::gil_scoped_release release;
        scanner_->scan(task, pool);
    }

private:
    CodeTable table(int bits, float f_scale, float g_scale, bool l2) const {
        if (squares_.shape(0) != sizes_.shape(0))
            throw std::invalid_argument("list_sizes and centroid_squares must have one entry per list");
        return {data_.data(), length(data_, 0), sizes_.data(), length(sizes_, 0), squares_.data(),
                format_of(signs_, bits, dim_, f_scale, g_scale, l2)};
    }

    In<std::uint8_t, 1> data_;
    In<std::int64_t, 1> sizes_;
    In<float, 2> signs_;
    In<float, 1> squares_;
    std::int64_t dim_;
    EndsUnlocked<CodeScanner> scanner_;
};

// Codes in pages of an arena; made for each batch.
class PyCodePages {
public:
    PyCodePages(In<float, 2> signs, int bits, std::int64_t dim, float f_scale, float g_scale, bool l2, const std::string& kernels)
        : signs_(std::move(signs)), format_(format_of(signs_, bits, dim, f_scale, g_scale, l2)), blocks_(kernels_for(kernels)),
          kernels_(rabitq_kernels_for(blocks_)) {}

    nb::tuple scratch_need(std::int64_t k) const {
        const RowQueries::Need need = code_scratch_need(format_, k);
        return nb::make_tuple(need.fixed, need.per_query);
    }

    void scan(In<std::uint8_t, 2> arena, std::int64_t rows_per_page, In<std::int64_t, 1> list_ids, In<std::int64_t, 1> sizes,
              In<std::int64_t, 1> page_starts, In<std::int32_t, 1> pages, In<std::int64_t, 1> member_starts,
              In<std::int32_t, 1> members, In<float, 1> centre_products, In<float, 1> centre_squares, In<float, 2> queries,
              InOut<float, 2> estimates, InOut<std::int64_t, 2> positions) const {
        if (rows_per_page < kCodedRows || rows_per_page % kCodedRows != 0 ||
            rows_per_page / kCodedRows > length(arena, 1) / format_.block_bytes())
            throw std::invalid_argument("rows_per_page is " + std::to_string(rows_per_page) + "; pages of " +
                                        std::to_string(arena.shape(1)) + " bytes hold " +
                                        std::to_string(length(arena, 1) / format_.block_bytes()) + " blocks of 16 rows");
        const PagePlan plan = page_plan(list_ids, sizes, page_starts, pages, member_starts, members);
        if (centre_products.shape(0) != members.shape(0) || centre_squares.shape(0) != list_ids.shape(0))
            throw std::invalid_argument("centre_products must be one a member, centre_squares one a list");
        const std::size_t n = queries.shape(0);
        if (length(queries, 1) != format_.dim || estimates.shape(0) != n || positions.shape(0) != n ||
            estimates.shape(1) != positions.shape(1) || estimates.shape(1) < 1)
            throw std::invalid_argument("queries must be (n, dim), estimates and positions (n, k), k at least 1");
        if (n > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()))
            throw std::invalid_argument("too many queries");
        const CodePages code_pages{arena.data(), length(arena, 0), length(arena, 1), rows_per_page, format_};
        const PageTask answer{queries.data(), static_cast<std::int64_t>(n), length(estimates, 1), false, estimates.data(),
                              positions.data()};
        const nb::gil_scoped_release release;
        scan_code_pages(code_pages, plan, {answer, centre_products.data(), centre_squares.data()}, blocks_, kernels_);
    }

private:
    In<float, 2> signs_;
    CodeFormat format_;
    const BlockKernels& blocks_;
    const RabitqKernels& kernels_;
};

void encode(In<float, 2> rows, In<float, 1> centroid, In<float, 2> signs, int bits, float f_scale, float g_scale, bool l2,
            InOut<std::uint8_t, 1> out) {
    const CodeFormat format = format_of(signs, bits, length(rows, 1), f_scale, g_scale, l2);
    if (length(centroid, 0) != format.dim) throw std::invalid_argument("rows and centroid must agree on the dimension");
    const std::int64_t n = length(rows, 0);
    if (length(out, 0) != (n + kCodedRows - 1) / kCodedRows * format.block_bytes())
        throw std::invalid_argument("out must have the bytes of the rows' blocks");
    const nb::gil_scoped_release release;
    encode_rows(format, rows.data(), n, centroid.data(), out.data());
}

void round_queries(In<float, 2> queries, In<float, 2> signs, int bits, float f_scale, InOut<std::int8_t, 2> whole,
                   InOut<float, 1> u) {
    const CodeFormat format = format_of(signs, bits, length(queries, 1), f_scale, 1.0f, false);
    const std::int64_t n = length(queries, 0), dims = format.dims();
    if (length(whole, 0) != n || length(whole, 1) != dims || length(u, 0) != n)
        throw std::invalid_argument("whole must be (queries, dimensions of signs), u one number a query");
    const nb::gil_scoped_release release;
    std::vector<float> turned(static_cast<std::size_t>(dims));
    for (std::int64_t q = 0; q < n; ++q) {
        std::copy_n(queries.data() + q * format.dim, format.dim, turned.begin());
        std::fill(turned.begin() + format.dim, turned.end(), 0.0f);
        u.data()[q] = round_query(format, turned.data(), whole.data() + q * dims);
    }
}

}  // namespace

void bind_rabitq(nb::module_& m) {
    nb::class_<PyRabitqScanner>(m, "RabitqScanner")
        .def(nb::init<In<std::uint8_t, 1>, In<std::int64_t, 1>, int, std::int64_t, In<float, 2>, In<float, 1>, float,
                      float, bool, const std::string&>(),
             nb::arg("data").noconvert(), nb::arg("list_sizes").noconvert(), nb::arg("bits"), nb::arg("dim"),
             nb::arg("signs").noconvert(), nb::arg("centroid_squares").noconvert(), nb::arg("f_scale"),
             nb::arg("g_scale"), nb::arg("l2"), nb::arg("kernels"))
        .def_prop_ro("kernels", &PyRabitqScanner::kernels)
        .def("scan", &PyRabitqScanner::scan, nb::arg("queries").noconvert(), nb::arg("probes").noconvert(),
             nb::arg("centre_products").noconvert(), nb::arg("estimates").noconvert(), nb::arg("positions").noconvert(),
             nb::arg("pool"), nb::arg("on_done").none() = nb::none());
    nb::class_<PyCodePages>(m, "CodePages")
        .def(nb::init<In<float, 2>, int, std::int64_t, float, float, bool, const std::string&>(),
             nb::arg("signs").noconvert(), nb::arg("bits"), nb::arg("dim"), nb::arg("f_scale"), nb::arg("g_scale"),
             nb::arg("l2"), nb::arg("kernels") = "")
        .def("scratch_need", &PyCodePages::scratch_need, nb::arg("k"))
        .def("scan", &PyCodePages::scan, nb::arg("arena").noconvert(), nb::arg("rows_per_page"),
             nb::arg("list_ids").noconvert(), nb::arg("sizes").noconvert(), nb::arg("page_starts").noconvert(),
             nb::arg("pages").noconvert(), nb::arg("member_starts").noconvert(), nb::arg("members").noconvert(),
             nb::arg("centre_products").noconvert(), nb::arg("centre_squares").noconvert(), nb::arg("queries").noconvert(),
             nb::arg("estimates").noconvert(), nb::arg("positions").noconvert());
    m.def("rabitq_queries", &round_queries, nb::arg("queries").noconvert(), nb::arg("signs").noconvert(), nb::arg("bits"),
          nb::arg("f_scale"), nb::arg("whole").noconvert(), nb::arg("u").noconvert());
    m.def("rabitq_encode", &encode, nb::arg("rows").noconvert(), nb::arg("centroid").noconvert(),
          nb::arg("signs").noconvert(), nb::arg("bits"), nb::arg("f_scale"), nb::arg("g_scale"), nb::arg("l2"),
          nb::arg("out").noconvert());
}

}  // namespace hybridindex
