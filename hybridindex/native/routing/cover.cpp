#include "routing/cover.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridindex {

namespace {

constexpr int kMostNodes = 64;
constexpr std::int16_t kHere = -1, kNobody = -2;

// Ranks of the nodes for one query, the first to be asked is 0; counts the query where it is taken to go.
void rank_nodes(const NodeOrder& order, std::int64_t query, std::vector<double>& to_do,
                std::array<int, kMostNodes>& ranks) {
    const std::int64_t* const places = order.places + (order.first_turn + query) % order.n_turns * order.n_nodes;
    if (to_do.empty()) {
        std::copy_n(places, order.n_nodes, ranks.begin());
        return;
    }
    std::array<int, kMostNodes> nodes;
    std::iota(nodes.begin(), nodes.begin() + order.n_nodes, 0);
    std::sort(nodes.begin(), nodes.begin() + order.n_nodes, [&](int a, int b) {
        return to_do[a] != to_do[b] ? to_do[a] < to_do[b] : places[a] < places[b];
    });
    for (int rank = 0; rank < order.n_nodes; ++rank) ranks[nodes[rank]] = rank;
    to_do[nodes[0]] += 1;
}

}  // namespace

void cover_probes(const HeldProbes& probes, const NodeOrder& order, std::int16_t* found) {
    const std::int64_t n = probes.n, p = probes.p, words = (p + 63) / 64;
    std::vector<double> to_do;
    if (order.to_do) to_do.assign(order.to_do, order.to_do + order.n_nodes);
    std::array<int, kMostNodes> ranks{};
    // Of each node the probes that it could scan, a bit a probe; then those that nobody was asked for yet.
    std::vector<std::uint64_t> held(order.n_nodes * words), left(words);
    for (std::int64_t q = 0; q < n; ++q) {
        rank_nodes(order, q, to_do, ranks);
        std::fill(held.begin(), held.end(), 0);
        std::fill(left.begin(), left.end(), 0);
        std::int16_t* const mine = found + q * p;
        bool any = false;
        for (std::int64_t j = 0; j < p; ++j) {
            const std::int64_t list = probes.lists[q * p + j];
            if (list < -1 || list >= probes.nlist)
                throw std::out_of_range("probe " + std::to_string(list) + " of query " + std::to_string(q) +
                                        " is not a list id: expected -1 or 0.." + std::to_string(probes.nlist - 1));
            mine[j] = kHere;
            if (list == -1 || probes.here[list]) continue;
            mine[j] = kNobody;
            const std::uint64_t bit = std::uint64_t{1} << (j % 64);
            for (std::uint64_t mask = probes.holders[list] & order.usable; mask; mask &= mask - 1) {
                held[std::countr_zero(mask) * words + j / 64] |= bit;
                left[j / 64] |= bit;
                any = true;
            }
        }
        while (any) {
            int best = -1, most = 0;
            for (int node = 0; node < order.n_nodes; ++node) {
                int count = 0;
                for (std::int64_t w = 0; w < words; ++w) count += std::popcount(held[node * words + w] & left[w]);
                if (count > most || (count == most && count > 0 && ranks[node] < ranks[best])) best = node, most = count;
            }
            any = false;
            for (std::int64_t w = 0; w < words; ++w) {
                for (std::uint64_t mask = held[best * words + w] & left[w]; mask; mask &= mask - 1)
                    mine[w * 64 + std::countr_zero(mask)] = static_cast<std::int16_t>(best);
                left[w] &= ~held[best * words + w];
                any = any || left[w] != 0;
            }
        }
    }
}

}  // namespace hybridindex
