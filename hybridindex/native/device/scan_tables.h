// The tables of a list-major device scan, as hybridindex/tiers/paged/scan_tables.py explains them, written to where the
// device takes them from; and the answers of the device's keys. Host code; nothing here knows a device.
#pragma once
#include <array>
#include <cstdint>
#include <vector>

namespace hybridindex {

// Where the lists of a residency snapshot lie: pages of list l are page_log[list_log[l]], page_log[list_log[l] + 1], ...
struct ListPages {
    const std::int64_t* list_log;
    std::int64_t nlist;  // or more: of what lies beside lists
    const std::int32_t* page_log;
    std::int64_t n_pages;
};

// What a tile costs of the scratch, in bytes.
struct TileCosts {
    double per_row;
    std::int64_t per_item, per_pair, per_query;
    std::int64_t limit;  // of a tile whose first query is paid
};

// How the best are selected: each chunk of candidates keeps `kept`, until one chunk is left.
struct SelectionShape {
    std::int64_t chunk, kept;
};

// One tile in the words of a staging block. Sections begin at multiples of 16 words.
struct StagedTile {
    static constexpr int kTables = 9, kMostLevels = 16;
    std::int64_t first_query, n_queries, n_light, n_items, most_rows, n_stretches, n_slots;
    std::int64_t used;                            // words; where they do not fit, nothing was written
    std::array<std::int64_t, kTables> at;         // page, stretch, first, groups, rows, member, end, query, slot
    int n_levels;                                 // of the selection
    std::array<std::int64_t, kMostLevels + 1> starts;  // where the starts of each level's candidates lie; the answer last
    std::array<std::int64_t, kMostLevels> programs;    // of each level: chunks of the query with most
    std::array<std::int64_t, kMostLevels + 1> places;  // of each level: candidates of all queries
};

// Makes the tables of one batch, tile by tile. Not thread-safe. Memory is kept from one batch to the next.
class ScanTables {
public:
    // The first probe that is no list id of nlist lists, or whose list has rows and is not on `device`; -1: none.
    static std::int64_t first_absent(const std::int64_t* probes, std::int64_t n, const std::int64_t* list_sizes,
                                     const std::int16_t* list_device, std::int64_t nlist, std::int16_t device);

    explicit ScanTables(std::int64_t rows_per_page, std::int64_t group);

    // Takes the pairs of (n, p) probes, without -1 and empty lists, query by query in the order of the probes. Lists of
    // more than max_pages pages become several pairs. Returns how many. Throws std::out_of_range for what is no list id.
    std::int64_t take(const std::int64_t* probes, std::int64_t n, std::int64_t p, const std::int64_t* list_sizes,
                      std::int64_t nlist, std::int64_t max_pages);
    // Cuts what was taken into tiles, once: one behind the last pair of each. Where more than one is needed, all queries
    // that probe a list are in one tile, so that it is read once: pairs change places. Where even one pair with the
    // queries beside it is too much for that, they are cut as they come.
    std::vector<std::int64_t> tiles(const TileCosts& costs);
    // Writes the tables of pairs start .. end. Stretches with `heavy_from` members or more come last. Throws
    // std::out_of_range where the snapshot has no such pages.
    StagedTile write(std::int64_t start, std::int64_t end, const ListPages& lists, std::int64_t heavy_from,
                     SelectionShape selection, std::int32_t* out, std::int64_t room);
    // The k best of (n, kept) keys in any order, which it sorts: (distance as an ordered whole number) << 32 | slot; the largest number
    // where there are fewer. Fills distances and positions (n, k): list << 32 | row. Throws std::out_of_range for a slot
    // that the query does not have. Returns how many places are filled.
    std::int64_t answers(std::int64_t* keys, std::int64_t n, std::int64_t kept, std::int64_t k, bool keep_max, float* distances,
                 std::int64_t* positions) const;

    // Of the tile that was written last. Pairs: query by query. Members: stretch by stretch.
    std::int64_t start() const { return start_; }
    std::int64_t end() const { return end_; }
    std::vector<std::int32_t> member_pairs() const;                                   // from `start`
    const std::vector<std::int32_t>& stretch_pairs() const { return stretch_pairs_; } // one of each, from `start`
    const std::vector<std::int32_t>& pair_slots() const { return pair_slots_; }       // longer than these are
    // Of all pairs; longer than these are.
    const std::vector<std::int32_t>& lists() const { return list_; }
    const std::vector<std::int32_t>& probes() const { return probe_; }
    const std::vector<std::int32_t>& rows() const { return rows_; }
    std::int64_t query_of(std::int64_t pair) const { return probe_[pair] / n_probes_; }
    std::int64_t first_row(std::int64_t pair) const { return first_page(pair) * rows_per_page_; }

private:
    std::int64_t cost(std::int64_t pair, const TileCosts& costs) const;
    std::int64_t end_of_tile(std::int64_t start, const TileCosts& costs) const;
    bool arrange(const TileCosts& costs, std::vector<std::int64_t>& ends);
    std::int64_t first_page(std::int64_t pair) const { return parts_ == 1 ? 0 : first_page_[pair]; }
    std::int64_t key(std::int64_t pair) const {
        return parts_ == 1 ? list_[pair] : list_[pair] * parts_ + first_page_[pair] / max_pages_;
    }

    // Pages of some rows. A division for each pair would take longer than the rest of its work: Lemire, Kaser and Kurz,
    // Faster remainder by direct computation (2019), exact below 2^32.
    std::int64_t pages(std::int64_t rows) const {
        if (rows_per_page_ == 1) return rows;
        const auto wide = static_cast<unsigned __int128>(inverse_) * static_cast<std::uint64_t>(rows + rows_per_page_ - 1);
        return static_cast<std::int64_t>(wide >> 64);
    }

    // Groups of some members: one as a rule, and then without a division.
    std::int64_t groups_of(std::int64_t members) const {
        return members <= group_ ? 1 : (members + group_ - 1) / group_;
    }

    std::uint64_t inverse_;  // of rows_per_page, in 64 bits behind the point, rounded up
    std::int64_t rows_per_page_, group_, nlist_ = 0, n_probes_ = 1, parts_ = 1, max_pages_ = 1;
    std::int64_t n_pairs_ = 0, all_rows_ = 0, all_items_ = 0;
    std::vector<std::int64_t> query_starts_;  // as taken: the first pair of each query, and one behind the last
    bool as_taken_ = true;                    // pairs are where they were taken
    std::vector<std::int32_t> list_, probe_, rows_;
    std::vector<std::int32_t> first_page_;  // where a list has several pairs of one query
    std::int64_t start_ = 0, end_ = 0;
    std::vector<std::int32_t> stretch_of_;  // of each list and part, -1 between tiles
    std::vector<std::int32_t> stretch_of_pair_, count_, first_pair_, order_, next_member_;
    std::vector<std::int64_t> candidates_;  // of each query, level by level
    std::vector<std::int32_t> stretch_pairs_, pair_slots_, query_pairs_;
};

}  // namespace hybridindex
