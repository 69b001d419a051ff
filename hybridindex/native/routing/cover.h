// Which nodes of a cluster a query asks for the lists that are not here: as few as a greedy cover finds.
#pragma once
#include <cstdint>

namespace hybridindex {

// The probes of a batch, list ids (n, p), -1 = skip; and of each of nlist lists whether it is scanned here, and the
// nodes that hold it, a bit a node.
struct HeldProbes {
    const std::int64_t* lists;
    std::int64_t n, p;
    const bool* here;
    const std::uint64_t* holders;
    std::int64_t nlist;
};

// Whom to ask among the nodes of a mask that hold equally many lists of a query: whoever has the least to do, in queries
// (n_nodes); of those, whose place at the query's turn is least (n_turns, n_nodes).
struct NodeOrder {
    std::uint64_t usable;
    int n_nodes;
    const double* to_do;  // null: all the same
    const std::int64_t* places;
    std::int64_t n_turns, first_turn;
};

// Writes (n, p): -1 = here, or no probe; j = node j; -2 = no usable node has the list. Throws std::out_of_range for a
// probe outside [-1, nlist).
void cover_probes(const HeldProbes& probes, const NodeOrder& order, std::int16_t* found);

}  // namespace hybridindex
