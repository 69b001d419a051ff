#include "device/free_runs.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <stdexcept>

namespace hybridindex {

bool FreeRuns::allocate(std::int32_t n, bool whole, std::vector<std::int32_t>& to) {
    if (n < 1) throw std::invalid_argument("at least one page must be asked for");
    if (n > n_free_) return false;
    const auto fitting = by_length_.lower_bound({n, 0});
    if (fitting != by_length_.end()) {
        take(runs_.find(fitting->second), n, to);
        return true;
    }
    if (whole) return false;
    const auto first = static_cast<std::ptrdiff_t>(to.size());
    while (n > 0) {
        const auto longest = by_length_.lower_bound({by_length_.rbegin()->first, 0});
        const std::int32_t taken = std::min(n, longest->first);
        take(runs_.find(longest->second), taken, to);
        n -= taken;
    }
    std::sort(to.begin() + first, to.end());
    return true;
}

void FreeRuns::free(std::int32_t start, std::int32_t n) {
    if (n < 1) return;
    auto next = runs_.lower_bound(start);
    if (start < 0 || n > std::numeric_limits<std::int32_t>::max() - start)
        throw std::invalid_argument("page outside the arena");
    if (next != runs_.end() && start + n > next->first) throw std::invalid_argument("page freed twice");
    std::int32_t first = start, length = n;
    if (next != runs_.begin()) {
        const auto previous = std::prev(next);
        const std::int32_t end = previous->first + previous->second;
        if (end > start) throw std::invalid_argument("page freed twice");
        if (end == start) {
            first = previous->first;
            length += previous->second;
            remove(previous);
        }
    }
    if (next != runs_.end() && next->first == start + n) {
        length += next->second;
        remove(next);
    }
    add(first, length);
}

bool FreeRuns::withdraw(std::int32_t start, std::int32_t n) {
    auto run = runs_.upper_bound(start);
    if (run == runs_.begin()) return false;
    --run;
    const std::int32_t first = run->first, end = run->first + run->second;
    if (end - start < n) return false;
    remove(run);
    if (first < start) add(first, start - first);
    if (start + n < end) add(start + n, end - start - n);
    return true;
}

std::int32_t FreeRuns::end() const {
    return runs_.empty() ? 0 : runs_.rbegin()->first + runs_.rbegin()->second;
}

void FreeRuns::add(std::int32_t start, std::int32_t n) {
    runs_.emplace(start, n);
    by_length_.emplace(n, start);
    n_free_ += n;
}

void FreeRuns::remove(Run run) {
    by_length_.erase({run->second, run->first});
    n_free_ -= run->second;
    runs_.erase(run);
}

void FreeRuns::take(Run run, std::int32_t n, std::vector<std::int32_t>& to) {
    const std::int32_t start = run->first, length = run->second;
    remove(run);
    if (n < length) add(start + n, length - n);
    for (std::int32_t page = start; page < start + n; ++page) to.push_back(page);
}

}  // namespace hybridindex
