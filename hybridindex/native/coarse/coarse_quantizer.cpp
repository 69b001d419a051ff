#include "coarse/coarse_quantizer.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>
#include <utility>

#include "coarse/buckets.h"

namespace hybridindex {
namespace {

using Key = NearestLists::Key;

// Queries that pass over the centroids together: at most, at least, and in between as many as keep so many keys.
constexpr std::int64_t kMostTogether = 64, kLeastTogether = 4, kKeysTogether = 1 << 20;
// Floats between what is read and what is fetched, a block at least.
constexpr std::int64_t kFloatsAhead = 8 << 10;
// Of so many lists one is probed, or more: then all are sorted.
constexpr std::int64_t kSortedShare = 12;
// Room beyond twice the nearest.
constexpr std::size_t kSpare = 64;
// Centroids lie one behind the other, and are compared so many times as fast as the rows that work is counted in.
constexpr std::int64_t kFasterThanRows = 8;
// Rows between what is compared and what is fetched.
constexpr std::int64_t kRowsAhead = 8;
// More queries read the centroids together, as they are.
constexpr std::int64_t kRoundedQueries = 2;
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr std::uint32_t kSign = 0x80000000u;
// Of a list that is not found.
constexpr float kNone = std::numeric_limits<float>::quiet_NaN();
// So many keys are sorted one by one.
constexpr std::uint32_t kFew = 16;

// Pairs whose distances are computed at a time.
constexpr int kPairs = 64;
// Where more than one of so many pairs is left, the whole block is compared.
constexpr int kMostFound = 4;
// Fewer queries read the centroids as they are in the same time.
constexpr std::int64_t kFewestFiltered = 3;

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

AlignedBuffer<float> padded(const float* rows, std::int64_t n, std::int64_t dim, std::int64_t padded_dim) {
    AlignedBuffer<float> made;
    made.grow(round_up(n, kBlockRows) * padded_dim);
    for (std::int64_t row = 0; row < n; ++row)
        std::memcpy(made.data() + row * padded_dim, rows + row * dim, static_cast<std::size_t>(dim) * 4);
    return made;
}

}  // namespace

Key NearestLists::key_of(float distance, std::uint32_t list) {
    const std::int32_t bits = std::bit_cast<std::int32_t>(distance + 0.0f);  // -0 becomes 0
    // The sign inverted, and of what is negative all.
    const std::uint32_t ordered = static_cast<std::uint32_t>(bits) ^ (static_cast<std::uint32_t>(bits >> 31) | kSign);
    return static_cast<Key>(ordered) << 32 | list;
}

float NearestLists::distance_of(Key key) {
    const std::uint32_t ordered = static_cast<std::uint32_t>(key >> 32);
    return std::bit_cast<float>(ordered & kSign ? ordered ^ kSign : ~ordered);
}

void NearestLists::reset(float* distances, std::int64_t* lists, std::int64_t k) {
    distances_ = distances;
    lists_ = lists;
    k_ = static_cast<std::size_t>(k);
    held_ = 0;
    scratch_ = nullptr;
    limit_.store(kLargest, std::memory_order_relaxed);
}

void NearestLists::reset_to_all(float* distances, std::int64_t* lists, std::int64_t k, std::int64_t nlist, SortScratch& scratch) {
    reset(distances, lists, k);
    scratch_ = &scratch;
    some_ = nullptr;
    all_.assign(static_cast<std::size_t>(round_up(nlist, kBlockRows)), kNone);
}

float* NearestLists::reset_to_some(float* distances, std::int64_t* lists, std::int64_t k, const std::int32_t* some,
                                   std::int64_t n, SortScratch& scratch) {
    reset_to_all(distances, lists, k, n, scratch);
    some_ = some;
    return all_.data();
}

void NearestLists::push(float distance, std::int64_t list) {
    if (scratch_ != nullptr) {
        all_[static_cast<std::size_t>(list)] = distance;
        return;
    }
    if (held_ == keys_.size()) keys_.resize(std::max(kSpare, 2 * held_));
    keys_[held_++] = key_of(distance, static_cast<std::uint32_t>(list));
    if (k_ == 1) lower(distance);
    if (held_ >= 2 * k_ + kSpare) narrow();
}

void NearestLists::offer(const float* distances, std::int64_t first, std::uint32_t near) {
    if (scratch_ != nullptr) {
        float* const own = all_.data() + first;
        std::memcpy(own, distances, sizeof(float) * kBlockRows);
        for (std::uint32_t far = ~near & 0xffffu; far != 0; far &= far - 1) own[std::countr_zero(far)] = kNone;
        return;
    }
    for (; near != 0; near &= near - 1) {
        const int row = std::countr_zero(near);
        push(distances[row], first + row);
    }
}

std::size_t NearestLists::sort_all() const {
    const std::size_t n = all_.size();
    std::int32_t* const bucket = scratch_->buckets.data();
    std::uint32_t starts[Buckets::kCount + 1];
    Buckets(all_.data(), n).number(all_.data(), n, bucket, starts);
    std::uint32_t before = 0;
    int last = 0;  // the first bucket that is not wanted
    for (int b = 0; b <= Buckets::kCount; ++b) {
        if (b < Buckets::kCount && before < k_) last = b + 1;
        before += std::exchange(starts[b], before);
    }
    const std::size_t found = starts[last];
    Key* const keys = scratch_->keys.data();
    // All of them: no branch is foreseen.
    for (std::size_t i = 0; i < n; ++i)
        keys[starts[bucket[i]]++] = key_of(all_[i], static_cast<std::uint32_t>(some_ == nullptr ? i : some_[i]));
    std::uint32_t begin = 0;
    for (int b = 0; b < last; begin = starts[b++])
        if (starts[b] - begin > kFew) std::sort(keys + begin, keys + starts[b]);
    // What is left is near its place.
    for (std::size_t i = 1; i < found; ++i) {
        const Key key = keys[i];
        std::size_t at = i;
        for (; at > 0 && keys[at - 1] > key; --at) keys[at] = keys[at - 1];
        keys[at] = key;
    }
    return found;
}

void NearestLists::finish(bool negate) {
    const Key* sorted = keys_.data();
    if (scratch_ != nullptr) {
        held_ = sort_all();
        sorted = scratch_->keys.data();
    } else {
        if (held_ > k_) narrow();
        std::sort(keys_.begin(), keys_.begin() + static_cast<std::ptrdiff_t>(held_));
    }
    const std::size_t found = std::min(held_, k_);
    for (std::size_t i = 0; i < found; ++i) {
        lists_[i] = static_cast<std::int64_t>(sorted[i] & 0xffffffffu);
        const float distance = distance_of(sorted[i]);
        distances_[i] = negate ? 0.0f - distance : distance;
    }
    std::fill(lists_ + found, lists_ + k_, std::int64_t{-1});
    std::fill(distances_ + found, distances_ + k_, negate ? -kLargest : kLargest);
}

void NearestLists::narrow() {
    const auto last = keys_.begin() + static_cast<std::ptrdiff_t>(k_ - 1);
    std::nth_element(keys_.begin(), last, keys_.begin() + static_cast<std::ptrdiff_t>(held_));
    held_ = k_;
    lower(distance_of(*last));
}

Centroids::Centroids(const float* centroids, std::int64_t nlist, std::int64_t dim, bool inner_product,
                     const BlockKernels& kernels)
    : nlist_(nlist), dim_(dim), padded_dim_(round_up(dim, kDimStep)), extent_{nlist, nlist, 0},
      inner_product_(inner_product), kernels_(kernels), centroids_(padded(centroids, nlist, dim, padded_dim_)),
      bytes_(centroids_.data(), nlist, dim, padded_dim_, inner_product, kernels) {}

void Centroids::copy_query(const float* query, float* copy) const {
    const float sign = inner_product_ ? -1.0f : 1.0f;
    for (std::int64_t i = 0; i < dim_; ++i) copy[i] = sign * query[i];
    std::fill(copy + dim_, copy + padded_dim_, 0.0f);
}

bool Centroids::sorts_all(std::int64_t p) const { return p * kSortedShare >= nlist_; }

bool Centroids::filters(std::int64_t n, std::int64_t p) const {
    return !bytes_.empty() && n >= kFewestFiltered && p == 1;
}

std::int64_t Centroids::most_queries(std::int64_t p) const {
    const std::int64_t room = sorts_all(p) ? nlist_ : 2 * p + static_cast<std::int64_t>(kSpare);
    return std::clamp(kKeysTogether / room, kLeastTogether, kMostTogether);
}

void Centroids::Shared::prepare(const CoarseTask& task, const ScanPlan&, std::int64_t) {
    const std::int64_t dim = source_.dim_, padded_dim = source_.padded_dim_, nlist = source_.nlist_;
    const bool all = source_.sorts_all(task.k);
    queries_.grow(task.n * padded_dim);
    if (all) scratch_.grow(round_up(nlist, kBlockRows));
    heaps_.resize(std::max(heaps_.size(), static_cast<std::size_t>(task.n)));
    for (std::int64_t q = 0; q < task.n; ++q) {
        source_.copy_query(task.queries + q * dim, queries_.data() + q * padded_dim);
        NearestLists& own = heap(static_cast<std::int32_t>(q));
        float* const distances = task.distances + q * task.k;
        std::int64_t* const lists = task.ids + q * task.k;
        if (all)
            own.reset_to_all(distances, lists, task.k, nlist, scratch_);
        else
            own.reset(distances, lists, task.k);
    }
    const CentroidBytes& bytes = source_.bytes_;
    filters_.clear();
    if (!source_.filters(task.n, task.k)) return;
    weights_.grow(dim), filtered_.grow(task.n * bytes.row_bytes());
    for (std::int32_t q = 0; q < task.n; ++q)
        filters_.push_back(bytes.query(query(q), weights_.data(), filtered_.data() + q * bytes.row_bytes()));
}

void Centroids::Rows::make_room(const Shared& shared, std::int64_t widest) {
    distances.grow(widest * kBlockRows);
    queries.resize(static_cast<std::size_t>(widest));
    filter = shared.filters_.empty() ? nullptr : &shared.source_.kernels_;
    if (filter == nullptr) return;
    packed.grow(shared.source_.bytes_.packed_bytes(widest));
    for (AlignedBuffer<float>* limits : {&base, &square, &length}) limits->grow(round_up(widest, kBlockRows));
    found.grow(widest * kBlockRows);
}

void Centroids::Shared::let_go() {
    std::size_t kept = 0;
    for (const NearestLists& heap : heaps_) kept += heap.kept_bytes();
    if (kept > kMostKept) heaps_ = std::vector<NearestLists>();
    queries_.let_go(kMostKept);
    filtered_.let_go(kMostKept);
    scratch_.let_go(kMostKept);
}

std::int64_t Centroids::plan(const CoarseTask& task, int threads, ScanPlan& plan) const {
    plan.probed.lists.assign(1, 0);
    plan.probed.starts = {0, task.n};
    plan.probed.members.resize(static_cast<std::size_t>(task.n));
    std::iota(plan.probed.members.begin(), plan.probed.members.end(), 0);
    // Where all are sorted every distance would be put aside and taken in: help takes as long as it saves.
    const bool alone = sorts_all(task.k);
    const std::int64_t work = make_items(plan.probed, {extent_, padded_dim_ * 4, padded_dim_}, task.n, alone ? 1 : threads,
                                         false, plan.items, plan.left);
    return alone ? 0 : work / kFasterThanRows;
}

bool Centroids::scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
                     std::int64_t first, int n, NearestLists* apart, const Stopped& stopped) const {
    const std::int32_t* const members = plan.probed.members.data() + first;
    const std::int64_t block_floats = kBlockRows * padded_dim_;
    const std::int64_t ahead = (kFloatsAhead + block_floats - 1) / block_floats * kBlockRows;
    const std::int64_t end = item.first + item.count, later = following == nullptr ? nlist_ : following->first;
    for (int m = 0; m < n; ++m) rows.queries[static_cast<std::size_t>(m)] = shared.query(members[m]);
    if (rows.filter != nullptr) pack(rows, shared, members, n, apart);
    for (std::int64_t row = item.first; row < end; row += kBlockRows) {
        if (stopped()) return false;
        if (rows.filter != nullptr && compare_found(rows, shared, members, n, apart, row)) continue;
        compare(rows, shared, members, n, apart, row, row + ahead < end ? row + ahead : later + (row + ahead - end));
        if (rows.filter != nullptr) renew_limits(rows, shared, members, n, apart);
    }
    return true;
}

void Centroids::compare(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart, std::int64_t row,
                        std::int64_t next) const {
    (inner_product_ ? kernels_.inner_products : kernels_.squared_l2)(
        centroids_.data() + row * padded_dim_, padded_dim_, rows.queries.data(), n, padded_dim_, rows.distances.data(),
        next < nlist_ ? centroids_.data() + next * padded_dim_ : nullptr, nullptr);
    const std::uint32_t there = nlist_ - row >= kBlockRows ? 0xffffu : (1u << (nlist_ - row)) - 1u;
    for (int m = 0; m < n; ++m) {
        const float* const found = rows.distances.data() + m * kBlockRows;
        NearestLists& nearest = apart == nullptr ? shared.heap(members[m]) : apart[m];
        nearest.offer(found, row, kernels_.at_most(found, limit_of(shared.heap(members[m]), nearest)) & there);
    }
}

// The queries of a group, for the filter.
void Centroids::pack(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart) const {
    const std::int8_t* whole[kGroup];
    for (int m = 0; m < n; ++m) {
        const QueryBound& bound = shared.filters_[static_cast<std::size_t>(members[m])].bound;
        whole[m] = shared.filtered_.data() + members[m] * bytes_.row_bytes();
        rows.square[m] = static_cast<float>(bound.square / bound.step);
        rows.length[m] = static_cast<float>(bound.length / bound.step);
    }
    bytes_.pack(whole, n, rows.packed.data());
    renew_limits(rows, shared, members, n, apart);
}

void Centroids::renew_limits(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart) const {
    for (int m = 0; m < n; ++m) {
        const NearestLists& own = shared.heap(members[m]);
        rows.base[m] = bytes_.base(shared.filters_[static_cast<std::size_t>(members[m])],
                                   limit_of(own, apart == nullptr ? own : apart[m]));
    }
}

bool Centroids::compare_found(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart,
                              std::int64_t row) const {
    const int n_found = bytes_.near(row, rows.packed.data(), n, {rows.base.data(), rows.square.data(), rows.length.data()},
                                    rows.found.data(), row + kBlockRows);
    if (n_found * kMostFound > n * kBlockRows) return false;
    const auto distances_of = inner_product_ ? kernels_.inner_product_pairs : kernels_.squared_l2_pairs;
    for (int f = 0; f < n_found;) {
        const float *pair_rows[kPairs], *pair_queries[kPairs];
        float distances[kPairs];
        int places[kPairs], of[kPairs], count = 0;
        for (; f < n_found && count < kPairs; ++f) {
            const int m = static_cast<int>(rows.found[f] >> 4), r = static_cast<int>(rows.found[f] & 15u);
            if (row + r >= nlist_) continue;
            pair_rows[count] = centroids_.data() + (row + r) * padded_dim_;
            pair_queries[count] = rows.queries[static_cast<std::size_t>(m)];
            places[count] = r, of[count++] = m;
        }
        distances_of(pair_rows, pair_queries, count, padded_dim_, distances, nullptr);
        for (int i = 0; i < count; ++i) {
            const NearestLists& own = shared.heap(members[of[i]]);
            NearestLists& nearest = apart == nullptr ? shared.heap(members[of[i]]) : apart[of[i]];
            const float limit = limit_of(own, nearest);
            if (!(distances[i] <= limit)) continue;
            nearest.push(distances[i], row + places[i]);
            if (nearest.limit() < limit)
                rows.base[of[i]] =
                    bytes_.base(shared.filters_[static_cast<std::size_t>(members[of[i]])], nearest.limit());
        }
    }
    return true;
}

struct CoarseQuantizer::Alone {
    NearLists near;
    NearestLists nearest;
    NearestLists::SortScratch scratch;
    AlignedBuffer<float> query;
};

// Of one process: in a child locks may be held, and helpers inside, that nobody gives back.
struct CoarseQuantizer::Calls {
    explicit Calls(const Centroids& centroids) : jobs(centroids) {}

    const pid_t pid = getpid();
    ScanJobs<Centroids> jobs;
};

CoarseQuantizer::CoarseQuantizer(const float* centroids, std::int64_t nlist, std::int64_t dim, bool inner_product,
                                 const BlockKernels& kernels)
    : centroids_(centroids, nlist, dim, inner_product, kernels),
      rounded_(centroids_.rows(), nlist, dim, centroids_.padded_dim(), inner_product, kernels),
      bounds_(centroids_.rows(), nlist, dim, centroids_.padded_dim(), inner_product) {}

CoarseQuantizer::~CoarseQuantizer() {
    delete idle_.load(std::memory_order_acquire);
    Calls* const calls = calls_.load(std::memory_order_acquire);
    if (calls != nullptr && calls->pid == getpid()) delete calls;
}

ScanJobs<Centroids>& CoarseQuantizer::jobs() {
    Calls* calls = calls_.load(std::memory_order_acquire);
    if (calls != nullptr && calls->pid == getpid()) return calls->jobs;
    auto made = std::make_unique<Calls>(centroids_);
    // What another thread has made meanwhile is as good; what is left belongs to the parent.
    if (calls_.compare_exchange_strong(calls, made.get(), std::memory_order_acq_rel)) return made.release()->jobs;
    return calls->jobs;
}

bool CoarseQuantizer::quantize_rounded(const float* query, std::int64_t p, std::int64_t* lists, float* distances) {
    std::unique_ptr<Alone> mine = take_alone();
    const bool found = rounded_.find_near(query, p, mine->near);
    if (found) {
        mine->query.grow(centroids_.padded_dim());
        centroids_.nearest_of(query, mine->near, p, lists, distances, mine->query.data(), mine->scratch, mine->nearest);
    }
    give_back(std::move(mine));
    return found;
}

std::unique_ptr<CoarseQuantizer::Alone> CoarseQuantizer::take_alone() {
    std::unique_ptr<Alone> mine(idle_.exchange(nullptr, std::memory_order_acq_rel));
    return mine != nullptr ? std::move(mine) : std::make_unique<Alone>();
}

void CoarseQuantizer::give_back(std::unique_ptr<Alone> mine) {
    delete idle_.exchange(mine.release(), std::memory_order_acq_rel);
}

void CoarseQuantizer::nearest_of(const float* queries, std::int64_t n, std::int64_t p, const std::int32_t* candidates,
                                 std::int64_t m, const float* farthest, std::int64_t* lists, float* distances, bool* settled) {
    std::unique_ptr<Alone> mine = take_alone();
    mine->query.grow(centroids_.padded_dim());
    NearLists& near = mine->near;
    const std::int64_t whole = round_up(m, kBlockRows);  // as many are read
    near.lists.grow(whole);
    std::fill(near.lists.data() + m, near.lists.data() + whole, 0);
    near.count = m;
    for (std::int64_t q = 0; q < n; ++q, queries += centroids_.dim(), candidates += m, lists += p, distances += p) {
        std::int32_t* const chosen = near.lists.data();
        std::copy_n(candidates, m, chosen);
        std::sort(chosen, chosen + m);
        // A device that fails may give anything.
        settled[q] = chosen[0] >= 0 && chosen[m - 1] < centroids_.nlist() && std::adjacent_find(chosen, chosen + m) == chosen + m;
        if (!settled[q]) continue;
        centroids_.nearest_of(queries, near, p, lists, distances, mine->query.data(), mine->scratch, mine->nearest);
        settled[q] = lists[p - 1] >= 0 && centroids_.is_nearer(distances[p - 1], bounds_.least_distance(queries, farthest[q]));
    }
    give_back(std::move(mine));
}

void Centroids::nearest_of(const float* query, const NearLists& near, std::int64_t p, std::int64_t* lists, float* distances,
                           float* copy, NearestLists::SortScratch& scratch, NearestLists& nearest) const {
    copy_query(query, copy);
    const std::int64_t count = near.count;
    scratch.grow(round_up(count, kBlockRows));
    float* const found = nearest.reset_to_some(distances, lists, p, near.lists.data(), count, scratch);
    const auto distances_of = inner_product_ ? kernels_.inner_product_pairs : kernels_.squared_l2_pairs;
    const float* queries[kBlockRows];
    std::fill(queries, queries + kBlockRows, copy);
    const auto row = [&](std::int64_t i) { return rows() + near.lists.data()[std::min(i, count - 1)] * padded_dim_; };
    for (std::int64_t first = 0; first < count; first += kBlockRows) {
        const float *here[kBlockRows], *ahead[kBlockRows];
        for (int i = 0; i < kBlockRows; ++i) here[i] = row(first + i), ahead[i] = row(first + kRowsAhead + i);
        const int n = static_cast<int>(std::min<std::int64_t>(kBlockRows, count - first));
        distances_of(here, queries, n, padded_dim_, found + first, ahead);
    }
    finish(nearest);
}

void CoarseQuantizer::quantize(const float* queries, std::int64_t n, std::int64_t p, std::int64_t* lists,
                               float* distances, ThreadPool& pool) {
    const std::int64_t dim = centroids_.dim();
    if (n <= kRoundedQueries && rounded_.pays(p)) {
        while (n > 0 && quantize_rounded(queries, p, lists, distances)) --n, queries += dim, lists += p, distances += p;
    }
    if (n == 0) return;
    ScanJobs<Centroids>& runs = jobs();
    const std::int64_t step = centroids_.most_queries(p);
    for (std::int64_t first = 0; first < n; first += step)
        runs.run({.queries = queries + first * dim,
                   .n = std::min(step, n - first),
                   .k = p,
                   .distances = distances + first * p,
                   .ids = lists + first * p,
                   .on_done = {}},
                  pool);
}

template class ScanJob<Centroids>;
template class ScanJobs<Centroids>;

}  // namespace hybridindex
