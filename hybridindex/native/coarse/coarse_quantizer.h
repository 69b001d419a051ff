// Coarse quantization with a flat quantizer: the lists whose centroids are nearest to a query.
//
// A distance is summed in one order, which the kernels set; equal distances are ordered by list. What a query gets
// depends neither on the queries beside it nor on how many they are, nor on who helps.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include "coarse/centroid_bytes.h"
#include "coarse/device_bounds.h"
#include "coarse/rounded_centroids.h"
#include "jobs/scan_job.h"
#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

namespace hybridindex {

// Its k is the number of lists, its ids are lists.
using CoarseTask = AnswerTask;

// The nearest lists of one query, or of a stretch of the centroids. One thread changes it.
class NearestLists {
public:
    // A distance and a list as one number: the nearer is the smaller; equal distances are ordered by list.
    using Key = std::uint64_t;
    static constexpr bool kInArrays = false;

    NearestLists() = default;
    NearestLists(NearestLists&& other) noexcept
        : keys_(std::move(other.keys_)), all_(std::move(other.all_)), some_(other.some_), scratch_(other.scratch_), held_(other.held_),
          k_(other.k_), distances_(other.distances_), lists_(other.lists_) {}

    // Of one sort at a time.
    struct SortScratch {
        AlignedBuffer<Key> keys;
        AlignedBuffer<std::int32_t> buckets;

        void grow(std::int64_t nlist) { keys.grow(nlist), buckets.grow(nlist); }
        void let_go(std::size_t most) { keys.let_go(most), buckets.let_go(most); }
    };

    // The k nearest of what comes: they are selected whenever twice as many and more are there.
    void reset(float* distances, std::int64_t* lists, std::int64_t k);
    // All of nlist: each has its place, and the nearest are sorted in the end; `scratch` has room for as many.
    void reset_to_all(float* distances, std::int64_t* lists, std::int64_t k, std::int64_t nlist, SortScratch& scratch);

    // Of n lists alone, ascending, which stay where they are. Returns where their distances go, all of them numbers.
    float* reset_to_some(float* distances, std::int64_t* lists, std::int64_t k, const std::int32_t* some, std::int64_t n,
                         SortScratch& scratch);

    // Nothing farther is kept. Any thread may read it.
    float limit() const { return limit_.load(std::memory_order_relaxed); }
    void lower(float limit) {
        if (scratch_ == nullptr && limit < this->limit()) limit_.store(limit, std::memory_order_relaxed);
    }
    void push(float distance, std::int64_t list);
    // Distances of the block of lists from `first`; `near` are those that a limit left.
    void offer(const float* distances, std::int64_t first, std::uint32_t near);

    // (distance, list) of what it holds, in no order.
    template <typename Visit>
    void each(const Visit& visit) {
        if (held_ > k_) narrow();
        for (std::size_t i = 0; i < held_; ++i)
            visit(distance_of(keys_[i]), static_cast<std::int64_t>(keys_[i] & 0xffffffffu));
    }
    // Writes the answer, nearest first, negated where `negate`.
    void finish(bool negate);
    std::size_t kept_bytes() const { return keys_.capacity() * sizeof(Key) + all_.capacity() * sizeof(float); }

private:
    static Key key_of(float distance, std::uint32_t list);
    static float distance_of(Key key);
    // To the k nearest so far; no other can be among them any more.
    void narrow();

    // The nearest of `all_`, and a few more, nearest first, into the keys of the scratch. Returns how many.
    std::size_t sort_all() const;

    std::vector<Key> keys_;
    std::vector<float> all_;  // by list, in whole blocks; no number: not found
    const std::int32_t* some_ = nullptr;
    SortScratch* scratch_ = nullptr;  // nullptr: the nearest alone are kept
    std::size_t held_ = 0, k_ = 0;
    float* distances_ = nullptr;
    std::int64_t* lists_ = nullptr;
    std::atomic<float> limit_{std::numeric_limits<float>::max()};
};

// Centroids as what a ScanJob scans: one list that all queries probe.
class Centroids {
public:
    using Task = CoarseTask;
    using Heap = NearestLists;
    class Shared {
    public:
        explicit Shared(const Centroids& source) : source_(source) {}
        void prepare(const CoarseTask& task, const ScanPlan& plan, std::int64_t widest);
        NearestLists& heap(std::int32_t query) { return heaps_[static_cast<std::size_t>(query)]; }
        const float* query(std::int32_t i) const { return queries_.data() + i * source_.padded_dim_; }
        void let_go();

    private:
        friend class Centroids;

        const Centroids& source_;
        AlignedBuffer<float> queries_, weights_;
        // Empty where centroids are compared as they are.
        std::vector<CentroidBytes::Query> filters_;
        AlignedBuffer<std::int8_t> filtered_;
        NearestLists::SortScratch scratch_;
        std::vector<NearestLists> heaps_;
    };
    struct Rows {
        AlignedBuffer<float> distances;
        std::vector<const float*> queries;
        // Of the filter, where there is one.
        const BlockKernels* filter = nullptr;
        AlignedBuffer<std::int8_t> packed;
        AlignedBuffer<float> base, square, length;
        AlignedBuffer<std::uint32_t> found;

        void make_room(const Shared& shared, std::int64_t widest);
        void begin() const {
            if (filter != nullptr) filter->begin();
        }
        void end() const {
            if (filter != nullptr) filter->end();
        }
    };

    Centroids(const float* centroids, std::int64_t nlist, std::int64_t dim, bool inner_product, const BlockKernels& kernels);

    const BlockKernels& kernels() const { return kernels_; }
    std::int64_t nlist() const { return nlist_; }
    std::int64_t dim() const { return dim_; }
    std::int64_t padded_dim() const { return padded_dim_; }
    const float* rows() const { return centroids_.data(); }
    // The p nearest of these lists alone; `copy` has room for padded_dim() numbers.
    void nearest_of(const float* query, const NearLists& near, std::int64_t p, std::int64_t* lists, float* distances,
                    float* copy, NearestLists::SortScratch& scratch, NearestLists& nearest) const;
    // Whether a distance, as it is answered, is below one of which smaller is nearer.
    bool is_nearer(float distance, double other) const { return (inner_product_ ? -distance : distance) < other; }
    // Queries of one task: bounds the memory for keys.
    std::int64_t most_queries(std::int64_t p) const;

    std::int64_t plan(const CoarseTask& task, int threads, ScanPlan& plan) const;
    bool scan(Rows& rows, Shared& shared, const ScanPlan& plan, const ScanItem& item, const ScanItem* following,
              std::int64_t first, int n, NearestLists* apart, const Stopped& stopped) const;
    void finish(NearestLists& heap) const { heap.finish(inner_product_); }

private:
    // As the kernels want it.
    void copy_query(const float* query, float* copy) const;
    // Whether so many lists are probed that sorting all is faster than selecting.
    bool sorts_all(std::int64_t p) const;
    // Whether the filter is asked before queries are compared: where each wants its nearest list alone. The limits of more are
    // not known until a good part has been compared.
    bool filters(std::int64_t n, std::int64_t p) const;
    // Nothing farther can be among the nearest of a query.
    static float limit_of(const NearestLists& shared, const NearestLists& own) { return std::min(shared.limit(), own.limit()); }
    // The block from `row`, all of it; or only pairs that the filter leaves: false, it leaves too many, and nothing is done.
    void compare(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart, std::int64_t row,
                 std::int64_t next) const;
    void pack(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart) const;
    void renew_limits(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart) const;
    bool compare_found(Rows& rows, Shared& shared, const std::int32_t* members, int n, NearestLists* apart,
                       std::int64_t row) const;

    const std::int64_t nlist_, dim_, padded_dim_;
    const std::int64_t extent_[3];
    const bool inner_product_;
    const BlockKernels& kernels_;
    const AlignedBuffer<float> centroids_;  // padded to whole blocks and steps
    const CentroidBytes bytes_;
};

extern template class ScanJob<Centroids>;
extern template class ScanJobs<Centroids>;

// Safe to use from several threads at once.
class CoarseQuantizer {
public:
    // Copies the centroids, (nlist, dim).
    CoarseQuantizer(const float* centroids, std::int64_t nlist, std::int64_t dim, bool inner_product,
                    const BlockKernels& kernels);
    ~CoarseQuantizer();

    const BlockKernels& kernels() const { return centroids_.kernels(); }
    std::int64_t nlist() const { return centroids_.nlist(); }
    std::int64_t dim() const { return centroids_.dim(); }

    // Of n queries the p nearest lists each, nearest first, with inner products or squared distances; p is 1 to nlist.
    // A centroid whose distance is no number is never found: the rest is -1, as far away as can be.
    void quantize(const float* queries, std::int64_t n, std::int64_t p, std::int64_t* lists, float* distances,
                  ThreadPool& pool);

    // The same of m candidates of each query, which a device chose; `farthest`: see DeviceBounds. Says of each query whether
    // no other list can be among its nearest; where one can, what is written is not its answer.
    void nearest_of(const float* queries, std::int64_t n, std::int64_t p, const std::int32_t* candidates, std::int64_t m,
                    const float* farthest, std::int64_t* lists, float* distances, bool* settled);

private:
    struct Alone;
    struct Calls;
    ScanJobs<Centroids>& jobs();
    // The memory of one query's search: of the call before, or new.
    std::unique_ptr<Alone> take_alone();
    void give_back(std::unique_ptr<Alone> mine);
    // Of one query; false: not to be found that way.
    bool quantize_rounded(const float* query, std::int64_t p, std::int64_t* lists, float* distances);

    const Centroids centroids_;
    std::atomic<Calls*> calls_{nullptr};
    const RoundedCentroids rounded_;
    const DeviceBounds bounds_;
    std::atomic<Alone*> idle_{nullptr};  // of the call before; one at the same time brings its own
};

}  // namespace hybridindex
