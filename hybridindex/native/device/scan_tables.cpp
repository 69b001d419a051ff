#include "device/scan_tables.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace hybridindex {
namespace {

constexpr std::int64_t kAligned = 16;
// Pages that are written together.
constexpr std::int64_t kAtOnce = 4;
// Keys that are sorted by their ranks.
constexpr std::int64_t kFew = 32;
constexpr std::int64_t kEmpty = std::numeric_limits<std::int64_t>::max();
constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();

// Ascending, without a branch that depends on a key; for few keys.
void sort_few(std::int64_t* keys, std::int64_t n) {
    std::array<std::int64_t, kFew> all;
    std::copy(keys, keys + n, all.begin());
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t own = all[i];
        std::int64_t place = 0;
        for (std::int64_t j = 0; j < i; ++j) place += all[j] <= own;
        for (std::int64_t j = i + 1; j < n; ++j) place += all[j] < own;
        keys[place] = own;
    }
}

// The last of `n` ascending numbers that is at most `value`, or the first.
std::int64_t last_at_most(const std::int32_t* numbers, std::int64_t n, std::int64_t value) {
    const std::int32_t* from = numbers;
    while (n > 1) {
        const std::int64_t half = n / 2;
        from = from[half] <= value ? from + half : from;
        n -= half;
    }
    return from - numbers;
}

std::int64_t aligned(std::int64_t n) { return (n + kAligned - 1) / kAligned * kAligned; }
std::int64_t ceiling(std::int64_t n, std::int64_t by) { return (n + by - 1) / by; }

}  // namespace

std::int64_t ScanTables::first_absent(const std::int64_t* probes, std::int64_t n, const std::int64_t* list_sizes,
                                      const std::int16_t* list_device, std::int64_t nlist, std::int16_t device) {
    // As a rule all are there: that is found out without a branch.
    bool all_there = nlist > 0;
    for (std::int64_t i = 0; i < n && nlist > 0; ++i) {
        const bool is_list = static_cast<std::uint64_t>(probes[i]) < static_cast<std::uint64_t>(nlist);
        all_there &= is_list & (list_device[is_list ? probes[i] : 0] == device);
    }
    if (all_there) return -1;
    for (std::int64_t i = 0; i < n; ++i) {
        const std::int64_t list = probes[i];
        if (list == -1) continue;
        if (list < 0 || list >= nlist || (list_device[list] != device && list_sizes[list] > 0)) return i;
    }
    return -1;
}

ScanTables::ScanTables(std::int64_t rows_per_page, std::int64_t group)
    : inverse_(rows_per_page < 1 ? 0 : ~std::uint64_t{0} / rows_per_page + 1),
      rows_per_page_(rows_per_page),
      group_(group) {
    if (rows_per_page < 1 || rows_per_page > kMost || group < 1 || group > 1024)
        throw std::invalid_argument("rows_per_page must be at least 1, group 1 to 1024");
}

std::int64_t ScanTables::take(const std::int64_t* probes, std::int64_t n, std::int64_t p,
                              const std::int64_t* list_sizes, std::int64_t nlist, std::int64_t max_pages) {
    if (max_pages < 1) throw std::invalid_argument("max_pages must be at least 1");
    if (n * p > kMost || nlist > kMost) throw std::invalid_argument("too many probes or lists");
    nlist_ = nlist;
    n_probes_ = std::max<std::int64_t>(1, p);
    max_pages_ = max_pages;
    as_taken_ = true;
    start_ = end_ = 0;
    const std::int64_t longest = max_pages > kMost / rows_per_page_ ? kMost : max_pages * rows_per_page_;
    n_pairs_ = 0;
    const auto make_room = [&](std::int64_t pairs) {
        // Never less: what is there need not be made again.
        if (pairs > static_cast<std::int64_t>(rows_.size()))
            for (auto* each : {&list_, &probe_, &rows_}) each->resize(pairs);
    };
    make_room(n * p);
    query_starts_.resize(n + 1);
    first_page_.clear();
    // Not members: a store to one of these would have to be done before the next probe is read.
    std::int64_t t = 0, all_rows = 0, all_items = 0, parts = 1;
    const auto add = [&](std::int64_t list, std::int64_t probe, std::int64_t rows) {
        list_[t] = static_cast<std::int32_t>(list);
        probe_[t] = static_cast<std::int32_t>(probe);
        rows_[t++] = static_cast<std::int32_t>(rows);
    };
    for (std::int64_t q = 0; q < n; ++q) {
        query_starts_[q] = t;
        make_room(t + p);
        for (std::int64_t j = q * p; j < (q + 1) * p; ++j) {
            const std::int64_t list = probes[j];
            if (list == -1) continue;
            if (list < 0 || list >= nlist) throw std::out_of_range("probe " + std::to_string(list) + " is no list id");
            std::int64_t left = list_sizes[list];
            if (left <= 0) continue;
            if (left > kMost) throw std::invalid_argument("list " + std::to_string(list) + " has too many rows");
            all_rows += left;
            all_items += pages(left);
            if (left > longest) {
                // Room for its parts, and for the probes to come.
                const std::int64_t n_parts = ceiling(left, longest);
                make_room(t + n_parts + p);
                first_page_.resize(t);
                parts = std::max(parts, n_parts);
                for (std::int64_t part = 0; part < n_parts; ++part, left -= longest) {
                    add(list, j, std::min(left, longest));
                    first_page_.push_back(static_cast<std::int32_t>(part * max_pages));
                }
            } else {
                add(list, j, left);
            }
        }
        if (t > kMost / 2) throw std::invalid_argument("too many pairs");
    }
    query_starts_[n] = t;
    if (parts > 1) first_page_.resize(t);
    parts_ = parts;
    all_rows_ = all_rows;
    all_items_ = all_items;
    return n_pairs_ = t;
}

std::int64_t ScanTables::cost(std::int64_t pair, const TileCosts& costs) const {
    return static_cast<std::int64_t>(std::ceil(rows_[pair] * costs.per_row)) + pages(rows_[pair]) * costs.per_item +
           costs.per_pair;
}

std::vector<std::int64_t> ScanTables::tiles(const TileCosts& costs) {
    if (!as_taken_) throw std::invalid_argument("these pairs were cut before");
    const std::int64_t n = n_pairs_;
    if (n == 0) return {};
    // As a rule all pairs fit. A pair's bytes are rounded up.
    const double all = static_cast<double>(all_rows_) * costs.per_row +
                       static_cast<double>(all_items_ * costs.per_item + n * (costs.per_pair + 1) +
                                           (query_of(n - 1) - query_of(0)) * costs.per_query);
    if (all < static_cast<double>(costs.limit)) return {n};
    std::vector<std::int64_t> ends;
    if (arrange(costs, ends)) return ends;
    for (std::int64_t start = 0; start < n; start = ends.back()) ends.push_back(end_of_tile(start, costs));
    return ends;
}

std::int64_t ScanTables::end_of_tile(std::int64_t start, const TileCosts& costs) const {
    const std::int64_t n = n_pairs_;
    std::int64_t total = 0, query = query_of(start);
    for (std::int64_t i = start; i < n; ++i) {
        total += cost(i, costs);
        for (; query_starts_[query + 1] <= i; ++query) total += costs.per_query;
        if (total > costs.limit) {
            if (i == start) throw std::out_of_range("a stretch is too long for the scratch");
            return i;
        }
    }
    return n;
}

bool ScanTables::arrange(const TileCosts& costs, std::vector<std::int64_t>& ends) {
    const std::int64_t n = n_pairs_, n_queries = static_cast<std::int64_t>(query_starts_.size()) - 1;
    // Queries that share tiles take half of one at most.
    const std::int64_t at_once =
        std::clamp<std::int64_t>(1 + costs.limit / 2 / std::max<std::int64_t>(1, costs.per_query), 1, n_queries);
    const std::int64_t room = costs.limit - (at_once - 1) * costs.per_query;
    std::vector<std::int64_t> own(n);
    for (std::int64_t i = 0; i < n; ++i) {
        own[i] = cost(i, costs);
        if (own[i] > room) return false;
    }
    std::vector<std::int32_t> tile_of(n), stretch_of(n), order(n);
    const std::size_t keys = static_cast<std::size_t>(nlist_) * parts_;
    if (stretch_of_.size() < keys) stretch_of_.resize(keys, -1);
    std::int32_t n_tiles = 0;
    for (std::int64_t q = 0; q < n_queries; q += at_once) {
        const std::int64_t start = query_starts_[q], end = query_starts_[std::min(q + at_once, n_queries)];
        if (start == end) continue;
        // Pairs stretch by stretch, in the order in which they are met.
        std::vector<std::int64_t> starts, bytes;
        for (std::int64_t i = start; i < end; ++i) {
            std::int32_t& known = stretch_of_[key(i)];
            if (known < 0) {
                known = static_cast<std::int32_t>(bytes.size());
                starts.push_back(0);
                bytes.push_back(0);
            }
            stretch_of[i] = known;
            ++starts[known];
            bytes[known] += own[i];
        }
        for (std::int64_t i = start; i < end; ++i) stretch_of_[key(i)] = -1;
        std::exclusive_scan(starts.begin(), starts.end(), starts.begin(), start);
        for (std::int64_t i = start; i < end; ++i) order[starts[stretch_of[i]]++] = static_cast<std::int32_t>(i);
        // A stretch goes to the next tile as a whole where it fits one.
        std::int64_t used = 0, at = start;
        for (std::size_t stretch = 0; stretch < bytes.size(); ++stretch) {
            const bool is_whole = bytes[stretch] <= room;
            if (is_whole && used + bytes[stretch] > room) {
                ++n_tiles;
                used = 0;
            }
            for (; at < starts[stretch]; ++at) {
                if (used + own[order[at]] > room) {
                    ++n_tiles;
                    used = 0;
                }
                used += own[order[at]];
                tile_of[order[at]] = n_tiles;
            }
        }
        ++n_tiles;
    }
    // Within a tile, pairs stay in the order of the queries.
    ends.assign(n_tiles, 0);
    for (std::int64_t i = 0; i < n; ++i) ++ends[tile_of[i]];
    std::vector<std::int64_t> next(n_tiles);
    std::exclusive_scan(ends.begin(), ends.end(), next.begin(), std::int64_t{0});
    std::inclusive_scan(ends.begin(), ends.end(), ends.begin());
    for (std::int64_t i = 0; i < n; ++i) order[next[tile_of[i]]++] = static_cast<std::int32_t>(i);
    std::vector<std::int32_t> moved(n);
    for (auto* each : {&list_, &probe_, &rows_, &first_page_}) {
        if (each == &first_page_ && parts_ == 1) continue;
        for (std::int64_t i = 0; i < n; ++i) moved[i] = (*each)[order[i]];
        std::copy(moved.begin(), moved.end(), each->begin());
    }
    as_taken_ = false;
    return true;
}

StagedTile ScanTables::write(std::int64_t start, std::int64_t end, const ListPages& lists, std::int64_t heavy_from,
                             SelectionShape selection, std::int32_t* out, std::int64_t room) {
    if (start < 0 || start >= end || end > n_pairs_) throw std::out_of_range("no such pairs");
    if (lists.nlist < nlist_) throw std::invalid_argument("list_log must have every list");
    if (selection.chunk < 1 || selection.kept < 1 || selection.chunk < 2 * selection.kept)
        throw std::invalid_argument("a chunk must keep half of its candidates at most");
    const std::int64_t t = end - start;
    start_ = start;
    end_ = end;
    StagedTile tile{};
    tile.first_query = query_of(start);
    tile.n_queries = query_of(end - 1) - tile.first_query + 1;

    // Which stretch each pair is of, in the order in which they are met, and its members. Every scan waits for this: no
    // branch that is taken now and then.
    const std::size_t keys = static_cast<std::size_t>(nlist_) * parts_;
    if (stretch_of_.size() < keys) stretch_of_.resize(keys, -1);
    for (auto* each : {&stretch_of_pair_, &pair_slots_, &count_, &first_pair_, &order_, &next_member_})
        if (static_cast<std::int64_t>(each->size()) < t + 1) each->resize(t + 1);
    query_pairs_.resize(tile.n_queries + 1);
    std::int64_t slots = 0, s = 0;
    {
        const std::int32_t *const list = list_.data() + start, *const rows = rows_.data() + start;
        std::int32_t *const of_key = stretch_of_.data(), *const of_pair = stretch_of_pair_.data(),
                            *const slot = pair_slots_.data(), *const count = count_.data(),
                            *const first = first_pair_.data();
        for (std::int64_t i = 0; i < t; ++i) {
            const std::int64_t own = parts_ == 1 ? list[i] : key(start + i);
            const std::int32_t known = of_key[own];
            const bool is_new = known < 0;
            const std::int32_t stretch = is_new ? static_cast<std::int32_t>(s) : known;
            of_key[own] = of_pair[i] = stretch;
            // Behind the last stretch there is room for one more.
            first[s] = static_cast<std::int32_t>(i);
            count[s] = is_new ? 0 : count[s];
            s += is_new;
            ++count[stretch];
            slot[i] = static_cast<std::int32_t>(slots);
            slots += rows[i];
        }
        for (std::int64_t i = 0; i < s; ++i) of_key[key(start + first[i])] = -1;
        if (as_taken_) {
            for (std::int64_t q = 0; q <= tile.n_queries; ++q)
                query_pairs_[q] = static_cast<std::int32_t>(
                    std::clamp<std::int64_t>(query_starts_[tile.first_query + q] - start, 0, t));
        } else {
            for (std::int64_t q = 0, i = 0; q <= tile.n_queries; ++q) {
                while (i < t && query_of(start + i) < tile.first_query + q) ++i;
                query_pairs_[q] = static_cast<std::int32_t>(i);
            }
        }
    }
    if (slots > kMost) throw std::invalid_argument("too many rows for one tile");
    tile.n_slots = slots;
    tile.n_stretches = s;

    // Light stretches first.
    {
        const std::int32_t *const count = count_.data(), *const first = first_pair_.data(),
                           *const rows = rows_.data() + start;
        std::int32_t *const order = order_.data(), *const heavy = next_member_.data();
        std::int64_t n_light = 0, n_heavy = 0, items = 0, light_items = 0;
        std::int32_t most_rows = 0;
        for (std::int64_t i = 0; i < s; ++i) {
            const bool is_light = count[i] < heavy_from;
            order[n_light] = heavy[n_heavy] = static_cast<std::int32_t>(i);
            n_light += is_light;
            n_heavy += !is_light;
            const std::int64_t own = pages(rows[first[i]]) * groups_of(count[i]);
            items += own;
            light_items += is_light ? own : 0;
            most_rows = std::max(most_rows, rows[first[i]]);
        }
        std::copy(heavy, heavy + n_heavy, order + n_light);
        tile.n_items = items;
        tile.n_light = light_items;
        tile.most_rows = most_rows;
    }
    if (tile.n_items > kMost) throw std::invalid_argument("too many items for one tile");

    // The sections.
    std::int64_t used = 0;
    const std::array<std::int64_t, StagedTile::kTables> lengths{tile.n_items, tile.n_items, s, s, s, s, s, t, t};
    for (int i = 0; i < StagedTile::kTables; ++i) {
        tile.at[i] = used;
        used += aligned(lengths[i]);
    }
    const auto slot_of = [&](std::int32_t pair) { return pair == t ? slots : pair_slots_[pair]; };
    candidates_.clear();
    for (std::int64_t q = 0; q < tile.n_queries; ++q)
        candidates_.push_back(slot_of(query_pairs_[q + 1]) - slot_of(query_pairs_[q]));
    for (std::int64_t most = 0; most != 1; ++tile.n_levels) {
        if (tile.n_levels == StagedTile::kMostLevels) throw std::invalid_argument("too many levels of selection");
        tile.starts[tile.n_levels] = used;
        used += aligned(tile.n_queries + 1);
        std::int64_t total = 0;
        most = 1;
        for (std::int64_t q = 0, level = tile.n_levels * tile.n_queries; q < tile.n_queries; ++q) {
            const std::int64_t count = candidates_[level + q];
            const std::int64_t chunks = std::max<std::int64_t>(1, ceiling(count, selection.chunk));
            total += count;
            most = std::max(most, chunks);
            candidates_.push_back(chunks * selection.kept);
        }
        tile.places[tile.n_levels] = total;
        tile.programs[tile.n_levels] = most;
    }
    tile.starts[tile.n_levels] = used;
    used += aligned(tile.n_queries + 1);
    tile.places[tile.n_levels] = tile.n_queries * selection.kept;
    tile.used = used;
    if (used > room) return tile;

    for (int i = 0; i <= tile.n_levels; ++i) {
        std::int32_t* const to = out + tile.starts[i];
        std::int64_t sum = 0;
        to[0] = 0;
        for (std::int64_t q = 0; q < tile.n_queries; ++q) 
            to[q + 1] = static_cast<std::int32_t>(sum += candidates_[i * tile.n_queries + q]);
    }
    std::int32_t *page = out + tile.at[0], *stretch = out + tile.at[1];
    std::int32_t *const first = out + tile.at[2], *const groups = out + tile.at[3], *const rows = out + tile.at[4],
                        *const member = out + tile.at[5], *const member_end = out + tile.at[6],
                        *const queries = out + tile.at[7], *const slot = out + tile.at[8];
    std::int32_t members = 0, items = 0;
    for (std::int64_t i = 0; i < s; ++i) {
        const std::int64_t pair = start + first_pair_[order_[i]];
        const std::int32_t count = count_[order_[i]];
        const std::int32_t n_groups = static_cast<std::int32_t>(groups_of(count));
        const std::int64_t n_pages = pages(rows_[pair]);
        const std::int64_t in_log = lists.list_log[list_[pair]] + first_page(pair);
        if (in_log < 0 || in_log + n_pages > lists.n_pages)
            throw std::out_of_range("list " + std::to_string(list_[pair]) + " has no such pages in this snapshot");
        first[i] = items;
        groups[i] = n_groups;
        rows[i] = rows_[pair];
        member[i] = next_member_[order_[i]] = members;
        member_end[i] = members += count;
        const std::int32_t* const numbers = lists.page_log + in_log;
        const std::int32_t n_items = static_cast<std::int32_t>(n_pages * n_groups), number = static_cast<std::int32_t>(i);
        if (n_groups == 1 && items + n_pages + kAtOnce <= tile.n_items && in_log + n_pages + kAtOnce <= lists.n_pages) {
            // As many at once as most lists have, whatever they have: what is too much is overwritten by the next.
            for (std::int64_t each = 0; each < n_pages; each += kAtOnce)
                for (std::int64_t k = 0; k < kAtOnce; ++k) {
                    page[each + k] = numbers[each + k];
                    stretch[each + k] = number;
                }
        } else {
            for (std::int64_t each = 0; each < n_pages; ++each)
                for (std::int32_t g = 0; g < n_groups; ++g) {
                    page[each * n_groups + g] = numbers[each];
                    stretch[each * n_groups + g] = number;
                }
        }
        page += n_items;
        stretch += n_items;
        items += n_items;
    }
    for (std::int64_t q = 0; q < tile.n_queries; ++q)
        for (std::int32_t i = query_pairs_[q]; i < query_pairs_[q + 1]; ++i) {
            const std::int32_t at = next_member_[stretch_of_pair_[i]]++;
            queries[at] = static_cast<std::int32_t>(q);
            slot[at] = pair_slots_[i];
        }
    // As the tables have them.
    stretch_pairs_.resize(s);
    for (std::int64_t i = 0; i < s; ++i) stretch_pairs_[i] = first_pair_[order_[i]];
    return tile;
}

std::vector<std::int32_t> ScanTables::member_pairs() const {
    std::vector<std::int32_t> pairs(end_ - start_), next = next_member_;
    for (std::int64_t i = end_ - start_ - 1; i >= 0; --i) pairs[--next[stretch_of_pair_[i]]] = static_cast<std::int32_t>(i);
    return pairs;
}

std::int64_t ScanTables::answers(std::int64_t* keys, std::int64_t n, std::int64_t kept, std::int64_t k, bool keep_max,
                                 float* distances, std::int64_t* positions) const {
    if (n + 1 > static_cast<std::int64_t>(query_pairs_.size())) throw std::out_of_range("more queries than the tile has");
    std::int64_t filled = 0;
    for (std::int64_t q = 0; q < n; ++q) {
        std::int64_t* const own = keys + q * kept;
        if (kept <= kFew)
            sort_few(own, kept);
        else
            std::sort(own, own + kept);
        const std::int32_t first = query_pairs_[q], n_pairs = query_pairs_[q + 1] - first;
        for (std::int64_t j = 0; j < k; ++j) {
            float& distance = distances[q * k + j];
            std::int64_t& position = positions[q * k + j];
            if (j >= kept || own[j] == kEmpty) {
                distance = keep_max ? -std::numeric_limits<float>::infinity() : std::numeric_limits<float>::infinity();
                position = -1;
                continue;
            }
            const std::int32_t ordered = static_cast<std::int32_t>(own[j] >> 32);
            const std::int64_t slot = own[j] & 0xFFFFFFFF;
            const float value = std::bit_cast<float>(ordered ^ ((ordered >> 31) & 0x7FFFFFFF));
            distance = keep_max ? -value : value;
            const std::int64_t own_pair = first + (n_pairs ? last_at_most(&pair_slots_[first], n_pairs, slot) : 0);
            const std::int64_t pair = start_ + own_pair, row = n_pairs ? slot - pair_slots_[own_pair] : -1;
            if (row < 0 || row >= rows_[pair])
                throw std::out_of_range("a device answered with a row that was not asked for");
            position = static_cast<std::int64_t>(list_[pair]) << 32 | (first_page(pair) * rows_per_page_ + row);
            ++filled;
        }
    }
    return filled;
}

}  // namespace hybridindex
