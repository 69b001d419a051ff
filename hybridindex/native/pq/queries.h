// Queries as the scan of product-quantized rows reads them, and those of one list as they are compared with its rows.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "jobs/scan_items.h"
#include "pq/form.h"
#include "pq/kernels.h"
#include "scan/query_heap.h"
#include "simd/aligned_buffer.h"

namespace hybridindex {

class PqQueries {
public:
    PqQueries(const PqForm& form, const PqKernels& kernels) : form_(form), kernels_(kernels) {}
    void prepare(const float* queries, std::int64_t n);
    // Their memory goes where it is more than `most` bytes.
    void let_go(std::size_t most);

    const PqForm& form() const { return form_; }
    const PqKernels& kernels() const { return kernels_; }
    const float* query(std::int32_t q) const { return queries_.data() + q * form_.dim; }
    const float* table(std::int32_t q) const { return tables_.data() + q * form_.entries(); }
    const std::uint8_t* bytes(std::int32_t q) const { return bytes_.data() + q * form_.tables() * form_.words(); }
    const PqBound& bound(std::int32_t q) const { return bounds_[static_cast<std::size_t>(q)]; }
    // Memory of one.
    static std::int64_t bytes_each(const PqForm& form) {
        return 4 * (form.dim + form.entries()) + form.tables() * form.words() + static_cast<std::int64_t>(sizeof(PqBound));
    }

private:
    const PqForm form_;
    const PqKernels& kernels_;
    AlignedBuffer<float> queries_, tables_;
    AlignedBuffer<std::uint8_t> bytes_;
    std::vector<PqBound> bounds_;
};

// Up to 32 rows that lie together: 8-bit numbers row by row, `stride` bytes apart, or a block of four-bit ones.
struct PqBlock {
    const std::uint8_t* codes;
    std::int64_t stride;
    const float* terms;  // 32 of them, where rows have some
    int rows;
    std::uint32_t wanted;     // bits of rows that count
    const std::int64_t* ids;  // of the rows
    const std::uint8_t* ahead = nullptr;  // what will be read later
};

// One thread's. All distances come about here.
//
// Sums of bytes rule rows out; of what they leave, the distance is computed.
class PqGroup {
public:
    void make_room(std::int64_t widest) {
        sums_.grow(widest * kPqRows);
        if (members_.size() < static_cast<std::size_t>(widest)) members_.resize(static_cast<std::size_t>(widest));
        bytes_.resize(members_.size()), most_.resize(members_.size()), near_.resize(members_.size());
    }
    // Members of the prepared queries; `centroid` is the list's, where rows are residuals.
    void start(const PqQueries& queries, const std::int32_t* members, int n, const float* centroid);
    // What the m-th finds goes into `heap`, as far as `limiting`'s limit lets it, too.
    void find_into(int m, QueryHeap& heap, const QueryHeap& limiting) {
        Member& member = members_[static_cast<std::size_t>(m)];
        member.heap = &heap, member.limiting = &limiting;
        renew(m);
    }
    void compare(const PqBlock& block);

    // Memory of one member.
    static constexpr std::int64_t bytes_each() { return kPqRows * 2 + static_cast<std::int64_t>(sizeof(Member)) + 14; }

private:
    struct Member {
        std::int32_t query;
        float base;
        float limit;  // as it was when `room` came about
        // What the bound leaves for sums of bytes times their step, with the row's term.
        float room;
        double slack;  // room - limit
        QueryHeap* heap;
        const QueryHeap* limiting;

        float limit_now() const { return std::min(heap->limit(), limiting->limit()); }
    };
    void renew(int m);
    // Rows that the bounds do not rule out, of each member.
    void find_near(const PqBlock& block);
    void push_near(int m, const PqBlock& block);

    const PqQueries* queries_ = nullptr;
    int n_ = 0;
    AlignedBuffer<std::uint16_t> sums_;
    std::vector<const std::uint8_t*> bytes_;
    std::vector<Member> members_;
    std::vector<std::uint16_t> most_;  // of a member's sums of bytes, where rows have no terms
    std::vector<std::uint32_t> near_;
};

}  // namespace hybridindex
