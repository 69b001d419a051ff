#include "scan/row_scan.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace hybridindex {
namespace {

// Products of more bytes than this, 255 * 127 each, do not fit 32 bits.
constexpr std::int64_t kMostBytes = 1 << 16;
// Blocks that are compared exactly after one of which a third passed the filter: so many at first, twice as many each
// time in a row, up to the second number.
constexpr int kFewestExactBlocks = 8, kMostExactBlocks = 4096;
// Pairs whose exact distances are computed at a time.
constexpr int kPairs = 64;

std::int64_t round_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

// -- What threads share

RowQueries::RowQueries(const RowCodes& codes, bool residual, bool inner_product, const BlockKernels& kernels)
    : codes_(codes), inner_product_(inner_product), kernels_(kernels), dim_(round_up(codes.dim, kDimStep)),
      bytes_(codes.code == Code::u8 && !residual && codes.dim <= kMostBytes),
      halves_(!bytes_ && kernels.filter_halves != nullptr),
      row_bytes_(round_up(bytes_ ? codes.dim : 2 * dim_, kFilterStep)),
      direct_(codes.code == Code::f32 && !residual && codes.dim == dim_) {}

void RowQueries::prepare(const float* queries, std::int64_t n, std::int64_t k, std::int64_t widest, float* distances,
                         std::int64_t* ids) {
    copy(queries, n);
    if (may_filter(widest)) bound(n);
    heaps_.resize(static_cast<std::size_t>(n));
    for (std::int64_t q = 0; q < n; ++q) heap(static_cast<std::int32_t>(q)).reset(distances + q * k, ids + q * k, k);
}

void RowQueries::copy(const float* queries, std::int64_t n) {
    queries_.grow(n * dim_);
    const float sign = inner_product_ ? -1.0f : 1.0f;
    for (std::int64_t q = 0; q < n; ++q) {
        float* copy = queries_.data() + q * dim_;
        for (std::int64_t i = 0; i < codes_.dim; ++i) copy[i] = sign * queries[q * codes_.dim + i];
        std::fill(copy + codes_.dim, copy + dim_, 0.0f);
    }
}

void RowQueries::bound(std::int64_t n) {
    filtered_.grow(n * row_bytes_);
    bounds_.resize(static_cast<std::size_t>(n));
    std::vector<float> weights(static_cast<std::size_t>(codes_.dim));
    const std::int64_t used = bytes_ ? codes_.dim : 2 * dim_;
    for (std::int32_t q = 0; q < n; ++q) {
        bounds_[static_cast<std::size_t>(q)] =
            bytes_ ? bound_of_bytes(query(q), codes_.scale, codes_.offset, codes_.dim, inner_product_, kernels_,
                                    weights.data(), filtered(q))
                   : bound_of_halves(query(q), dim_, inner_product_, kernels_, reinterpret_cast<std::uint16_t*>(filtered(q)));
        std::memset(filtered(q) + used, 0, static_cast<std::size_t>(row_bytes_ - used));
    }
}

RowQueries::Need RowQueries::need(std::int64_t k) const {
    constexpr std::int64_t kFloat = sizeof(float), kPlace = sizeof(float) + sizeof(std::int64_t);
    Need need{kBlockRows * dim_ * kFloat,
              dim_ * kFloat + static_cast<std::int64_t>(sizeof(QueryHeap)) + k * kPlace + kBlockRows * kFloat};
    if (bytes_ || halves_) {
        // A block of rows and 16 more queries, as these are packed in sixteens.
        need.fixed += 2 * kBlockRows * row_bytes_ + codes_.dim * kFloat + 3 * kBlockRows * kFloat;
        need.per_query += 2 * row_bytes_ + static_cast<std::int64_t>(sizeof(QueryBound)) + 3 * kFloat +
                          kBlockRows * static_cast<std::int64_t>(sizeof(std::uint32_t));
    }
    return need;
}

// -- One thread

void RowScan::make_room(RowQueries& queries, std::int64_t widest) {
    shared_ = &queries;
    filters_ = queries.may_filter(widest);
    exact_left_ = 0, exact_run_ = kFewestExactBlocks;
    rows_.grow(kBlockRows * queries.dim_);
    distances_.grow(widest * kBlockRows);
    if (!filters_) return;
    codes_.grow(kBlockRows * queries.row_bytes_);
    packed_.grow(queries.kernels_.packed_bytes(static_cast<int>(widest), queries.row_bytes_));
    for (AlignedBuffer<float>* limits : {&base_, &square_, &length_}) limits->grow(round_up(widest, kBlockRows));
    found_.grow(widest * kBlockRows);
}

void RowScan::begin() const {
    if (filters_) shared_->kernels_.begin();
}

void RowScan::end() const {
    if (filters_) shared_->kernels_.end();
}

void RowScan::start_group(const std::int32_t* members, int n, const float* centroid, std::span<const std::uint8_t> later,
                          QueryHeap* apart) {
    members_ = members;
    n_ = n;
    centroid_ = centroid;
    later_ = later;
    apart_ = apart;
    for (int m = 0; m < n; ++m) queries_[m] = shared_->query(members[m]);
    filtered_ = shared_->may_filter(n);
    if (!filtered_) return;
    const std::int8_t* filtered[kGroup];
    for (int m = 0; m < n; ++m) {
        filtered[m] = shared_->filtered(members[m]);
        const QueryBound& bound = shared_->bounds_[static_cast<std::size_t>(members[m])];
        square_[m] = static_cast<float>(bound.square / bound.step);
        length_[m] = static_cast<float>(bound.length / bound.step);
    }
    renew_limits();
    shared_->kernels_.pack(filtered, n, shared_->row_bytes_, packed_.data());
}

void RowScan::scan(const RowBlock& block) {
    if (block.wanted == 0) return;
    const float* rows = shared_->bytes_ ? nullptr : rows_of(block);
    if (!filtered_ || !filter(block, rows)) compare(block, rows);
}

void decode_row(const RowCodes& codes, const BlockKernels& kernels, const std::uint8_t* code, const float* centroid, float* row) {
    switch (codes.code) {
        case Code::f32: std::memcpy(row, code, static_cast<std::size_t>(codes.dim) * 4); break;
        case Code::f16: kernels.decode_f16(code, codes.dim, row); break;
        case Code::bf16: kernels.decode_bf16(code, codes.dim, row); break;
        case Code::u8: kernels.decode_u8(code, codes.scale, codes.offset, codes.dim, row); break;
    }
    if (centroid != nullptr)
        for (std::int64_t i = 0; i < codes.dim; ++i) row[i] += centroid[i];
}

void RowScan::decode(const std::uint8_t* code, float* row) const {
    decode_row(shared_->codes_, shared_->kernels_, code, centroid_, row);
    std::fill(row + shared_->codes_.dim, row + shared_->dim_, 0.0f);
}

// Rows of floats: where they lie, or decoded.
const float* RowScan::rows_of(const RowBlock& block) {
    if (shared_->direct_) return reinterpret_cast<const float*>(block.codes);
    const std::int64_t dim = shared_->dim_;
    for (int r = 0; r < block.n_rows; ++r) decode(block.codes + r * shared_->codes_.code_size, rows_.data() + r * dim);
    return rows_.data();
}

// Exact distances of the whole block.
void RowScan::compare(const RowBlock& block, const float* rows) {
    const RowQueries& shared = *shared_;
    const BlockKernels& kernels = shared.kernels_;
    if (shared.direct_ && block.n_rows < kBlockRows) {  // not to read beyond them
        std::memcpy(rows_.data(), rows, static_cast<std::size_t>(block.n_rows * shared.dim_) * sizeof(float));
        rows = rows_.data();
    }
    const bool fetch_later = shared.direct_ && n_ >= kFetchQueries + kTileQueries && !later_.empty();
    const bool fetch_next = shared.direct_ && (n_ > 1 || !streams_by_itself());
    (shared.inner_product_ ? kernels.inner_products : kernels.squared_l2)(
        rows, shared.dim_, queries_, n_, shared.dim_, distances_.data(), fetch_next ? block.next.data() : nullptr,
        fetch_later ? later_.data() : nullptr);
    if (fetch_later) {
        const std::int64_t fetched = kBlockRows * shared.codes_.code_size / 4 * ((n_ - kFetchQueries) / kTileQueries);
        later_ = later_.subspan(std::min(later_.size(), static_cast<std::size_t>(fetched)));
    }
    for (int m = 0; m < n_; ++m) {
        const float* found = distances_.data() + m * kBlockRows;
        for (std::uint32_t near = kernels.at_most(found, limit(m)) & block.wanted; near != 0; near &= near - 1) {
            const int r = std::countr_zero(near);
            heap(m).push(found[r], block.ids == nullptr ? block.first_id + r : block.ids[r]);
        }
    }
}

void RowScan::renew_limits() {
    for (int m = 0; m < n_; ++m) base_[m] = base_limit(m);
}

// Of the heap that rows of the group's query `member` go to.
QueryHeap& RowScan::heap(int member) const {
    return apart_ != nullptr ? apart_[member] : shared_->heap(members_[member]);
}

// Nothing beyond it can enter the answer of the group's query: whatever rows a limit comes from, they are scanned.
float RowScan::limit(int member) const {
    const float own = shared_->heap(members_[member]).limit();
    return apart_ == nullptr ? own : std::min(own, apart_[member].limit());
}

// QueryLimits::base.
float RowScan::base_limit(int member) const {
    return shared_->bounds_[static_cast<std::size_t>(members_[member])].base(limit(member));
}

// Exact distances only of pairs that the filter cannot rule out; false where these would be too many, and nothing is
// done.
bool RowScan::filter(const RowBlock& block, const float* rows) {
    if (exact_left_ > 0) {
        if (--exact_left_ == 0) renew_limits();
        return false;
    }
    const RowQueries& shared = *shared_;
    const QueryLimits limits{base_.data(), square_.data(), length_.data()};
    int n_found;
    if (shared.bytes_) {
        n_found = filter_bytes(block, limits);
    } else {
        RowTerms terms{};
        const std::span<const std::uint8_t> next = shared.direct_ ? block.next : std::span<const std::uint8_t>{};
        const std::size_t half = std::min(next.size(), static_cast<std::size_t>(block.n_rows * shared.row_bytes_));
        const std::span<const std::uint8_t> rest = next.subspan(half);
        shared.kernels_.round_rows(rows, shared.dim_, block.n_rows, shared.dim_, shared.row_bytes_, codes_.data(), &terms,
                                   next.data(), static_cast<std::int64_t>(half));
        n_found = shared.kernels_.filter_halves(codes_.data(), shared.row_bytes_, packed_.data(), n_, shared.row_bytes_,
                                                limits, terms, found_.data(), rest.data(),
                                                static_cast<std::int64_t>(rest.size()));
        if (n_found * 3 > n_ * kBlockRows) {
            exact_left_ = exact_run_;
            exact_run_ = std::min(2 * exact_run_, kMostExactBlocks);
            return false;
        }
        exact_run_ = kFewestExactBlocks;
    }
    compare_found(block, rows, n_found);
    return true;
}

int RowScan::filter_bytes(const RowBlock& block, const QueryLimits& limits) {
    const ByteRows bytes = bytes_of(block);
    const RowTerms terms = terms_of(block, bytes);
    return shared_->kernels_.filter(bytes.rows, bytes.stride, packed_.data(), n_, shared_->row_bytes_, limits, terms,
                                    found_.data(), block.next.data());
}

// Where they lie, or a copy: not to read beyond them.
RowScan::ByteRows RowScan::bytes_of(const RowBlock& block) {
    const std::int64_t size = shared_->codes_.code_size, stride = shared_->row_bytes_;
    if (block.n_rows == kBlockRows && shared_->codes_.dim == stride) return {block.codes, size};
    for (int r = 0; r < block.n_rows; ++r)
        std::memcpy(codes_.data() + r * stride, block.codes + r * size, static_cast<std::size_t>(size));
    return {codes_.data(), stride};
}

// Those that were kept, or computed and kept.
RowTerms RowScan::terms_of(const RowBlock& block, const ByteRows& bytes) const {
    const RowQueries& shared = *shared_;
    RowTerms terms{};
    if (block.terms.load(terms)) return terms;
    shared.kernels_.row_terms(bytes.rows, bytes.stride, block.n_rows, shared.codes_.dim,
                              shared.inner_product_ ? nullptr : shared.codes_.scale, &terms);
    block.terms.keep(terms);
    return terms;
}

// Exact distances of the pairs in found_. `rows` is nullptr where none is decoded yet.
void RowScan::compare_found(const RowBlock& block, const float* rows, int n_found) {
    const RowQueries& shared = *shared_;
    const auto distances_of = shared.inner_product_ ? shared.kernels_.inner_product_pairs : shared.kernels_.squared_l2_pairs;
    const float* pair_rows[kPairs];
    const float* pair_queries[kPairs];
    float distances[kPairs];
    int places[kPairs], members[kPairs];
    std::uint32_t decoded = rows == nullptr ? 0 : 0xffffu;
    if (rows == nullptr) rows = rows_.data();
    for (int f = 0; f < n_found;) {
        int n = 0;
        for (; f < n_found && n < kPairs; ++f) {
            const int m = static_cast<int>(found_[f] >> 4), r = static_cast<int>(found_[f] & 15u);
            if (!(block.wanted >> r & 1)) continue;
            if (!(decoded >> r & 1)) {
                decode(block.codes + r * shared.codes_.code_size, rows_.data() + r * shared.dim_);
                decoded |= 1u << r;
            }
            pair_rows[n] = rows + r * shared.dim_;
            pair_queries[n] = queries_[m];
            places[n] = r;
            members[n++] = m;
            if (block.ids != nullptr) __builtin_prefetch(block.ids + r);
        }
        distances_of(pair_rows, pair_queries, n, shared.dim_, distances, nullptr);
        for (int i = 0; i < n; ++i) {
            const int m = members[i];
            if (!(distances[i] <= limit(m))) continue;
            heap(m).push(distances[i], block.ids == nullptr ? block.first_id + places[i] : block.ids[places[i]]);
            base_[m] = base_limit(m);
        }
    }
}

}  // namespace hybridindex
