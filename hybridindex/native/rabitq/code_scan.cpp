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
    format_ = &format, n_ = n, centre_products_ = centre_products;
    for (int m = 0; m < n; ++m) {
        tables_[m] = queries.tables(members[m]);
        whole_[m] = queries.whole(members[m]);
        u_[m] = queries.u(members[m]);
        w_[m] = (square != 0 ? centre_products[m] / square : 0.0f) * format.g_scale;
    }
}

void CodedGroup::compare(const std::uint8_t* block, std::int64_t rows, std::int64_t position, const BlockKernels& blocks,
                         const RabitqKernels& kernels) {
    float factors[2 * kCodedRows], squares[kCodedRows];
    const std::uint8_t* const behind = block + format_->plane_bytes();
    kernels.products(block, format_->bits, format_->chunks(), tables_, whole_, n_, sums_.data());
    blocks.decode_f16(behind, 2 * kCodedRows, factors);
    if (format_->l2) std::memcpy(squares, behind + 64, sizeof(squares));
    kernels.estimates(factors, factors + kCodedRows, format_->l2 ? squares : nullptr, sums_.data(), n_,
                      {u_, w_, centre_products_, limits_}, estimates_.data(), near_);
    const std::uint32_t there = rows >= kCodedRows ? 0xffffu : (1u << rows) - 1u;
    for (int m = 0; m < n_; ++m) {
        std::uint32_t near = near_[m] & there;
        if (near == 0) continue;
        const float* const found = estimates_.data() + m * kCodedRows;
        for (; near != 0; near &= near - 1) {
            const int r = std::countr_zero(near);
            heaps_[m]->push(found[r], position + r);
        }
        limits_[m] = limit(m);
    }
}

ListCodes::ListCodes(const CodeTable& table, const BlockKernels& blocks, const RabitqKernels& kernels)
    : table_(table), blocks_(blocks), kernels_(kernels), block_bytes_(table.format.block_bytes()),
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
    const std::int64_t ahead = (kCodeBytesAhead + block_bytes_ - 1) / block_bytes_ * block_bytes_;
    const auto fetch = [&](std::int64_t at) {
        const bool here = at < static_cast<std::int64_t>(own.size());
        const std::span<const std::uint8_t> bytes = here ? own : later;
        const std::int64_t start = here ? at : at - static_cast<std::int64_t>(own.size());
        if (start >= static_cast<std::int64_t>(bytes.size())) return;
        for (std::int64_t i = 0; i < block_bytes_; i += 64) __builtin_prefetch(bytes.data() + start + i, 0, 2);
    };
    const std::int32_t* const members = plan.probed.members.data() + first;
    rows.group.start(table_.format, shared.queries, members, n, shared.centre_products.data() + first,
                     table_.centre_squares[list]);
    for (int m = 0; m < n; ++m) {
        Candidates& own_heap = shared.heap(members[m]);
        rows.group.find_into(m, apart != nullptr ? apart[m] : own_heap, own_heap);
    }
    const std::int64_t origin = list << 32 | item.first;
    for (std::int64_t row = 0; row < item.count; row += kCodedRows) {
        if (stopped()) return false;
        fetch(row / kCodedRows * block_bytes_ + ahead);
        rows.group.compare(own.data() + row / kCodedRows * block_bytes_, item.count - row, origin + row, blocks_, kernels_);
    }
    return true;
}

template class ScanJob<ListCodes>;
template class ScanJobs<ListCodes>;

}  // namespace hybridindex
