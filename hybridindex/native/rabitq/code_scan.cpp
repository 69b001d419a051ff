#include "rabitq/code_scan.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

namespace hybridindex {
namespace {

// Bytes between what is read and what is fetched: short of what most lists hold, so that the next one is on its way.
constexpr std::int64_t kCodeBytesAhead = 2 << 10;
// Rows that all queries of a list are compared with before the next ones are: they stay in the first cache.
constexpr std::int64_t kRowsOfRun = 256;
// Dimensions of a code take as long as so many bytes less of rows.
constexpr std::int64_t kDimsPerMultiply = 4;

}  // namespace

float round_query(const CodeFormat& format, float* query, std::int8_t* whole) {
    format.rotation.apply(query);
    const std::int64_t dims = format.dims();
    const float most = static_cast<float>(most_whole(format.bits));
    float largest = 0;
    for (std::int64_t i = 0; i < dims; ++i) largest = std::max(largest, std::fabs(query[i]));
    float factor = largest > 0 ? most / largest : 0.0f;
    if (std::isinf(factor)) factor = 0;  // too short for float
    // Adding and taking away leaves the nearest whole number, even ones first.
    constexpr float kWhole = 0x1.8p23f;
    for (std::int64_t i = 0; i < dims; ++i)
        whole[i] = static_cast<std::int8_t>(static_cast<std::int32_t>(query[i] * factor + kWhole - kWhole));
    return factor > 0 ? largest / most * format.f_scale : 0.0f;
}

void CodedQueries::prepare(const float* queries, std::int64_t n) {
    const std::int64_t dims = format_.dims(), dim = format_.dim;
    turned_.grow(dims);
    whole_.grow(n * dims);
    tables_.grow(n * format_.chunks() * kTableBytes);
    u_.resize(static_cast<std::size_t>(n));
    for (std::int64_t q = 0; q < n; ++q) {
        float* const turned = turned_.data();
        std::copy(queries + q * dim, queries + (q + 1) * dim, turned);
        std::fill(turned + dim, turned + dims, 0.0f);
        std::int8_t* const whole = whole_.data() + q * dims;
        u_[static_cast<std::size_t>(q)] = round_query(format_, turned, whole);
        fill_tables(whole, format_.chunks(), format_.bits, tables_.data() + q * format_.chunks() * kTableBytes);
    }
}

void CodedGroup::start(const CodeFormat& format, const CodedQueries& queries, const std::int32_t* members, int n,
                       const float* centre_products, float square) {
    n_ = n, centre_products_ = centre_products;
    for (int m = 0; m < n; ++m) {
        tables_[m] = queries.tables(members[m]);
        whole_[m] = queries.whole(members[m]);
        u_[m] = queries.u(members[m]);
        w_[m] = (square != 0 ? centre_products[m] / square : 0.0f) * format.g_scale;
    }
}

void CodedGroup::compare(CodedRun run, std::int64_t position, const RabitqKernels& kernels) {
    const std::int64_t count = run.count();
    for (int first = 0, n = 1; first < n_; first += n, run.ahead = 0) {
        // A query that probes the list twice comes twice: each call has room for one block of a query.
        for (n = 1; n < std::min(kernels.together, n_ - first) && heaps_[first + n] != heaps_[first + n - 1];) ++n;
        const QueriesOfRun queries{tables_ + first, whole_ + first, u_ + first, w_ + first, centre_products_ + first,
                                   limits_ + first};
        for (std::int64_t block = 0; block < count;) {
            block = kernels.find(run, block, queries, n, position, found_ + first, sums_.data(), estimates_.data());
            for (int q = first; q < first + n; ++q) {
                if (!found_[q]->full()) continue;
                heaps_[q]->make_room();
                limits_[q] = limit(q);
            }
        }
    }
}

CodedRun run_of(const CodeFormat& format, const BlockKernels& kernels, std::int64_t bytes_ahead) {
    return {.blocks = nullptr,
            .rows = 0,
            .block_bytes = format.block_bytes(),
            .bits = format.bits,
            .chunks = format.chunks(),
            .l2 = format.l2,
            .decode_f16 = kernels.decode_f16,
            .ahead = (bytes_ahead + format.block_bytes() - 1) / format.block_bytes() * format.block_bytes(),
            .later = nullptr,
            .later_bytes = 0};
}

ListCodes::ListCodes(const CodeTable& table, const BlockKernels& blocks, const RabitqKernels& kernels)
    : table_(table), kernels_(kernels), run_(run_of(table.format, blocks, kCodeBytesAhead)), block_bytes_(table.format.block_bytes()),
      extents_(static_cast<std::size_t>(table.nlist) * 3) {
    std::int64_t offset = 0;
    for (std::int64_t list = 0; list < table.nlist; ++list) {
        const std::int64_t size = table.sizes[list];
        if (size < 0 || size > std::numeric_limits<std::int32_t>::max() - kCodedRows)
            throw std::invalid_argument("list " + std::to_string(list) + " has size " + std::to_string(size));
        const std::int64_t n_blocks = (size + kCodedRows - 1) / kCodedRows;
        std::int64_t* const extent = extents_.data() + 3 * list;
        extent[0] = size, extent[1] = n_blocks, extent[2] = offset;
        if (n_blocks > (table.nbytes - offset) / block_bytes_)
            throw std::invalid_argument("list " + std::to_string(list) + " leaves the buffer of codes");
        offset += n_blocks * block_bytes_;
    }
}

void ListCodes::Shared::prepare(const CodeTask& task, const ScanPlan& plan, std::int64_t) {
    queries.prepare(task.queries, task.n);
    centre_products.resize(plan.probed.places.size());
    for (std::size_t m = 0; m < centre_products.size(); ++m)
        centre_products[m] = task.centre_products[plan.probed.places[m]];
    heaps_.resize(static_cast<std::size_t>(task.n));
    for (std::int64_t q = 0; q < task.n; ++q)
        heap(static_cast<std::int32_t>(q)).reset(task.distances + q * task.k, task.ids + q * task.k, task.k);
}

void ListCodes::Shared::let_go() {
    std::size_t kept = 0;
    for (const Candidates& heap : heaps_) kept += heap.kept_bytes();
    if (kept > kMostKept) heaps_.clear();
    queries.let_go(kMostKept);
    if (centre_products.capacity() * sizeof(float) > kMostKept) centre_products = std::vector<float>();
}

std::int64_t ListCodes::plan(const CodeTask& task, int threads, ScanPlan& plan) const {
    plan.slot_of.resize(static_cast<std::size_t>(table_.nlist), -1);
    group_probes(task.probes, task.n, task.p, extents_.data(), table_.nlist, plan.slot_of, plan.probed, true);
    return make_items(plan.probed, {extents_.data(), block_bytes_ / kCodedRows, table_.format.dims() / kDimsPerMultiply},
                      task.n, threads, static_cast<bool>(task.on_done), plan.items, plan.left);
}

std::span<const std::uint8_t> ListCodes::bytes_of(std::int64_t list, const ScanItem& item) const {
    const std::int64_t start = extents_[static_cast<std::size_t>(3 * list + 2)] + item.first / kCodedRows * block_bytes_;
    return {table_.base + start, static_cast<std::size_t>((item.count + kCodedRows - 1) / kCodedRows * block_bytes_)};
}

bool ListCodes::scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
                     std::int64_t first, int n, Candidates* apart, const Stopped& stopped) const {
    const std::int64_t list = plan.probed.lists[item.list];
    const std::span<const std::uint8_t> own = bytes_of(list, item);
    const std::span<const std::uint8_t> later =
        following == nullptr ? std::span<const std::uint8_t>{} : bytes_of(plan.probed.lists[following->list], *following);
    // Where the list after that begins, as far as the items are taken in turn.
    if (following != nullptr && following + 1 < plan.items.data() + plan.items.size())
        __builtin_prefetch(extents_.data() + 3 * plan.probed.lists[static_cast<std::size_t>(following[1].list)]);
    const std::int32_t* const members = plan.probed.members.data() + first;
    rows.group.start(table_.format, shared.queries, members, n, shared.centre_products.data() + first,
                     table_.centre_squares[list]);
    for (int m = 0; m < n; ++m) {
        Candidates& own_heap = shared.heap(members[m]);
        rows.group.find_into(m, apart != nullptr ? apart[m] : own_heap, own_heap);
    }
    CodedRun run = run_;
    for (std::int64_t row = 0; row < item.count; row += kRowsOfRun) {
        if (stopped()) return false;
        const std::int64_t start = row / kCodedRows * block_bytes_, length = kRowsOfRun / kCodedRows * block_bytes_;
        const bool last = row + kRowsOfRun >= item.count;
        run.blocks = own.data() + start;
        run.rows = std::min(kRowsOfRun, item.count - row);
        run.later = last ? later.data() : run.blocks + length;
        run.later_bytes = static_cast<std::int64_t>(last ? later.size() : own.size() - static_cast<std::size_t>(start + length));
        rows.group.compare(run, list << 32 | (item.first + row), kernels_);
    }
    return true;
}

template class ScanJob<ListCodes>;
template class ScanJobs<ListCodes>;

}  // namespace hybridindex
