#include "scan/scattered_rows.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hybridindex {
namespace {

constexpr std::int64_t kLineBytes = 64;
// Bytes of rows of an item, which one thread takes at a time.
constexpr std::int64_t kItemBytes = 64 << 10;

const ListTable& whole_vectors(const ListTable& lists) {
    check_lists(lists);
    if (lists.centroids != nullptr) throw std::invalid_argument("rows have centroids added; expected whole vectors");
    return lists;
}

}  // namespace

bool GatheredRows::add(const std::uint8_t* code, const std::int64_t* id, std::int64_t code_size) {
    for (std::int64_t i = 0; i < code_size; i += kLineBytes) __builtin_prefetch(code + i);
    __builtin_prefetch(id);
    held_codes_[held_] = code, held_ids_[held_] = id;
    return ++held_ == 2 * kBlockRows;
}

void GatheredRows::compare(RowScan& rows, std::int64_t code_size) {
    const int n = std::min<int>(held_, kBlockRows);
    std::int64_t ids[kBlockRows];
    for (int r = 0; r < n; ++r) {
        std::memcpy(codes_.data() + r * code_size, held_codes_[r], static_cast<std::size_t>(code_size));
        ids[r] = *held_ids_[r];
    }
    rows.scan({.codes = codes_.data(), .n_rows = n, .wanted = (1u << n) - 1u, .ids = ids, .first_id = 0, .terms = {}, .next = {}});
    std::copy(held_codes_ + n, held_codes_ + held_, held_codes_);
    std::copy(held_ids_ + n, held_ids_ + held_, held_ids_);
    held_ -= n;
}

ScatteredRows::ScatteredRows(const ListTable& lists, bool keep_max, const BlockKernels& kernels)
    : lists_(whole_vectors(lists)), keep_max_(keep_max), kernels_(kernels) {}

ScatteredRows::Shared::Shared(const ScatteredRows& source)
    : RowQueries(source.lists_.codes, false, source.keep_max_, source.kernels_), code_size(source.lists_.codes.code_size) {}

void ScatteredRows::Shared::prepare(const ScatteredTask& task, const ScanPlan&, std::int64_t widest) {
    positions.assign(task.positions, task.positions + task.sets * task.w);
    w = task.w;
    RowQueries::prepare(task.queries, task.n, task.k, widest, task.distances, task.ids);
}

void ScatteredRows::Shared::let_go() {
    if (positions.capacity() * sizeof(positions[0]) > kMostKept) positions = std::vector<std::int64_t>();
    RowQueries::let_go(kMostKept);
}

std::int64_t ScatteredRows::plan(const ScatteredTask& task, int, ScanPlan& plan) const {
    for (std::int64_t i = 0; i < task.sets * task.w; ++i) {
        const std::int64_t position = task.positions[i], list = position >> 32;
        if (position == -1) continue;
        if (position < 0 || list >= lists_.nlist || (position & 0xffffffff) >= lists_.extents[3 * list])
            throw std::out_of_range("position " + std::to_string(position) + " is no row");
    }
    const std::int64_t members = task.sets == task.n ? 1 : task.n;
    plan.probed.lists.resize(static_cast<std::size_t>(task.sets));
    std::iota(plan.probed.lists.begin(), plan.probed.lists.end(), 0);
    plan.probed.members.resize(static_cast<std::size_t>(task.n));
    std::iota(plan.probed.members.begin(), plan.probed.members.end(), 0);
    plan.probed.starts.assign(1, 0);
    plan.items.clear();
    plan.left.assign(static_cast<std::size_t>(task.n), 0);
    const std::int64_t step = std::max<std::int64_t>(kBlockRows, kItemBytes / lists_.codes.code_size / kBlockRows * kBlockRows);
    for (std::int64_t set = 0; set < task.sets; ++set) {
        plan.probed.starts.push_back((set + 1) * members);
        for (std::int64_t first = 0; first < task.w; first += step) {
            plan.items.push_back(
                {static_cast<std::int32_t>(set), static_cast<std::int32_t>(std::min(step, task.w - first)), first});
            for (std::int64_t m = 0; m < members; ++m) ++plan.left[static_cast<std::size_t>(set * members + m)];
        }
    }
    return task.n * task.w * lists_.codes.code_size;
}

bool ScatteredRows::scan(Rows& rows, const Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem*,
                         std::int64_t first, int n, QueryHeap* apart, const Stopped& stopped) const {
    const std::int64_t* const positions = shared.positions.data() + item.list * shared.w + item.first;
    const std::int64_t size = lists_.codes.code_size;
    rows.start_group(plan.probed.members.data() + first, n, nullptr, {}, apart);
    rows.gathered.clear();
    for (std::int64_t i = 0; i < item.count && positions[i] >= 0; ++i) {
        const std::int64_t* const extent = lists_.extents + 3 * (positions[i] >> 32);
        const std::int64_t row = positions[i] & 0xffffffff;
        const std::uint8_t* const codes = lists_.base + extent[2];
        if (!rows.gathered.add(codes + row * size, reinterpret_cast<const std::int64_t*>(codes + extent[1] * size) + row, size))
            continue;
        if (stopped()) return false;
        rows.gathered.compare(rows, size);
    }
    while (!rows.gathered.empty()) rows.gathered.compare(rows, size);
    return true;
}

template class ScanJob<ScatteredRows>;
template class ScanJobs<ScatteredRows>;

}  // namespace hybridindex
