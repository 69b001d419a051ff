// What the Python classes of scans share: arrays that they hold, and answers that they fill in.
#pragma once
#include <nanobind/nanobind.h>

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bindings/arrays.h"
#include "bindings/bind_list_scan.h"
#include "jobs/scan_job.h"
#include "scan/list_scan.h"

namespace hybridindex {

// Mapped lists and the arrays that they are in: held, not copied.
class LentLists {
public:
    LentLists(In<std::uint8_t, 1> data, In<std::int64_t, 2> extents, const std::string& code, std::int64_t dim,
              In<float, 1> scale, In<float, 1> offset, In<float, 2> centroids, bool apart = false)
        : data_(std::move(data)), extents_(std::move(extents)), scale_(std::move(scale)), offset_(std::move(offset)),
          centroids_(std::move(centroids)) {
        table.apart = apart;
        table.base = data_.data();
        table.nbytes = static_cast<std::int64_t>(data_.shape(0));
        if (extents_.shape(1) != 3) throw std::invalid_argument("extents must be (nlist, 3)");
        table.extents = extents_.data();
        table.nlist = static_cast<std::int64_t>(extents_.shape(0));
        table.codes.code = code_named(code);
        table.codes.dim = dim;
        if (dim < 1 || dim > (1 << 20)) throw std::invalid_argument("dim must be 1 to 2^20");
        table.codes.code_size = dim * element_size(table.codes.code);
        const std::size_t per_dim = table.codes.code == Code::u8 ? static_cast<std::size_t>(dim) : 0;
        if (scale_.shape(0) != per_dim || offset_.shape(0) != per_dim)
            throw std::invalid_argument("scale and offset must have one entry per dimension for sq8, none otherwise");
        table.codes.scale = scale_.data();
        table.codes.offset = offset_.data();
        if (centroids_.shape(0) != 0) {
            if (centroids_.shape(0) != extents_.shape(0) || centroids_.shape(1) != static_cast<std::size_t>(dim))
                throw std::invalid_argument("centroids must be (nlist, dim), or have no rows");
            table.centroids = centroids_.data();
        }
    }

    ListTable table{};

private:
    In<std::uint8_t, 1> data_;
    In<std::int64_t, 2> extents_;
    In<float, 1> scale_, offset_;
    In<float, 2> centroids_;
};

// Takes the sizes and places of an answer, and checks that they agree.
template <typename Wanted>
void take_answer(AnswerTask& task, const In<float, 2>& queries, std::int64_t dim, const Wanted& wanted,
                 const InOut<float, 2>& distances, const InOut<std::int64_t, 2>& ids) {
    task.n = static_cast<std::int64_t>(queries.shape(0));
    task.k = static_cast<std::int64_t>(ids.shape(1));
    if (static_cast<std::int64_t>(queries.shape(1)) != dim)
        throw std::invalid_argument("queries must be (n, " + std::to_string(dim) + ")");
    if (wanted.shape(0) != queries.shape(0) || ids.shape(0) != queries.shape(0) ||
        distances.shape(0) != queries.shape(0) || distances.shape(1) != ids.shape(1))
        throw std::invalid_argument("queries, probes or positions, distances and ids must agree on n and k");
    if (task.k < 1) throw std::invalid_argument("k must be at least 1");
    if (task.n > std::numeric_limits<std::int32_t>::max()) throw std::invalid_argument("too many queries");
    task.queries = queries.data();
    task.distances = distances.data();
    task.ids = ids.data();
}

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
                const nanobind::gil_scoped_acquire acquire;
                delete held;
            }};
}

// Checks that there is a bit for each row of lists of these extents: (size, capacity, offset) each.
inline RowMask row_mask(const In<std::uint8_t, 1>& mask, const In<std::int64_t, 1>& first, const std::int64_t* extents,
                        std::int64_t nlist) {
    const std::int64_t n_bits = static_cast<std::int64_t>(mask.shape(0)) * 8;
    bool fits = static_cast<std::int64_t>(first.shape(0)) == nlist + 1 && n_bits % RowMask::kWordBits == 0 && first.data()[0] == 0;
    for (std::int64_t list = 0; fits && list < nlist; ++list)
        fits = first.data()[list + 1] - first.data()[list] == extents[3 * list] && first.data()[list + 1] <= n_bits;
    if (!fits) throw std::invalid_argument("mask and first_rows must have a bit for each row of the lists, in whole words");
    return {or_nothing(mask.data()), n_bits, first.data(), nlist};
}

// What a scan of lists is asked for, but whom it reports to.
inline ScanTask scan_task(const In<float, 2>& queries, std::int64_t dim, const In<std::int64_t, 2>& probes,
                          const InOut<float, 2>& distances, const InOut<std::int64_t, 2>& ids,
                          std::optional<In<std::uint8_t, 1>> bitmap, std::optional<In<std::int64_t, 1>> sorted,
                          std::optional<In<std::uint8_t, 1>> mask, std::optional<In<std::int64_t, 1>> first_rows,
                          const std::int64_t* extents, std::int64_t nlist) {
    ScanTask task{};
    take_answer(task, queries, dim, probes, distances, ids);
    task.probes = probes.data();
    task.p = static_cast<std::int64_t>(probes.shape(1));
    if (bitmap) {
        task.filter.bitmap = or_nothing(bitmap->data());
        task.filter.n_bits = static_cast<std::int64_t>(bitmap->shape(0)) * 8;
        task.filter.owner = kept(*std::move(bitmap));
    } else if (sorted) {
        task.filter.sorted = or_nothing(sorted->data());
        task.filter.n_sorted = static_cast<std::int64_t>(sorted->shape(0));
        task.filter.owner = kept(*std::move(sorted));
    } else if (mask) {
        if (!first_rows) throw std::invalid_argument("mask is given without first_rows");
        task.filter.rows = row_mask(*mask, *first_rows, extents, nlist);
        task.filter.owner = kept(std::make_pair(*std::move(mask), *std::move(first_rows)));
    }
    return task;
}

// Reports complete rows to a Python function, which must outlive the scan; nothing where it is None.
inline std::function<void(const std::vector<std::int32_t>&)> reporting(const nanobind::object& on_done) {
    if (on_done.is_none()) return {};
    return [&on_done](const std::vector<std::int32_t>& rows) {
        const nanobind::gil_scoped_acquire acquire;
        on_done(rows);
    };
}

}  // namespace hybridindex
