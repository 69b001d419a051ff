#include "scan/row_reranker.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace hybridindex {
namespace {

// Bytes of an item: enough to drown its bookkeeping.
constexpr std::int64_t kItemBytes = 64 << 10;
// Rows compared together, and how many are on their way meanwhile.
constexpr int kTogether = 4, kRowsAhead = 8;

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

void fetch(const void* from, std::int64_t nbytes) {
    const char* const at = static_cast<const char*>(from);
    for (std::int64_t i = 0; i < nbytes; i += 64) __builtin_prefetch(at + i, 0, 2);
}

// A vector with zeros behind it, to `dims`.
void copy_padded(const float* from, std::int64_t dim, std::int64_t dims, float sign, float* to) {
    for (std::int64_t i = 0; i < dim; ++i) to[i] = sign * from[i];
    std::fill(to + dim, to + dims, 0.0f);
}

}  // namespace

ChosenRows::ChosenRows(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
    : lists_((check_lists(lists), lists)), keep_max_(keep_max), kernels_(kernels),
      dims_(round_up(lists.codes.dim, kDimStep)),
      direct_(lists.codes.code == Code::f32 && lists.centroids == nullptr && lists.codes.dim == dims_) {}

const float* ChosenRows::Shared::query(std::int32_t i) const { return queries_.data() + i * source_.dims_; }

void ChosenRows::Shared::prepare(const RerankTask& task, const ScanPlan&, std::int64_t) {
    const std::int64_t dim = source_.lists_.codes.dim;
    queries_.grow(task.n * source_.dims_);
    for (std::int64_t q = 0; q < task.n; ++q)
        copy_padded(task.queries + q * dim, dim, source_.dims_, source_.keep_max_ ? -1.0f : 1.0f,
                    queries_.data() + q * source_.dims_);
    positions_.assign(task.positions, task.positions + task.n * task.p);
    width_ = task.p;
    heaps_.resize(static_cast<std::size_t>(task.n));
    for (std::int64_t q = 0; q < task.n; ++q)
        heap(static_cast<std::int32_t>(q)).reset(task.distances + q * task.k, task.ids + q * task.k, task.k);
}

std::int64_t ChosenRows::plan(const RerankTask& task, int, ScanPlan& plan) const {
    for (std::int64_t i = 0; i < task.n * task.p; ++i) {
        const std::int64_t position = task.positions[i], list = position >> 32;
        if (position == -1) continue;
        if (position < 0 || list >= lists_.nlist || (position & 0xffffffff) >= lists_.extents[3 * list])
            throw std::out_of_range("position " + std::to_string(position) + " of query " + std::to_string(i / task.p) +
                                    " is no row");
    }
    plan.probed.lists.clear();
    plan.probed.starts.assign(1, 0);
    plan.probed.members.clear();
    plan.items.clear();
    plan.left.assign(static_cast<std::size_t>(task.n), 0);
    const std::int64_t step = std::max<std::int64_t>(kTogether, kItemBytes / lists_.codes.code_size);
    for (std::int32_t q = 0; q < task.n; ++q) {
        plan.probed.lists.push_back(q);
        plan.probed.members.push_back(q);
        plan.probed.starts.push_back(q + 1);
        for (std::int64_t first = 0; first < task.p; first += step, ++plan.left[static_cast<std::size_t>(q)])
            plan.items.push_back({q, static_cast<std::int32_t>(std::min(step, task.p - first)), first});
    }
    return task.n * task.p * lists_.codes.code_size;
}

ChosenRows::Place ChosenRows::place(std::int64_t position) const {
    const std::int64_t list = position >> 32, row = position & 0xffffffff;
    const std::int64_t* const extent = lists_.extents + 3 * list;
    const std::uint8_t* const codes = lists_.base + extent[2];
    return {codes + row * lists_.codes.code_size,
            reinterpret_cast<const std::int64_t*>(codes + extent[1] * lists_.codes.code_size) + row,
            lists_.centroids == nullptr ? nullptr : lists_.centroids + list * lists_.codes.dim};
}

void ChosenRows::decode(const Place& place, float* row) const {
    decode_row(lists_.codes, kernels_, place.code, place.centroid, row);
    std::fill(row + lists_.codes.dim, row + dims_, 0.0f);
}

bool ChosenRows::scan(Rows& rows, Shared& shared, const ScanPlan&, const ScanItem& item, const ScanItem*, std::int64_t,
                      int, QueryHeap* apart, const Stopped& stopped) const {
    const std::int64_t* const positions = shared.positions(item.list) + item.first;
    const float* const query = shared.query(item.list);
    QueryHeap& heap = apart != nullptr ? *apart : shared.heap(item.list);
    rows.decoded.grow(kTogether * dims_);
    const auto is_there = [&](std::int64_t i) { return i < item.count && positions[i] >= 0; };
    const auto fetch_row = [&](std::int64_t i) {
        if (!is_there(i)) return;
        const Place at = place(positions[i]);
        fetch(at.code, lists_.codes.code_size);
        fetch(at.id, 1);
    };
    for (std::int64_t i = 0; i < kRowsAhead; ++i) fetch_row(i);
    const auto distances_of = keep_max_ ? kernels_.inner_product_pairs : kernels_.squared_l2_pairs;
    const float* const queries[kTogether] = {query, query, query, query};
    for (std::int64_t begin = 0; begin < item.count; begin += kTogether) {
        if (stopped()) return false;
        const float *pointers[kTogether], *ahead[kTogether];
        std::int64_t ids[kTogether];
        float distances[kTogether];
        int n = 0;
        for (std::int64_t i = begin; i < std::min<std::int64_t>(begin + kTogether, item.count); ++i) {
            if (!direct_) fetch_row(i + kRowsAhead);
            if (positions[i] < 0) continue;
            const Place at = place(positions[i]);
            if (direct_) {
                // Their lines are fetched one by one while these rows are compared: many at once would keep them waiting.
                const bool later = is_there(i + kRowsAhead);
                const Place behind = later ? place(positions[i + kRowsAhead]) : at;
                if (later) fetch(behind.id, 1);
                pointers[n] = reinterpret_cast<const float*>(at.code);
                ahead[n] = reinterpret_cast<const float*>(behind.code);
            } else {
                float* const decoded = rows.decoded.data() + n * dims_;
                decode(at, decoded);
                pointers[n] = decoded;
            }
            ids[n++] = *at.id;
        }
        if (n == 0) continue;
        distances_of(pointers, queries, n, dims_, distances, direct_ ? ahead : nullptr);
        for (int r = 0; r < n; ++r)
            if (distances[r] <= heap.limit()) heap.push(distances[r], ids[r]);
    }
    return true;
}

template class ScanJob<ChosenRows>;
template class ScanJobs<ChosenRows>;

namespace {

// Where one row of paged lists is.
class PagedRow {
public:
    PagedRow(const PagedRows& rows, std::int64_t position)
        : rows_(rows), pages_(rows.page_numbers + rows.first_pages[position >> 32]),
          start_((position & 0xffffffff) * rows.codes.code_size) {}

    // Its bytes; of a row that lies across pages, a copy in `whole`.
    const std::uint8_t* code(std::uint8_t* whole) const {
        const std::int64_t size = rows_.codes.code_size, first = length_of_first();
        if (first >= size) return at(start_);
        for (std::int64_t done = 0, part = first; done < size; done += part, part = std::min(rows_.page_bytes, size - done))
            std::memcpy(whole + done, at(start_ + done), static_cast<std::size_t>(part));
        return whole;
    }
    void fetch() const { hybridindex::fetch(at(start_), std::min(rows_.codes.code_size, length_of_first())); }

private:
    std::int64_t length_of_first() const { return rows_.page_bytes - start_ % rows_.page_bytes; }
    const std::uint8_t* at(std::int64_t byte) const {
        return rows_.base + pages_[byte / rows_.page_bytes] * rows_.page_bytes + byte % rows_.page_bytes;
    }

    const PagedRows& rows_;
    const std::int32_t* const pages_;
    const std::int64_t start_;
};

void check_positions(const PagedRows& rows, const std::int64_t* positions, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t position = positions[i], list = position >> 32, row = position & 0xffffffff;
        if (position == -1) continue;
        bool there = position >= 0 && list < rows.nlist && row < rows.sizes[list];
        if (there) {
            const std::int64_t first = rows.first_pages[list], end = (row + 1) * rows.codes.code_size;
            const std::int64_t last = first + (end - 1) / rows.page_bytes;
            there = first >= 0 && end <= rows.page_counts[list] * rows.page_bytes && last < rows.n_numbers;
            for (std::int64_t at = first + (end - rows.codes.code_size) / rows.page_bytes; there && at <= last; ++at)
                there = rows.page_numbers[at] >= 0 && rows.page_numbers[at] < rows.n_pages;
        }
        if (!there) throw std::out_of_range("position " + std::to_string(position) + " is no row in these pages");
    }
}

}  // namespace

std::int64_t paged_distances_need(const RowCodes& codes) {
    return (1 + kTogether) * round_up(codes.dim, kDimStep) * 4 + kTogether * codes.code_size;
}

void paged_distances(const PagedRows& rows, const float* queries, std::int64_t n, const std::int64_t* positions,
                     std::int64_t p, bool keep_max, const BlockKernels& kernels, float* out) {
    check_positions(rows, positions, n * p);
    const std::int64_t dim = rows.codes.dim, dims = round_up(dim, kDimStep);
    const bool direct = rows.codes.code == Code::f32 && rows.centroids == nullptr && dim == dims;
    AlignedBuffer<float> padded;  // a query, then rows
    AlignedBuffer<std::uint8_t> whole;
    padded.grow((1 + kTogether) * dims);
    whole.grow(kTogether * rows.codes.code_size);
    const auto distances_of = keep_max ? kernels.inner_product_pairs : kernels.squared_l2_pairs;
    const float* const same[kTogether] = {padded.data(), padded.data(), padded.data(), padded.data()};
    for (std::int64_t q = 0; q < n; ++q, positions += p, out += p) {
        copy_padded(queries + q * dim, dim, dims, keep_max ? -1.0f : 1.0f, padded.data());
        const auto fetch_row = [&](std::int64_t i) {
            if (i < p && positions[i] >= 0) PagedRow(rows, positions[i]).fetch();
        };
        for (std::int64_t i = 0; i < kRowsAhead; ++i) fetch_row(i);
        for (std::int64_t begin = 0; begin < p; begin += kTogether) {
            const float* pointers[kTogether];
            std::int64_t places[kTogether];
            int here = 0;
            for (std::int64_t i = begin; i < std::min<std::int64_t>(begin + kTogether, p); ++i) {
                fetch_row(i + kRowsAhead);
                out[i] = std::numeric_limits<float>::quiet_NaN();
                if (positions[i] < 0) continue;
                const std::uint8_t* const code = PagedRow(rows, positions[i]).code(whole.data() + here * rows.codes.code_size);
                if (direct) {
                    pointers[here] = reinterpret_cast<const float*>(code);
                } else {
                    const float* const centroid =
                        rows.centroids == nullptr ? nullptr : rows.centroids + (positions[i] >> 32) * dim;
                    float* const decoded = padded.data() + (1 + here) * dims;
                    decode_row(rows.codes, kernels, code, centroid, decoded);
                    std::fill(decoded + dim, decoded + dims, 0.0f);
                    pointers[here] = decoded;
                }
                places[here++] = i;
            }
            if (here == 0) continue;
            float distances[kTogether];
            distances_of(pointers, same, here, dims, distances, nullptr);
            for (int r = 0; r < here; ++r)
                if (distances[r] <= QueryHeap::kNoLimit) out[places[r]] = keep_max ? -distances[r] : distances[r];
        }
    }
}

void pair_products(const float* queries, std::int64_t n, const float* centroids, std::int64_t nlist, std::int64_t dim,
                   const std::int64_t* probes, std::int64_t p, const BlockKernels& kernels, float* out) {
    for (std::int64_t i = 0; i < n * p; ++i)
        if (probes[i] < -1 || probes[i] >= nlist)
            throw std::out_of_range("probe " + std::to_string(probes[i]) + " of query " + std::to_string(i / p) +
                                    " is not a list id: expected -1 or 0.." + std::to_string(nlist - 1));
    const std::int64_t dims = round_up(dim, kDimStep);
    AlignedBuffer<float> padded;  // a query, then centroids
    padded.grow((1 + kTogether) * dims);
    for (std::int64_t q = 0; q < n; ++q) {
        const float* query = queries + q * dim;
        if (dims != dim) {
            copy_padded(query, dim, dims, 1.0f, padded.data());
            query = padded.data();
        }
        const float* const same[kTogether] = {query, query, query, query};
        for (std::int64_t begin = 0; begin < p; begin += kTogether) {
            const int here = static_cast<int>(std::min<std::int64_t>(kTogether, p - begin));
            const float* rows[kTogether];
            float* const found = out + q * p + begin;
            for (int i = 0; i < here; ++i) {
                const std::int64_t probe = std::max<std::int64_t>(probes[q * p + begin + i], 0);
                rows[i] = centroids + probe * dim;
                if (dims == dim) continue;
                float* const copy = padded.data() + (1 + i) * dims;
                copy_padded(rows[i], dim, dims, 1.0f, copy);
                rows[i] = copy;
            }
            kernels.inner_product_pairs(rows, same, here, dims, found, nullptr);
            for (int i = 0; i < here; ++i)
                if (probes[q * p + begin + i] < 0) found[i] = 0;
        }
    }
}

}  // namespace hybridindex
