#include "pq/queries.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace hybridindex {
namespace {

// Entries beyond it leave no digits for the bound.
constexpr double kMostEntries = 1e30;

}  // namespace

void PqQueries::prepare(const float* queries, std::int64_t n) {
    queries_.grow(n * form_.dim);
    tables_.grow(n * form_.entries());
    bytes_.grow(n * form_.tables() * form_.words());
    bounds_.resize(static_cast<std::size_t>(n));
    std::copy(queries, queries + n * form_.dim, queries_.data());
    for (std::int64_t q = 0; q < n; ++q) {
        float* const table = tables_.data() + q * form_.entries();
        kernels_.table(form_, queries + q * form_.dim, table);
        bounds_[static_cast<std::size_t>(q)] = kernels_.round(form_, table, bytes_.data() + q * form_.tables() * form_.words());
    }
}

void PqQueries::let_go(std::size_t most) {
    if (bounds_.capacity() * static_cast<std::size_t>(bytes_each(form_)) <= most) return;
    queries_ = {}, tables_ = {}, bytes_ = {};
    bounds_ = std::vector<PqBound>();
}

void PqGroup::start(const PqQueries& queries, const std::int32_t* members, int n, const float* centroid) {
    queries_ = &queries, n_ = n;
    const PqForm& form = queries.form();
    for (int m = 0; m < n; ++m) {
        Member& member = members_[static_cast<std::size_t>(m)];
        member.query = members[m];
        bytes_[static_cast<std::size_t>(m)] = queries.bytes(members[m]);
        member.base = queries.kernels().base(form, queries.query(members[m]), centroid);
        // Twice what rounding may change of a distance, and of a byte.
        const PqBound& bound = queries.bound(members[m]);
        const double size = bound.most + std::fabs(member.base);
        const double rounding = (static_cast<double>(form.parts) / 8 + 16) * 0x1p-21;
        member.slack = size < kMostEntries ? size * rounding - bound.low - member.base : std::numeric_limits<double>::infinity();
    }
}

void PqGroup::renew(int m) {
    Member& member = members_[static_cast<std::size_t>(m)];
    member.limit = member.limit_now();
    const double room = member.limit + std::fabs(static_cast<double>(member.limit)) * 0x1p-22 + member.slack;
    member.room = room < std::numeric_limits<float>::max() ? std::nextafter(static_cast<float>(room), HUGE_VALF) : HUGE_VALF;
    if (queries_->form().has_terms()) return;
    const float step = queries_->bound(member.query).step;
    const double most = step > 0 ? static_cast<double>(member.room) / step : 65535.0;
    most_[static_cast<std::size_t>(m)] = static_cast<std::uint16_t>(most < 65535.0 ? std::max(most, 0.0) : 65535.0);
}

void PqGroup::find_near(const PqBlock& block) {
    const PqKernels& kernels = queries_->kernels();
    const bool with_terms = queries_->form().has_terms();
    if (!with_terms) kernels.at_most(sums_.data(), n_, most_.data(), near_.data());
    for (int m = 0; m < n_; ++m) {
        const Member& member = members_[static_cast<std::size_t>(m)];
        std::uint32_t& near = near_[static_cast<std::size_t>(m)];
        if (member.room == HUGE_VALF)
            near = block.wanted;
        else if (with_terms)
            near = block.wanted & kernels.at_most_with(sums_.data() + m * kPqRows, block.terms,
                                                       queries_->bound(member.query).step, member.room);
        else
            near = member.room >= 0 ? near & block.wanted : 0;
    }
}

void PqGroup::push_near(int m, const PqBlock& block) {
    const PqForm& form = queries_->form();
    const PqKernels& kernels = queries_->kernels();
    const Member& member = members_[static_cast<std::size_t>(m)];
    const float* const table = queries_->table(member.query);
    std::uint32_t near = near_[static_cast<std::size_t>(m)];
    float sums[kPqRows];
    if (form.bits == 4) kernels.sums_in_block(block.codes, near, form.parts, table, sums);
    for (; near != 0; near &= near - 1) {
        const int row = std::countr_zero(near);
        const float sum = form.bits == 4 ? sums[row] : kernels.sum_of_row(block.codes + row * block.stride, form.parts, table);
        const float all = (form.has_terms() ? member.base + block.terms[row] : member.base) + sum;
        const float found = form.l2 && all < 0 ? 0.0f : all;
        if (found <= member.limit_now()) member.heap->push(found, block.ids[row]);
    }
    if (member.limit_now() != member.limit) renew(m);
}

void PqGroup::compare(const PqBlock& block) {
    if (block.wanted == 0) return;
    const PqForm& form = queries_->form();
    const PqKernels& kernels = queries_->kernels();
    if (form.bits == 4)
        kernels.sums_of_block(block.codes, form.tables() / 2, bytes_.data(), n_, sums_.data(), block.ahead);
    else
        for (int m = 0; m < n_; ++m)
            kernels.sums_of_rows(block.codes, block.stride, block.rows, form.parts, bytes_[static_cast<std::size_t>(m)],
                                 sums_.data() + m * kPqRows);
    find_near(block);
    for (int m = 0; m < n_; ++m)
        if (near_[static_cast<std::size_t>(m)] != 0) push_near(m, block);
}

}  // namespace hybridindex
