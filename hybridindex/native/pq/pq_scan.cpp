#include "pq/pq_scan.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace hybridindex {
namespace {

// Bytes between what is read and what is fetched.
constexpr std::int64_t kPqBytesAhead = 4 << 10;
// Parts of a row take as long as so many bytes less of rows.
constexpr std::int64_t kPartsPerMultiply = 4;

const float* centroid_of(const PqTable& table, std::int64_t list) {
    return table.centroids == nullptr ? nullptr : table.centroids + list * table.form.dim;
}

}  // namespace

void row_terms(const PqForm& form, const PqKernels& kernels, const std::uint8_t* codes, std::int64_t n, const float* centroid,
               float* out) {
    std::vector<float> table(static_cast<std::size_t>(form.entries()));
    kernels.term_table(form, centroid, table.data());
    for (std::int64_t row = 0; row < n; ++row)
        out[row] = form.bits == 8
                       ? kernels.sum_of_row(codes + row * form.code_size(), form.parts, table.data())
                       : kernels.sum_in_block(codes + row / kPqRows * kPqRows * form.code_size(),
                                              static_cast<int>(row % kPqRows), form.parts, table.data());
}

ListTerms::Terms ListTerms::of(std::int64_t list) const {
    const std::size_t at = static_cast<std::size_t>(list);
    // Before the bytes are read: what comes from bytes of before a forget() is kept, but not used after it.
    const std::uint64_t epoch = epochs_[at].load(std::memory_order_acquire);
    if (Terms known = known_[at].load(std::memory_order_acquire); known && known->epoch == epoch) return known;
    const std::int64_t* const extent = table_.extents + 3 * list;
    const std::size_t room = static_cast<std::size_t>(extent[0] + kPqRows);
    const auto made = std::make_shared<Kept>(Kept{epoch, std::vector<float>(room)});
    row_terms(table_.form, kernels_, table_.base + extent[2], extent[0], centroid_of(table_, list), made->values.data());
    known_[at].store(made, std::memory_order_release);
    return made;
}

void ListTerms::forget(std::int64_t list) const {
    epochs_[static_cast<std::size_t>(list)].fetch_add(1, std::memory_order_release);
    known_[static_cast<std::size_t>(list)].store(nullptr, std::memory_order_release);
}

PqLists::PqLists(const PqTable& table, const PqKernels& kernels) : table_(table), kernels_(kernels), terms_(table_, kernels) {
    check_lists({table.base, table.nbytes, table.extents, table.nlist,
                 {Code::u8, table.form.code_size(), table.form.code_size(), nullptr, nullptr}, nullptr});
}

void PqLists::Shared::prepare(const ScanTask& task, const ScanPlan&, std::int64_t) {
    filter = task.filter;
    queries.prepare(task.queries, task.n);
    heaps_.resize(static_cast<std::size_t>(task.n));
    for (std::int64_t q = 0; q < task.n; ++q)
        heap(static_cast<std::int32_t>(q)).reset(task.distances + q * task.k, task.ids + q * task.k, task.k);
}

std::int64_t PqLists::plan(const ScanTask& task, int threads, ScanPlan& plan) const {
    plan.slot_of.resize(static_cast<std::size_t>(table_.nlist), -1);
    group_probes(task.probes, task.n, task.p, table_.extents, table_.nlist, plan.slot_of, plan.probed);
    return make_items(plan.probed, {table_.extents, table_.form.code_size(), table_.form.parts / kPartsPerMultiply}, task.n,
                      threads, static_cast<bool>(task.on_done), plan.items, plan.left);
}

std::span<const std::uint8_t> PqLists::bytes_of(const ScanPlan& plan, const ScanItem& item) const {
    const std::int64_t code_size = table_.form.code_size(), group = table_.form.bits == 8 ? 1 : kPqRows;
    const std::int64_t first = item.first / group * group, end = (item.first + item.count + group - 1) / group * group;
    const std::int64_t* const extent = table_.extents + 3 * plan.probed.lists[static_cast<std::size_t>(item.list)];
    return {table_.base + extent[2] + first * code_size, static_cast<std::size_t>((end - first) * code_size)};
}

bool PqLists::scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
                   std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const {
    const PqForm& form = table_.form;
    const std::int64_t list = plan.probed.lists[static_cast<std::size_t>(item.list)], code_size = form.code_size();
    const std::int64_t* const extent = table_.extents + 3 * list;
    const std::uint8_t* const codes = table_.base + extent[2];
    const std::int64_t* const ids = reinterpret_cast<const std::int64_t*>(codes + extent[1] * code_size);
    const std::span<const std::uint8_t> own = bytes_of(plan, item);
    const std::span<const std::uint8_t> later =
        following == nullptr ? std::span<const std::uint8_t>{} : bytes_of(plan, *following);
    // What lies so far behind a byte of this item, in the next one where it ends; nullptr beyond that.
    const auto ahead_of = [&](std::int64_t at) -> const std::uint8_t* {
        const std::int64_t here = static_cast<std::int64_t>(own.size()), there = at + kPqBytesAhead - here;
        if (there < 0) return own.data() + at + kPqBytesAhead;
        return there < static_cast<std::int64_t>(later.size()) ? later.data() + there : nullptr;
    };
    const std::int32_t* const members = plan.probed.members.data() + first;
    rows.group.start(shared.queries, members, n, centroid_of(table_, list));
    for (int m = 0; m < n; ++m) {
        QueryHeap& own_heap = shared.heap(members[m]);
        rows.group.find_into(m, apart != nullptr ? apart[m] : own_heap, own_heap);
    }
    const ListTerms::Terms terms = form.has_terms() ? terms_.of(list) : nullptr;
    // Items begin at any 16 rows, blocks at 32: what is not of the item is not wanted.
    const std::int64_t end = item.first + item.count;
    for (std::int64_t row = item.first / kPqRows * kPqRows; row < end; row += kPqRows) {
        if (stopped()) return false;
        const std::uint8_t* const ahead = ahead_of((row - item.first / kPqRows * kPqRows) * code_size);
        if (form.bits == 8 && ahead != nullptr)
            for (std::int64_t i = 0; i < kPqRows * code_size; i += 64) __builtin_prefetch(ahead + i, 0, 2);
        const int there = static_cast<int>(std::min<std::int64_t>(kPqRows, end - row));
        std::uint32_t wanted = shared.filter.wanted(list, row, ids + row, there);
        if (row < item.first) wanted &= ~std::uint32_t{0} << (item.first - row);
        const float* const own_terms = terms ? terms->values.data() + row : nullptr;
        rows.group.compare({codes + row * code_size, code_size, own_terms, there, wanted, ids + row, ahead});
    }
    return true;
}

template class ScanJob<PqLists>;
template class ScanJobs<PqLists>;

void PqScanner::check_lists(const std::int64_t* lists, std::int64_t n) const {
    for (std::int64_t i = 0; i < n; ++i)
        if (lists[i] < 0 || lists[i] >= lists_.table_.nlist)
            throw std::out_of_range("list " + std::to_string(lists[i]) + "; expected 0.." + std::to_string(lists_.table_.nlist - 1));
}

void PqScanner::prepare(const std::int64_t* lists, std::int64_t n) {
    check_lists(lists, n);
    if (!lists_.table_.form.has_terms()) return;
    for (std::int64_t i = 0; i < n; ++i) lists_.terms_.of(lists[i]);
}

void PqScanner::forget(const std::int64_t* lists, std::int64_t n) {
    check_lists(lists, n);
    for (std::int64_t i = 0; i < n; ++i) lists_.terms_.forget(lists[i]);
}

}  // namespace hybridindex
