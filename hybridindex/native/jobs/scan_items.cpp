#include "jobs/scan_items.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <utility>

#include "simd/block_kernels.h"

namespace hybridindex {
namespace {

// Work of an item, in bytes read: enough to drown its bookkeeping, little enough that no thread waits long for another.
constexpr std::int64_t kLeastWork = 32 << 10;
constexpr std::int64_t kMostWork = 1 << 20;
constexpr std::int64_t kItemsPerThread = 16;
// Multiply-adds that take as long as reading a byte.
constexpr std::int64_t kMultipliesPerByte = 6;

constexpr int kSizeColumn = 0, kColumns = 3;

std::int64_t row_work(std::int64_t code_size, std::int64_t dim, std::int64_t n_queries) {
    return code_size + dim * n_queries / kMultipliesPerByte;
}

}  // namespace

void group_probes(const std::int64_t* probes, std::int64_t n, std::int64_t p, const std::int64_t* extents,
                  std::int64_t nlist, std::vector<std::int32_t>& slot_of, ProbedLists& out, bool with_places) {
    for (std::int64_t i = 0; i < n * p; ++i)
        if (probes[i] < -1 || probes[i] >= nlist)
            throw std::out_of_range("probe " + std::to_string(probes[i]) + " of query " + std::to_string(i / p) +
                                    " is not a list id: expected -1 or 0.." + std::to_string(nlist - 1));
    out.lists.clear();
    out.starts.assign(1, 0);
    const auto wanted = [&](std::int64_t list) { return list >= 0 && extents[list * kColumns + kSizeColumn] > 0; };
    if (n == 1) {
        // Nothing to group: a list that it probes twice comes twice.
        out.places.clear();
        for (std::int64_t rank = 0; rank < p; ++rank) {
            if (!wanted(probes[rank])) continue;
            out.lists.push_back(probes[rank]);
            out.starts.push_back(static_cast<std::int64_t>(out.lists.size()));
            if (with_places) out.places.push_back(rank);
        }
        out.members.assign(out.lists.size(), 0);
        return;
    }
    for (std::int64_t rank = 0; rank < p; ++rank)
        for (std::int64_t q = 0; q < n; ++q) {
            const std::int64_t list = probes[q * p + rank];
            if (!wanted(list)) continue;
            if (slot_of[list] < 0) {
                slot_of[list] = static_cast<std::int32_t>(out.lists.size());
                out.lists.push_back(list);
                out.starts.push_back(0);
            }
            ++out.starts[slot_of[list] + 1];
        }
    for (std::size_t i = 0; i < out.lists.size(); ++i) out.starts[i + 1] += out.starts[i];
    out.members.resize(static_cast<std::size_t>(out.starts.back()));
    out.places.resize(with_places ? out.members.size() : 0);
    // Fills from the front of each list, moving its start, which is put back afterwards.
    for (std::int64_t q = 0; q < n; ++q)
        for (std::int64_t rank = 0; rank < p; ++rank) {
            const std::int64_t list = probes[q * p + rank];
            if (!wanted(list)) continue;
            const std::size_t at = static_cast<std::size_t>(out.starts[slot_of[list]]++);
            out.members[at] = static_cast<std::int32_t>(q);
            if (with_places) out.places[at] = q * p + rank;
        }
    for (std::size_t i = out.lists.size(); i > 0; --i) out.starts[i] = out.starts[i - 1];
    out.starts[0] = 0;
    for (const std::int64_t list : out.lists) slot_of[list] = -1;
}

namespace {

// Probed lists, those of the query with the least work first, then what is left of the next one's. Work that shared lists
// take off a query is not followed: keeping the queries in order by it took a tenth of the scan.
std::vector<std::int32_t> shortest_first(const ProbedLists& probed, const std::vector<std::int64_t>& work, std::int64_t n) {
    std::vector<std::int64_t> work_of(static_cast<std::size_t>(n), 0);
    const auto each_member = [&](const auto& visit) {
        for (std::size_t i = 0; i < probed.lists.size(); ++i)
            for (std::int64_t m = probed.starts[i]; m < probed.starts[i + 1]; ++m)
                visit(i, static_cast<std::size_t>(probed.members[static_cast<std::size_t>(m)]));
    };
    each_member([&](std::size_t i, std::size_t query) { work_of[query] += work[i]; });
    std::vector<std::int32_t> queries(static_cast<std::size_t>(n)), place(queries.size());
    std::iota(queries.begin(), queries.end(), 0);
    std::sort(queries.begin(), queries.end(), [&](std::int32_t a, std::int32_t b) {
        return std::pair(work_of[static_cast<std::size_t>(a)], a) < std::pair(work_of[static_cast<std::size_t>(b)], b);
    });
    for (std::size_t i = 0; i < queries.size(); ++i) place[static_cast<std::size_t>(queries[i])] = static_cast<std::int32_t>(i);
    // The place of the first query that waits for each list; lists of one place in the order they came in.
    std::vector<std::int32_t> first(probed.lists.size(), static_cast<std::int32_t>(n)), order(probed.lists.size());
    each_member([&](std::size_t i, std::size_t query) { first[i] = std::min(first[i], place[query]); });
    std::vector<std::int32_t> starts(static_cast<std::size_t>(n) + 2, 0);
    for (const std::int32_t at : first) ++starts[static_cast<std::size_t>(at) + 1];
    std::partial_sum(starts.begin(), starts.end(), starts.begin());
    for (std::size_t i = 0; i < first.size(); ++i)
        order[static_cast<std::size_t>(starts[static_cast<std::size_t>(first[i])]++)] = static_cast<std::int32_t>(i);
    return order;
}

}  // namespace

std::int64_t make_items(const ProbedLists& probed, const ListShape& shape, std::int64_t n, int threads, bool finish_early,
                        std::vector<ScanItem>& items, std::vector<std::int32_t>& items_of_query) {
    const std::int64_t* const extents = shape.extents;
    const std::size_t n_lists = probed.lists.size();
    std::vector<std::int64_t> work(n_lists);
    std::int64_t total = 0;
    for (std::size_t i = 0; i < n_lists; ++i) {
        work[i] = extents[probed.lists[i] * kColumns + kSizeColumn] *
                  row_work(shape.code_size, shape.dim, probed.starts[i + 1] - probed.starts[i]);
        total += work[i];
    }
    const std::int64_t goal =
        threads <= 1 && !finish_early ? kMostWork : std::clamp(total / (threads * kItemsPerThread), kLeastWork, kMostWork);
    items.clear();
    items_of_query.assign(static_cast<std::size_t>(n), 0);
    const auto cut = [&](std::int32_t i) {
        const std::int64_t size = extents[probed.lists[i] * kColumns + kSizeColumn];
        if (work[i] < 2 * goal) {
            items.push_back({i, static_cast<std::int32_t>(size), 0});
            for (std::int64_t m = probed.starts[i]; m < probed.starts[i + 1]; ++m) ++items_of_query[probed.members[m]];
            return;
        }
        const std::int64_t pieces = std::clamp<std::int64_t>(work[i] / goal, 1, (size + kBlockRows - 1) / kBlockRows);
        const std::int64_t blocks = (size + kBlockRows - 1) / kBlockRows;
        const std::int64_t step = (blocks + pieces - 1) / pieces * kBlockRows;
        for (std::int64_t first = 0; first < size; first += step) {
            items.push_back({i, static_cast<std::int32_t>(std::min(step, size - first)), first});
            for (std::int64_t m = probed.starts[i]; m < probed.starts[i + 1]; ++m) ++items_of_query[probed.members[m]];
        }
    };
    if (finish_early) {
        for (const std::int32_t i : shortest_first(probed, work, n)) cut(i);
    } else {
        for (std::size_t i = 0; i < n_lists; ++i) cut(static_cast<std::int32_t>(i));
    }
    return total;
}

}  // namespace hybridindex
