#include "scan/list_scan.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "jobs/scan_items.h"

namespace hybridindex {
namespace {

// Bytes between what is read and what is fetched, a block at least: what is read in the time of a memory access, and
// short of what one item after this one may hold.
constexpr std::int64_t kBytesAhead = 16 << 10, kFloatsAhead = 32 << 10;

}  // namespace

void check_lists(const ListTable& lists) {
    const auto fail = [](std::int64_t list, const std::string& what) {
        throw std::invalid_argument("list " + std::to_string(list) + " " + what);
    };
    const std::int64_t element = element_size(lists.codes.code), code_size = lists.codes.code_size;
    if (lists.codes.dim < 1 || code_size != lists.codes.dim * element)
        throw std::invalid_argument("code_size is " + std::to_string(code_size) + "; expected " +
                                    std::to_string(lists.codes.dim * element));
    if (reinterpret_cast<std::uintptr_t>(lists.base) % 8 != 0)
        throw std::invalid_argument("the lists must start at a multiple of 8 bytes");
    std::vector<std::int64_t> order;
    for (std::int64_t i = 0; i < lists.nlist; ++i) {
        const std::int64_t size = lists.extents[3 * i], capacity = lists.extents[3 * i + 1], offset = lists.extents[3 * i + 2];
        if (size < 0 || capacity < size || size > std::numeric_limits<std::int32_t>::max())
            fail(i, "has size " + std::to_string(size) + " and capacity " + std::to_string(capacity));
        if (offset < 0 || offset > lists.nbytes || capacity > (lists.nbytes - offset) / (code_size + 8))
            fail(i, "leaves the buffer");
        if (offset % 8 != 0 || (capacity * code_size) % 8 != 0) fail(i, "is not aligned to 8 bytes");
        if (capacity > 0 && !lists.apart) order.push_back(i);
    }
    std::sort(order.begin(), order.end(),
              [&](std::int64_t a, std::int64_t b) { return lists.extents[3 * a + 2] < lists.extents[3 * b + 2]; });
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
        const std::int64_t a = order[i], b = order[i + 1];
        if (lists.extents[3 * a + 2] + lists.extents[3 * a + 1] * (code_size + 8) > lists.extents[3 * b + 2])
            fail(b, "overlaps list " + std::to_string(a));
    }
}

bool RowFilter::allows(std::int64_t id) const {
    if (bitmap != nullptr) return id >= 0 && id < n_bits && (bitmap[id >> 3] >> (id & 7) & 1);
    return std::binary_search(sorted, sorted + n_sorted, id);
}

std::uint32_t RowFilter::wanted(std::int64_t list, std::int64_t row, const std::int64_t* ids, std::int64_t count) const {
    if (rows.bits != nullptr) return rows.of_rows(list, row, count);
    const std::uint32_t valid = count >= 32 ? ~0u : (1u << count) - 1u;
    if (!active()) return valid;
    std::uint32_t found = 0;
    for (std::uint32_t rest = valid; rest != 0; rest &= rest - 1)
        if (allows(ids[std::countr_zero(rest)])) found |= rest & -rest;
    return found;
}

ListRows::ListRows(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
    : lists_((check_lists(lists), lists)), keep_max_(keep_max), kernels_(kernels),
      terms_(lists.codes.code == Code::u8 && lists.centroids == nullptr
                 ? std::make_unique<KeptTerms>(lists.extents, lists.nlist, !keep_max) : nullptr) {}

ListRows::Shared::Shared(const ListRows& source)
    : RowQueries(source.lists_.codes, source.lists_.centroids != nullptr, source.keep_max_, source.kernels_) {}

void ListRows::Shared::prepare(const ScanTask& task, const ScanPlan&, std::int64_t widest) {
    filter = task.filter;
    RowQueries::prepare(task.queries, task.n, task.k, widest, task.distances, task.ids);
}

std::int64_t ListRows::plan(const ScanTask& task, int threads, ScanPlan& plan) const {
    plan.slot_of.resize(static_cast<std::size_t>(lists_.nlist), -1);
    group_probes(task.probes, task.n, task.p, lists_.extents, lists_.nlist, plan.slot_of, plan.probed);
    return make_items(plan.probed, {lists_.extents, lists_.codes.code_size, lists_.codes.dim}, task.n, threads,
                      static_cast<bool>(task.on_done), plan.items, plan.left);
}

bool ListRows::scan(RowScan& rows, const Shared& shared, const ScanPlan& plan, const ScanItem& item,
                    const ScanItem* following, std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const {
    const std::int64_t list = plan.probed.lists[item.list];
    const std::int64_t next_list = following == nullptr ? 0 : plan.probed.lists[following->list];
    const std::int64_t* extent = lists_.extents + list * 3;
    const std::span<const std::uint8_t> own = bytes_of(list, item);
    const std::int64_t* ids =
        reinterpret_cast<const std::int64_t*>(lists_.base + extent[2] + extent[1] * lists_.codes.code_size) + item.first;
    const std::int64_t block_bytes = kBlockRows * lists_.codes.code_size;
    const float* centroid = lists_.centroids == nullptr ? nullptr : lists_.centroids + list * lists_.codes.dim;
    const std::int64_t distance = lists_.codes.code == Code::u8 ? kBytesAhead : kFloatsAhead;
    const std::int64_t ahead = (distance + block_bytes - 1) / block_bytes;
    const std::int64_t blocks = (item.count + kBlockRows - 1) / kBlockRows;
    const std::span<const std::uint8_t> later =
        following == nullptr ? std::span<const std::uint8_t>{} : bytes_of(next_list, *following);
    // What is fetched while a block is read.
    const auto fetched_with = [&](std::int64_t block) {
        const bool here = block + ahead < blocks;
        const std::int64_t fetched = block + ahead - (here ? 0 : blocks);
        const std::span<const std::uint8_t> bytes = here ? own : later;
        const std::size_t start = static_cast<std::size_t>(fetched * block_bytes);
        if (start >= bytes.size()) return std::span<const std::uint8_t>{};
        (here ? terms_of(list, item.first + fetched * kBlockRows)
              : terms_of(next_list, following->first + fetched * kBlockRows)).fetch();
        return bytes.subspan(start, std::min(static_cast<std::size_t>(block_bytes), bytes.size() - start));
    };
    rows.start_group(plan.probed.members.data() + first, n, centroid, later, apart);
    for (std::int64_t row = 0; row < item.count; row += kBlockRows) {
        if (stopped()) return false;
        rows.scan({.codes = own.data() + row / kBlockRows * block_bytes,
                   .n_rows = static_cast<int>(std::min<std::int64_t>(kBlockRows, item.count - row)),
                   .wanted = shared.filter.wanted(list, item.first + row, ids + row,
                                                  std::min<std::int64_t>(kBlockRows, item.count - row)),
                   .ids = ids + row,
                   .first_id = 0,
                   .terms = terms_of(list, item.first + row),
                   .next = fetched_with(row / kBlockRows)});
    }
    return true;
}

std::span<const std::uint8_t> ListRows::bytes_of(std::int64_t list, const ScanItem& item) const {
    const std::int64_t start = lists_.extents[list * 3 + 2] + item.first * lists_.codes.code_size;
    return {lists_.base + start, static_cast<std::size_t>(item.count * lists_.codes.code_size)};
}

// Of the block at `row` of a list.
KeptTerms::Block ListRows::terms_of(std::int64_t list, std::int64_t row) const {
    return terms_ == nullptr ? KeptTerms::Block{} : terms_->block(list, row);
}

template class ScanJob<ListRows>;
template class ScanJobs<ListRows>;

ListScanner::ListScanner(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
    : rows_(lists, keep_max, kernels), jobs_(rows_) {}

void ListScanner::check_lists(const std::int64_t* lists, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i)
        if (lists[i] < 0 || lists[i] >= rows_.lists_.nlist)
            throw std::out_of_range("list " + std::to_string(lists[i]) + "; expected 0.." + std::to_string(rows_.lists_.nlist - 1));
}

void ListScanner::forget(const std::int64_t* lists, std::int64_t n) {
    check_lists(lists, n);
    if (rows_.terms_ == nullptr) return;
    for (std::int64_t i = 0; i < n; ++i) rows_.terms_->forget(lists[i]);
}

void ListScanner::prepare(const std::int64_t* lists, std::int64_t n) {
    check_lists(lists, n);
    RowQueries none(rows_.lists_.codes, false, rows_.keep_max_, rows_.kernels_);
    if (rows_.terms_ == nullptr || !none.may_filter(1)) return;
    RowScan rows;
    rows.make_room(none, 1);
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t* const extent = rows_.lists_.extents + lists[i] * 3;
        for (std::int64_t row = 0; row < extent[0]; row += kBlockRows)
            rows.keep_terms({.codes = rows_.lists_.base + extent[2] + row * rows_.lists_.codes.code_size,
                             .n_rows = static_cast<int>(std::min<std::int64_t>(kBlockRows, extent[0] - row)),
                             .wanted = 0,
                             .ids = nullptr,
                             .first_id = 0,
                             .terms = rows_.terms_->block(lists[i], row),
                             .next = {}});
    }
}

}  // namespace hybridindex
