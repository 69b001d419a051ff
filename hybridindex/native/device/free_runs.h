// Free pages of an arena, as runs: hybridindex/tiers/paged/arena.py.
#pragma once
#include <cstdint>
#include <map>
#include <set>
#include <utility>
#include <vector>

namespace hybridindex {

// One thread at a time. A run is found in a time that grows with the logarithm of their number: there may be a hundred
// thousand where every second page is taken.
class FreeRuns {
public:
    // `n` page numbers behind `to`, ascending; false where fewer are free. The shortest run that has them all, the lowest
    // of those; else the longest runs, and none where they have to be `whole`.
    bool allocate(std::int32_t n, bool whole, std::vector<std::int32_t>& to);
    // Makes `n` pages free.
    void free(std::int32_t start, std::int32_t n);
    // Takes these pages away if all of them are free.
    bool withdraw(std::int32_t start, std::int32_t n);
    std::int64_t n_free() const { return n_free_; }
    // The end of the last run; 0 without one.
    std::int32_t end() const;
    // By start.
    const std::map<std::int32_t, std::int32_t>& runs() const { return runs_; }

private:
    using Run = std::map<std::int32_t, std::int32_t>::iterator;
    void add(std::int32_t start, std::int32_t n);
    void remove(Run run);
    void take(Run run, std::int32_t n, std::vector<std::int32_t>& to);

    std::map<std::int32_t, std::int32_t> runs_;
    // (length, start)
    std::set<std::pair<std::int32_t, std::int32_t>> by_length_;
    std::int64_t n_free_ = 0;
};

}  // namespace hybridindex
