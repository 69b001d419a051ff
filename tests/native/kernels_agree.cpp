// Instruction sets give the same bits: the kernels of RaBitQ codes and of product quantizers, called directly and by
// their scanners, and products of bytes, against the portable ones. And the portable ones give what they gave on
// x86-64.
//
// One file of more than 600 lines: an emulator runs one program, and its parts draw from the same numbers.
//
//   kernels_agree [NAME...]
// compares the sets of these names, the first of which has to be what this CPU gets; without names, all that it runs.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "jobs/thread_pool.h"
#include "pq/pq_scan.h"
#include "rabitq/code_scan.h"
#include "rabitq/encode.h"
#include "simd/aligned_buffer.h"
#include "simd/block_kernels.h"

using namespace hybridindex;

namespace {

// Of the answers of the portable kernels.
constexpr std::uint64_t kDigest = 0x7e828206e644a131;

std::string now;  // what is compared

[[noreturn]] void fail(const std::string& what) {
    std::fprintf(stderr, "kernels_agree: %s: %s\n", now.c_str(), what.c_str());
    std::exit(1);
}

// The same on every machine.
class Random {
public:
    explicit Random(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
    std::uint32_t next() {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::uint32_t>(state_ >> 33);
    }
    std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>(next() % static_cast<std::uint32_t>(n)); }
    float number() { return static_cast<float>(static_cast<std::int32_t>(next())) * 0x1p-30f - 1.0f; }

private:
    std::uint64_t state_;
};

constexpr float kInfinity = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kExtremes[] = {0.0f,     -0.0f,     1e-45f,     -1e-40f, 1e-38f, 3.4e38f,
                               -3.4e38f, kInfinity, -kInfinity, kNan,    1.0f,   65535.0f};

enum class Values { plain, large, small, extreme };
constexpr Values kAllValues[] = {Values::plain, Values::large, Values::small, Values::extreme};

std::vector<float> floats(Random& random, std::int64_t n, Values values = Values::plain) {
    std::vector<float> out(static_cast<std::size_t>(n));
    for (float& x : out) {
        x = random.number();
        if (values == Values::large) x *= 1e36f;
        if (values == Values::small) x *= 1e-39f;
        if (values == Values::extreme && random.below(3) == 0) x = kExtremes[random.below(std::size(kExtremes))];
    }
    return out;
}

// All 0, all ones, or any.
std::vector<std::uint8_t> bytes(Random& random, std::int64_t n) {
    const std::int64_t kind = random.below(6);
    std::vector<std::uint8_t> out(static_cast<std::size_t>(n), kind == 0 ? 0 : 255);
    if (kind > 1)
        for (std::uint8_t& byte : out) byte = static_cast<std::uint8_t>(random.next());
    return out;
}

// Two that are no number are equal.
void same(const char* what, const float* right, const float* found, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
        if (std::memcmp(right + i, found + i, 4) != 0 && !(std::isnan(right[i]) && std::isnan(found[i])))
            fail(std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(found[i]) + ", portable " +
                 std::to_string(right[i]));
}
template <typename T>
void same(const char* what, const T* right, const T* found, std::int64_t n) {
    for (std::int64_t i = 0; i < n; ++i)
        if (right[i] != found[i])
            fail(std::string(what) + "[" + std::to_string(i) + "] is " + std::to_string(found[i]) + ", portable " +
                 std::to_string(right[i]));
}
template <typename T>
void same(const char* what, const std::vector<T>& right, const std::vector<T>& found) {
    same(what, right.data(), found.data(), static_cast<std::int64_t>(right.size()));
}
template <typename Call>
void same_of(const char* what, const Call& call) {
    const auto right = call(true), found = call(false);
    same(what, &right, &found, 1);
}

struct Answer {
    Answer(std::int64_t n, std::int64_t k) : distances(static_cast<std::size_t>(n * k)), ids(distances.size()) {}

    std::vector<float> distances;
    std::vector<std::int64_t> ids;
};
void same(const Answer& right, const Answer& found) {
    same("distances", right.distances, found.distances);
    same("ids", right.ids, found.ids);
}

class Digest {
public:
    template <typename T>
    void add(const std::vector<T>& values) {
        for (const T value : values) {
            std::uint64_t bits = 0;
            std::memcpy(&bits, &value, sizeof(T));
            // What is no number has another sign on other CPUs.
            if constexpr (std::is_same_v<T, float>) bits = std::isnan(value) ? 1 : bits;
            state_ = (state_ ^ bits) * 0x100000001b3u;
        }
    }
    void add(const Answer& answer) { add(answer.distances), add(answer.ids); }
    std::uint64_t value() const { return state_; }

private:
    std::uint64_t state_ = 0xcbf29ce484222325u;
};

// Of 1 to 2100; and of more, of which sums of 16 bits overflow.
std::vector<std::int64_t> sampled_dims(Random& random) {
    std::vector<std::int64_t> dims{1, 2, 31, 32, 33, 64, 96, 128, 768, 2047, 2048, 2049, 2100, 5000};
    for (int i = 0; i < 12; ++i) dims.push_back(1 + random.below(2100));
    return dims;
}
std::vector<std::int64_t> sampled_sizes(Random& random) {
    std::vector<std::int64_t> sizes{0, 1, 15, 16, 17, 31, 32, 33, 64, 200};
    for (int i = 0; i < 4; ++i) sizes.push_back(random.below(201));
    return sizes;
}
// Lists for each of n queries, some twice, -1 here and there.
std::vector<std::int64_t> sampled_probes(Random& random, std::int64_t n, std::int64_t p, std::int64_t nlist) {
    std::vector<std::int64_t> probes(static_cast<std::size_t>(n * p));
    for (std::int64_t& probe : probes) probe = random.below(nlist + 1) - 1;
    return probes;
}

// ---- RaBitQ codes

// Of extremes, sums are the largest or the smallest there are. Of nothing, estimates are -0 before they are kept.
enum class Blocks { plain, extreme_sums, extreme_factors, nothing };
constexpr Blocks kAllBlocks[] = {Blocks::plain, Blocks::extreme_sums, Blocks::extreme_factors, Blocks::nothing};

// Blocks, and queries that are compared with them. The last block holds few rows; behind them are others.
struct Comparison {
    static constexpr std::int64_t kBlocks = 3, kPosition = (std::int64_t{7} << 32) + 160;
    static constexpr int kMostQueries = 40;

    Comparison(Random& random, int bits, std::int64_t dim, bool l2, Blocks kind)
        : format{bits, dim, 1, 1, l2, {nullptr, 0, (dim + kChunkDims - 1) / kChunkDims * kChunkDims}}, coded(format) {
        queries = floats(random, kMostQueries * dim);
        // Not rotated, numbers of one size are the largest that a query is rounded to.
        if (kind == Blocks::extreme_sums)
            for (std::int64_t i = 0; i < kMostQueries * dim; ++i)
                queries[static_cast<std::size_t>(i)] = i / dim % 2 != 0 ? -1.0f : 1.0f;
        coded.prepare(queries.data(), kMostQueries);
        const std::int64_t size = format.block_bytes(), planes = format.plane_bytes();
        for (std::int64_t block = 0; block < kBlocks; ++block) {
            std::vector<std::uint8_t> one = bytes(random, planes);
            if (kind == Blocks::extreme_sums)
                std::fill(one.begin(), one.end(), static_cast<std::uint8_t>(block % 2 == 0 ? 255 : 0));
            one.resize(static_cast<std::size_t>(size));
            for (std::int64_t i = planes; i < planes + 64; ++i)
                one[static_cast<std::size_t>(i)] =
                    static_cast<std::uint8_t>(kind == Blocks::nothing ? 0 : random.next());
            // Halves are numbers: a bit of the exponent is not set.
            if (kind != Blocks::extreme_factors)
                for (std::int64_t i = planes + 1; i < planes + 64; i += 2) one[static_cast<std::size_t>(i)] &= 0xbf;
            const Values values = kind == Blocks::extreme_factors ? Values::extreme : Values::plain;
            const std::vector<float> h = kind == Blocks::nothing ? std::vector<float>(kCodedRows, 0.0f)
                                                                 : floats(random, kCodedRows, values);
            if (l2) std::memcpy(one.data() + planes + 64, h.data(), 4 * kCodedRows);
            blocks.insert(blocks.end(), one.begin(), one.end());
        }
        const Values values = kind == Blocks::extreme_factors ? Values::extreme : Values::plain;
        u = floats(random, kMostQueries, values), w = floats(random, kMostQueries, values);
        products = kind == Blocks::nothing ? std::vector<float>(kMostQueries, 0.0f)
                                           : floats(random, kMostQueries, values);
        for (int q = 0; q < kMostQueries; ++q) tables.push_back(coded.tables(q)), whole.push_back(coded.whole(q));
        // What is fetched ahead: nothing, of this run, or of what comes later.
        const std::int64_t blocks_ahead = random.below(5), blocks_later = random.below(kBlocks + 1);
        run = {blocks.data(),
               kBlocks * kCodedRows - random.below(kCodedRows),
               size,
               bits,
               format.chunks(),
               l2,
               portable_kernels->decode_f16,
               blocks_ahead * size,
               blocks_later != 0 ? blocks.data() : nullptr,
               blocks_later * size};
    }
    Comparison(const Comparison&) = delete;

    CodeFormat format;
    CodedQueries coded;
    std::vector<float> queries, u, w, products;
    std::vector<std::uint8_t> blocks;
    std::vector<const std::uint8_t*> tables;
    std::vector<const std::int8_t*> whole;
    CodedRun run;
};

// What find() gave: where it stopped, and each query's rows, query by query.
struct Finding {
    std::vector<std::int64_t> stops, counts, positions;
    std::vector<float> estimates;
};
void same(const Finding& right, const Finding& found) {
    const auto lengths = [](const Finding& one) {
        return std::vector<std::size_t>{one.stops.size(), one.positions.size(), one.estimates.size()};
    };
    same("lengths of what was found", lengths(right), lengths(found));
    same("stops", right.stops, found.stops);
    same("counts", right.counts, found.counts);
    same("positions", right.positions, found.positions);
    same("estimates", right.estimates, found.estimates);
}

// From the block `first` to the end, taking out what fills the room of a query. The q-th of them begins with q % 3
// rows.
Finding find(const RabitqKernels& kernels, const Comparison& with, const std::vector<float>& limits, int n,
             std::int64_t first, std::int64_t room) {
    const QueriesOfRun queries{with.tables.data(), with.whole.data(),    with.u.data(),
                               with.w.data(),      with.products.data(), limits.data()};
    // As much memory as they may write, each its own.
    std::vector<std::vector<float>> estimates(static_cast<std::size_t>(n)), all_estimates(estimates.size());
    std::vector<std::vector<std::int64_t>> positions(estimates.size()), all_positions(estimates.size());
    std::vector<FoundRows> rows(estimates.size());
    std::vector<FoundRows*> found;
    for (std::size_t q = 0; q < rows.size(); ++q) {
        estimates[q].resize(static_cast<std::size_t>(room), 7.0f);
        positions[q].resize(static_cast<std::size_t>(room), 7);
        const std::int64_t count = std::min<std::int64_t>(static_cast<std::int64_t>(q % 3), room - kCodedRows);
        rows[q] = {estimates[q].data(), positions[q].data(), count, room};
        found.push_back(&rows[q]);
    }
    const auto take_out = [&](std::size_t q) {
        const std::ptrdiff_t count = static_cast<std::ptrdiff_t>(rows[q].count);
        all_estimates[q].insert(all_estimates[q].end(), estimates[q].begin(), estimates[q].begin() + count);
        all_positions[q].insert(all_positions[q].end(), positions[q].begin(), positions[q].begin() + count);
        rows[q].count = 0;
    };
    std::vector<std::int32_t> sums(static_cast<std::size_t>(n * kCodedRows));
    std::vector<float> out(sums.size());
    Finding finding;
    for (std::int64_t block = first; block < with.run.count();) {
        const std::int64_t next = kernels.find(with.run, block, queries, n, Comparison::kPosition, found.data(),
                                               sums.data(), out.data());
        if (next <= block || next > with.run.count()) fail("find() ended at block " + std::to_string(next));
        bool full = false;
        for (std::size_t q = 0; q < rows.size(); ++q)
            if (rows[q].full()) take_out(q), full = true;
        if (!full && next < with.run.count()) fail("find() stopped where nobody's room was full");
        finding.stops.push_back(block = next);
    }
    for (std::size_t q = 0; q < rows.size(); ++q) {
        take_out(q);
        finding.counts.push_back(static_cast<std::int64_t>(all_positions[q].size()));
        finding.estimates.insert(finding.estimates.end(), all_estimates[q].begin(), all_estimates[q].end());
        finding.positions.insert(finding.positions.end(), all_positions[q].begin(), all_positions[q].end());
    }
    for (const float estimate : finding.estimates)
        if (estimate == 0 && std::signbit(estimate)) fail("an estimate is -0");
    return finding;
}

void compare_found(const RabitqKernels& kernels, Random& random, const Comparison& with, int n) {
    constexpr std::int64_t kAll = (Comparison::kBlocks + 1) * kCodedRows;
    const auto both = [&](const std::vector<float>& limits, std::int64_t first, std::int64_t room) {
        const Finding right = find(*portable_rabitq_kernels, with, limits, n, first, room);
        same(right, find(kernels, with, limits, n, first, room));
        return right;
    };
    const std::vector<float> largest(static_cast<std::size_t>(n), std::numeric_limits<float>::max());
    const Finding all = both(largest, 0, kAll);
    // Room for one block, and for a few rows more.
    both(largest, 0, kCodedRows);
    both(largest, random.below(Comparison::kBlocks), kCodedRows + 1 + random.below(kCodedRows));
    // Limits that are an estimate of the query's, equal is near; that are just below one; and that nothing is below.
    std::vector<float> limits;
    std::int64_t at = 0;
    for (int q = 0; q < n; at += all.counts[static_cast<std::size_t>(q++)]) {
        const std::int64_t count = all.counts[static_cast<std::size_t>(q)];
        const float one = count > 0 ? all.estimates[static_cast<std::size_t>(at + random.below(count))] : 0.0f;
        const float some[] = {one, one, std::nextafter(one, -kInfinity), -std::numeric_limits<float>::max(), kNan};
        limits.push_back(some[random.below(std::size(some))]);
    }
    both(limits, 0, kAll);
    both(limits, 0, kCodedRows + random.below(kCodedRows));
    limits.assign(static_cast<std::size_t>(n), -kInfinity);
    both(limits, 0, kAll);
}

// Numbers with many equal ones, of both zeros, or any; none is no number.
std::vector<float> sampled_estimates(Random& random, std::int64_t n) {
    const std::int64_t kind = random.below(5);
    std::vector<float> out = floats(random, n, kind == 0 ? Values::extreme : kind == 1 ? Values::small : Values::plain);
    for (float& x : out) {
        if (kind == 2) x = 3.5f;
        if (kind == 3) x = static_cast<float>(random.below(3)) - 1.0f;
        if (kind == 3 && x == 0 && random.below(2) == 0) x = -0.0f;
        if (std::isnan(x)) x = -1.0f;
    }
    return out;
}

void compare_keys(const RabitqKernels& kernels, Random& random, std::int64_t n, std::int64_t k,
                  const std::vector<float>& estimates) {
    std::vector<std::int32_t> right(static_cast<std::size_t>(n), 7), found = right;
    std::int32_t last[2] = {7, 8};
    const std::int64_t within = portable_rabitq_kernels->least_key(estimates.data(), n, k, right.data(), last);
    same_of("rows within the last key", [&](bool portable) {
        return portable ? within : kernels.least_key(estimates.data(), n, k, found.data(), last + 1);
    });
    same("last key", last, last + 1, 1);
    same("keys", right, found);
    const std::size_t i = static_cast<std::size_t>(random.below(n)), j = static_cast<std::size_t>(random.below(n));
    if (estimates[i] < estimates[j] && right[i] >= right[j]) fail("keys are not ordered as estimates");
    std::sort(right.begin(), right.end());
    if (std::upper_bound(right.begin(), right.end(), last[0]) - right.begin() != within || within < k)
        fail("not so many keys are up to the last one");
    if (within > k && right[static_cast<std::size_t>(k - 1)] != last[0]) fail("a smaller key would do");
}

// Of the best kernels: the rows that sorting leaves.
void check_best_rows(Random& random, std::int64_t n, std::int64_t k, std::vector<float> estimates) {
    using Row = std::pair<float, std::int64_t>;
    std::vector<std::int64_t> positions;
    std::vector<Row> rows, kept;
    for (std::int64_t i = 0; i < n; ++i) {
        estimates[static_cast<std::size_t>(i)] += 0.0f;  // as find() leaves them
        // Some twice: of a list that is probed twice.
        const bool again = i > 0 && random.below(2) == 0;
        positions.push_back(again ? positions.back() : (std::int64_t{1} << 32) + random.below(1000));
        rows.emplace_back(estimates[static_cast<std::size_t>(i)], positions.back());
    }
    std::sort(rows.begin(), rows.end());
    std::vector<std::int32_t> keys(static_cast<std::size_t>(n));
    const float last = keep_best_rows(estimates.data(), positions.data(), n, k, keys.data());
    for (std::size_t i = 0; i < static_cast<std::size_t>(k); ++i) kept.emplace_back(estimates[i], positions[i]);
    std::sort(kept.begin(), kept.end());
    if (!std::equal(kept.begin(), kept.end(), rows.begin())) fail("the rows that are kept are not the best");
    same("the last estimate that is kept", &kept.back().first, &last, 1);
}

void compare_selection(const RabitqKernels& kernels) {
    Random random(5);
    for (const std::int64_t n : {1, 2, 3, 15, 16, 17, 33, 100, 401})
        for (int i = 0; i < 12; ++i) {
            now = "selection, " + std::string(kernels.name) + ", " + std::to_string(n) + " rows";
            const std::vector<float> estimates = sampled_estimates(random, n);
            for (std::int64_t k = 1; k <= n; k += n > 40 ? 1 + random.below(12) : 1) {
                compare_keys(kernels, random, n, k, estimates);
                if (k < n) check_best_rows(random, n, k, estimates);
            }
            compare_keys(kernels, random, n, n, estimates);
        }
}

// Lists of rows, coded.
struct CodedLists {
    CodedLists(Random& random, int bits, std::int64_t dim, bool l2, std::int64_t rounds = 2)
        : sizes(sampled_sizes(random)), signs(static_cast<std::size_t>(rounds * ((dim + 31) / 32 * 32))) {
        for (float& sign : signs) sign = random.below(2) != 0 ? 1.0f : -1.0f;
        format = {bits, dim, 0.25f, 0.5f, l2, {signs.data(), rounds, (dim + 31) / 32 * 32}};
        for (const std::int64_t size : sizes) {
            const std::vector<float> rows =
                floats(random, size * dim, random.below(8) == 0 ? Values::large : Values::plain);
            const std::vector<float> centroid = floats(random, dim);
            const std::int64_t nbytes = (size + kCodedRows - 1) / kCodedRows * format.block_bytes();
            codes.resize(codes.size() + static_cast<std::size_t>(nbytes));
            if (size > 0) encode_rows(format, rows.data(), size, centroid.data(), codes.data() + codes.size() - nbytes);
            squares.push_back(std::fabs(random.number()));
        }
    }

    Answer scan(const RabitqKernels& kernels, std::uint64_t seed, Values values, std::int64_t n, std::int64_t k) const {
        Random random(seed);
        const std::int64_t nlist = static_cast<std::int64_t>(sizes.size()), p = 6;
        const std::vector<float> queries = floats(random, n * format.dim, values), products = floats(random, n * p);
        const std::vector<std::int64_t> probes = sampled_probes(random, n, p, nlist);
        const CodeTable table{
            codes.data(), static_cast<std::int64_t>(codes.size()), sizes.data(), nlist, squares.data(), format};
        CodeScanner scanner(table, *portable_kernels, kernels);
        Answer out(n, k);
        CodeTask task{};
        task.queries = queries.data(), task.n = n, task.k = k, task.distances = out.distances.data(),
        task.ids = out.ids.data();
        task.probes = probes.data(), task.centre_products = products.data(), task.p = p;
        ThreadPool alone(0);
        scanner.scan(task, alone);
        return out;
    }

    CodeFormat format;
    std::vector<std::int64_t> sizes;
    std::vector<float> signs, squares;
    std::vector<std::uint8_t> codes;
};

void compare_codes(const RabitqKernels& kernels) {
    Random random(1);
    for (const int bits : {1, 2, 4})
        for (const bool l2 : {false, true})
            for (const std::int64_t dim : sampled_dims(random))
                for (const Blocks kind : kAllBlocks) {
                    const Comparison with(random, bits, dim, l2, kind);
                    // Of all widths; and where more go together, of more.
                    const int more = 9 + static_cast<int>(random.below(Comparison::kMostQueries - 8));
                    for (const int n : {1, 2, 3, 4, 5, 6, 7, 8, more}) {
                        if (n > std::min(kernels.together, portable_rabitq_kernels->together)) continue;
                        // All widths of one kind; of the others some.
                        if (n < 9 && kind != Blocks::plain && random.below(4) != 0) continue;
                        now = "codes, " + std::string(kernels.name) + ", " + std::to_string(bits) + " bits, dim " +
                              std::to_string(dim) + (l2 ? ", l2, " : ", ip, ") + std::to_string(n) +
                              " queries, blocks of kind " + std::to_string(static_cast<int>(kind));
                        compare_found(kernels, random, with, n);
                    }
                }
    compare_selection(kernels);
    for (const int bits : {1, 2, 4})
        for (const bool l2 : {false, true})
            for (const std::int64_t dim : {1, 33, 100, 300}) {
                now = "lists of codes, " + std::string(kernels.name) + ", " + std::to_string(bits) + " bits, dim " +
                      std::to_string(dim) + (l2 ? ", l2" : ", ip");
                const CodedLists lists(random, bits, dim, l2);
                for (const Values values : kAllValues)
                    for (const std::int64_t n : {1, 3, 8, 40})
                        same(lists.scan(*portable_rabitq_kernels, 5, values, n, 20),
                             lists.scan(kernels, 5, values, n, 20));
            }
}

// ---- Product quantizers

struct Quantizer {
    Quantizer(Random& random, std::int64_t dim, std::int64_t parts, int bits, bool l2, bool residual, Values values)
        : codewords(floats(random, dim << bits, values)), middle(floats(random, dim, values)),
          form{dim, parts, bits, l2, residual, codewords.data(), middle.data()} {}

    std::vector<float> codewords, middle;
    PqForm form;
};

void compare_sums(const PqKernels& kernels, Random& random) {
    const std::int64_t pairs = 1 + random.below(90), parts = 1 + random.below(180), n_rows = 1 + random.below(kPqRows);
    const int n = static_cast<int>(1 + random.below(9));
    const std::vector<std::uint8_t> block = bytes(random, pairs * 32), levels = bytes(random, n * pairs * 32),
                                    rows = bytes(random, kPqRows * (parts + 4)),
                                    row_levels = bytes(random, parts * 256);
    std::vector<const std::uint8_t*> tables;
    for (int q = 0; q < n; ++q) tables.push_back(levels.data() + q * pairs * 32);
    std::vector<std::uint16_t> right(static_cast<std::size_t>(n * kPqRows), 7), found = right;
    portable_pq_kernels->sums_of_block(block.data(), pairs, tables.data(), n, right.data(), nullptr);
    for (const std::uint8_t* const ahead : {static_cast<const std::uint8_t*>(nullptr), rows.data()}) {
        std::fill(found.begin(), found.end(), std::uint16_t{7});
        kernels.sums_of_block(block.data(), pairs, tables.data(), n, found.data(), ahead);
        same("sums_of_block", right, found);
    }
    const std::uint16_t limits[] = {0, 1, 65535, right[3], right[20], static_cast<std::uint16_t>(right[31] - 1)};
    std::vector<std::uint16_t> limit_of(static_cast<std::size_t>(n));
    for (std::uint16_t& limit : limit_of) limit = limits[random.below(6)];
    std::vector<std::uint32_t> near[2] = {std::vector<std::uint32_t>(limit_of.size()),
                                          std::vector<std::uint32_t>(limit_of.size())};
    portable_pq_kernels->at_most(right.data(), n, limit_of.data(), near[0].data());
    kernels.at_most(right.data(), n, limit_of.data(), near[1].data());
    same("at_most", near[0], near[1]);
    for (const Values values : kAllValues) {
        const std::vector<float> terms = floats(random, kPqRows, values), others = floats(random, 2, values);
        for (const float limit : {others[0], static_cast<float>(right[3]) * others[1] + terms[3]})
            same_of("at_most_with", [&](bool portable) {
                return (portable ? *portable_pq_kernels : kernels)
                    .at_most_with(right.data(), terms.data(), others[1], limit);
            });
    }
    portable_pq_kernels->sums_of_rows(rows.data(), parts + 4, static_cast<int>(n_rows), parts, row_levels.data(),
                                      right.data());
    kernels.sums_of_rows(rows.data(), parts + 4, static_cast<int>(n_rows), parts, row_levels.data(), found.data());
    same("sums_of_rows", right.data(), found.data(), n_rows);
}

void compare_tables(const PqKernels& kernels, Random& random, const Quantizer& made, Values values) {
    const PqForm& form = made.form;
    const std::vector<float> query = floats(random, form.dim, values), centroid = floats(random, form.dim, values);
    const std::size_t entries = static_cast<std::size_t>(form.entries());
    std::vector<float> right(entries), found(entries), terms(entries);
    portable_pq_kernels->table(form, query.data(), right.data());
    kernels.table(form, query.data(), found.data());
    same("table", right, found);
    portable_pq_kernels->term_table(form, centroid.data(), terms.data());
    kernels.term_table(form, centroid.data(), found.data());
    same("term_table", terms, found);
    std::vector<std::uint8_t> levels[2];
    PqBound bounds[2];
    for (const bool portable : {true, false}) {
        levels[portable].resize(static_cast<std::size_t>(form.tables() * form.words()));
        bounds[portable] =
            (portable ? *portable_pq_kernels : kernels).round(form, right.data(), levels[portable].data());
    }
    same("levels", levels[true], levels[false]);
    const auto bound = [](const PqBound& one) {
        return std::vector<float>{one.step, static_cast<float>(one.low), static_cast<float>(one.most)};
    };
    same("bound", bound(bounds[true]), bound(bounds[false]));
    same_of("base", [&](bool portable) {
        return (portable ? *portable_pq_kernels : kernels).base(form, query.data(), centroid.data());
    });
    const std::vector<std::uint8_t> codes = bytes(random, kPqRows * form.code_size());
    const int row = static_cast<int>(random.below(kPqRows));
    same_of("sum of a row", [&](bool portable) {
        const PqKernels& one = portable ? *portable_pq_kernels : kernels;
        return form.bits == 8 ? one.sum_of_row(codes.data() + row * form.code_size(), form.parts, right.data())
                              : one.sum_in_block(codes.data(), row, form.parts, right.data());
    });
    if (form.bits == 8) return;
    // One row of a half is summed by itself, two and more together.
    for (const std::uint32_t wanted : {1u << row, 3u << row | 1u, static_cast<std::uint32_t>(random.below(1u << 31)), ~0u}) {
        float found[kPqRows];
        kernels.sums_in_block(codes.data(), wanted, form.parts, right.data(), found);
        for (int r = 0; r < kPqRows; ++r)
            if (wanted >> r & 1)
                same_of("sums of a block", [&](bool portable) {
                    return portable ? portable_pq_kernels->sum_in_block(codes.data(), r, form.parts, right.data()) : found[r];
                });
    }
}

Answer scan_quantized(const PqKernels& kernels, const Quantizer& made, std::uint64_t seed, Values values,
                      std::int64_t n) {
    Random random(seed);
    const PqForm& form = made.form;
    const std::int64_t p = 6, k = 20;
    const std::vector<std::int64_t> sizes = sampled_sizes(random);
    const std::int64_t nlist = static_cast<std::int64_t>(sizes.size());
    std::vector<std::uint8_t> data;
    std::vector<std::int64_t> extents;
    for (const std::int64_t size : sizes) {
        const std::int64_t capacity = (size + kPqRows - 1) / kPqRows * kPqRows;
        const std::int64_t offset = static_cast<std::int64_t>(data.size());
        extents.insert(extents.end(), {size, capacity, offset});
        const std::vector<std::uint8_t> codes = bytes(random, capacity * form.code_size());
        data.insert(data.end(), codes.begin(), codes.end());
        for (std::int64_t row = 0; row < capacity; ++row) {
            const std::int64_t id = 1000 * nlist - offset + row;
            const std::uint8_t* const at = reinterpret_cast<const std::uint8_t*>(&id);
            data.insert(data.end(), at, at + sizeof(id));
        }
    }
    const std::vector<float> queries = floats(random, n * form.dim, values),
                             centroids = floats(random, nlist * form.dim);
    const std::vector<std::int64_t> probes = sampled_probes(random, n, p, nlist);
    PqScanner scanner({data.data(), static_cast<std::int64_t>(data.size()), extents.data(), nlist, form,
                       form.residual ? centroids.data() : nullptr},
                      kernels);
    Answer out(n, k);
    ScanTask task{};
    task.queries = queries.data(), task.n = n, task.k = k, task.distances = out.distances.data(),
    task.ids = out.ids.data();
    task.probes = probes.data(), task.p = p;
    ThreadPool alone(0);
    scanner.scan(task, alone);
    return out;
}

struct Shape {
    std::int64_t dim, parts;
    int bits;
};
constexpr Shape kShapes[] = {{1, 1, 4}, {6, 3, 4}, {64, 32, 4}, {70, 35, 4}, {300, 100, 4},
                             {1, 1, 8}, {9, 3, 8}, {64, 16, 8}, {77, 7, 8}};
constexpr bool kForms[][2] = {{false, false}, {false, true}, {true, false}, {true, true}};  // l2, residual

void compare_quantizers(const PqKernels& kernels) {
    Random random(2);
    now = "sums of product quantizers, " + std::string(kernels.name);
    for (int i = 0; i < 300; ++i) compare_sums(kernels, random);
    for (const Shape& shape : kShapes)
        for (const auto& [l2, residual] : kForms) {
            now = "product quantizer, " + std::string(kernels.name) + ", dim " + std::to_string(shape.dim) +
                  ", parts " + std::to_string(shape.parts) + " of " + std::to_string(shape.bits) + " bits" +
                  (l2 ? ", l2" : ", ip") + (residual ? ", residuals" : "");
            for (const Values values : kAllValues) {
                const Quantizer made(random, shape.dim, shape.parts, shape.bits, l2, residual, values);
                compare_tables(kernels, random, made, values);
                for (const std::int64_t n : {1, 7, 40})
                    same(scan_quantized(*portable_pq_kernels, made, 5, values, n),
                         scan_quantized(kernels, made, 5, values, n));
            }
        }
}

// ---- Rows

// A pair alone has the distance that it has in a block, whatever is fetched meanwhile.
void compare_rows(const BlockKernels& kernels) {
    Random random(3);
    for (const std::int64_t dim : {16, 48, 256, 1040})
        for (int n = 1; n <= 9; ++n) {
            now = "rows, " + std::string(kernels.name) + ", dim " + std::to_string(dim);
            const std::vector<float> rows = floats(random, kBlockRows * dim), queries = floats(random, n * dim);
            std::vector<const float*> each, row_of, query_of;
            for (int q = 0; q < n; ++q) each.push_back(queries.data() + q * dim);
            for (int q = 0; q < n; ++q)
                for (int r = 0; r < kBlockRows; ++r)
                    row_of.push_back(rows.data() + r * dim), query_of.push_back(each[static_cast<std::size_t>(q)]);
            const std::vector<const float*> ahead(row_of.rbegin(), row_of.rend());
            std::vector<float> block(row_of.size()), pairs(row_of.size());
            const auto compare = [&](const char* what, const auto& pairs_of) {
                for (const float* const* const fetched : {static_cast<const float* const*>(nullptr), ahead.data()})
                    // All of them, and without the last ones.
                    for (std::size_t left_out = 0; left_out < 4; ++left_out) {
                        const std::size_t n_pairs = pairs.size() - left_out;
                        std::fill(pairs.begin(), pairs.end(), 7.0f);
                        pairs_of(row_of.data(), query_of.data(), static_cast<int>(n_pairs), dim, pairs.data(), fetched);
                        same(what, block.data(), pairs.data(), static_cast<std::int64_t>(n_pairs));
                        for (std::size_t i = n_pairs; i < pairs.size(); ++i)
                            if (pairs[i] != 7.0f) fail(std::string(what) + " go beyond the last pair");
                    }
            };
            kernels.inner_products(rows.data(), dim, each.data(), n, dim, block.data(), nullptr, nullptr);
            compare("inner products", kernels.inner_product_pairs);
            kernels.squared_l2(rows.data(), dim, each.data(), n, dim, block.data(), nullptr, nullptr);
            compare("squared distances", kernels.squared_l2_pairs);
        }
}

// Whole numbers: the products are exact.
void compare_dots(const BlockKernels& kernels) {
    Random random(6);
    for (const std::int64_t row_bytes : {64, 128, 192, 384, 832, 4096})
        for (int i = 0; i < 20; ++i) {
            now = "dots, " + std::string(kernels.name) + ", " + std::to_string(row_bytes) + " bytes";
            std::vector<std::uint8_t> rows = bytes(random, kBlockRows * row_bytes);
            std::vector<std::int8_t> query(static_cast<std::size_t>(row_bytes));
            // Sums are the largest and the smallest there are; or any.
            for (std::int8_t& number : query)
                number = static_cast<std::int8_t>(i == 0 ? 127 : i == 1 ? -128 : random.below(256) - 128);
            if (i < 2) std::fill(rows.begin(), rows.end(), std::uint8_t{255});
            std::vector<std::int32_t> right(kBlockRows, 0), found(kBlockRows, 7);
            for (std::int64_t at = 0; at < kBlockRows * row_bytes; ++at)
                right[static_cast<std::size_t>(at / row_bytes)] +=
                    rows[static_cast<std::size_t>(at)] * query[static_cast<std::size_t>(at % row_bytes)];
            const void* const nexts[] = {nullptr, rows.data()};
            for (const BlockKernels* const one : {portable_kernels, &kernels})
                for (const void* const next : nexts) {
                    std::fill(found.begin(), found.end(), 7);
                    one->dots(rows.data(), row_bytes, query.data(), found.data(), next);
                    same("dots", right, found);
                }
        }
}

// Pairs that pass, of whole numbers; rows and queries lie one beside the other where the kernels want them so.
void compare_filters(const BlockKernels& kernels) {
    if (kernels.filter_interleaved == nullptr) return;
    Random random(7);
    for (const std::int64_t row_bytes : {64, 128, 448})
        for (int n = 1; n <= 40; ++n) {
            now = "filter_interleaved, " + std::string(kernels.name) + ", " + std::to_string(n) + " queries";
            const std::int64_t groups = (n + kBlockRows - 1) / kBlockRows;
            const std::vector<std::uint8_t> rows = bytes(random, kBlockRows * row_bytes);
            const std::vector<std::uint8_t> queries = bytes(random, n * row_bytes);
            AlignedBuffer<std::uint8_t> rows_between, queries_between;
            AlignedBuffer<std::int8_t> packed;
            rows_between.grow(kBlockRows * row_bytes), queries_between.grow(groups * kBlockRows * row_bytes);
            const std::uint8_t *row_of[kBlockRows], *query_of[40];
            const std::int8_t* signed_of[40];
            for (int r = 0; r < kBlockRows; ++r) row_of[r] = rows.data() + r * row_bytes;
            for (int q = 0; q < n; ++q) {
                query_of[q] = queries.data() + q * row_bytes;
                signed_of[q] = reinterpret_cast<const std::int8_t*>(query_of[q]);
            }
            interleave(row_of, kBlockRows, row_bytes, rows_between.data());
            for (int q = 0; q < n; q += kBlockRows)
                interleave(query_of + q, std::min(n - q, kBlockRows), row_bytes, queries_between.data() + q * row_bytes);
            packed.grow(portable_kernels->packed_bytes(n, row_bytes));
            portable_kernels->pack(signed_of, n, row_bytes, packed.data());
            // Whole numbers, whose sums are exact.
            const auto whole = [&random](std::int64_t most) { return static_cast<float>(random.below(2 * most) - most); };
            RowTerms terms;
            for (float& each : terms.length) each = whole(60);
            for (float& each : terms.square) each = whole(60);
            AlignedBuffer<float> base, square, length;
            for (AlignedBuffer<float>* each : {&base, &square, &length}) each->grow(groups * kBlockRows);
            for (int q = 0; q < n; ++q) base[q] = whole(2000 * row_bytes), square[q] = whole(9000), length[q] = whole(9000);
            const QueryLimits limits{base.data(), square.data(), length.data()};
            std::vector<std::uint32_t> right(static_cast<std::size_t>(n * kBlockRows), 0), found = right;
            const int count = portable_kernels->filter(rows.data(), row_bytes, packed.data(), n, row_bytes, limits, terms,
                                                       right.data(), nullptr);
            for (const void* const next : {static_cast<const void*>(nullptr), static_cast<const void*>(rows.data())}) {
                std::fill(found.begin(), found.end(), 0);
                const int again =
                    kernels.filter_interleaved(rows_between.data(), reinterpret_cast<const std::int8_t*>(queries_between.data()),
                                               n, row_bytes, limits, terms, found.data(), next);
                if (again != count) fail(std::to_string(again) + " pairs, not " + std::to_string(count));
                same("pairs", right, found);
            }
        }
}

// What the portable kernels answer.
std::uint64_t digest() {
    Random random(4);
    Digest out;
    for (const bool l2 : {false, true}) {
        for (const int bits : {1, 2, 4}) {
            const CodedLists lists(random, bits, 100, l2);
            out.add(lists.codes);
            out.add(lists.scan(*portable_rabitq_kernels, 7, Values::plain, 5, 50));
        }
        for (const Shape& shape : kShapes)
            for (const bool residual : {false, true})
                out.add(
                    scan_quantized(*portable_pq_kernels,
                                   Quantizer(random, shape.dim, shape.parts, shape.bits, l2, residual, Values::plain),
                                   7, Values::plain, 5));
    }
    return out.value();
}

}  // namespace

int main(int argc, char** argv) {
    std::vector<std::string> names(argv + 1, argv + argc);
    const std::string expected = names.empty() ? "" : names[0], chosen = rabitq_kernels_for(best_kernels()).name;
    if (names.empty())
        for (const char* level : {"amx", "avx512", "avx2", "neon"})
            if (const BlockKernels* const known = kernels_named(level)) {
                const std::string name = rabitq_kernels_for(*known).name;
                if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
            }
    for (const std::string& name : names) {
        int n_sets = 0;
        for (const RabitqKernels* kernels :
             {avx512_rabitq_kernels, avx2_rabitq_kernels, neon_rabitq_kernels, neon_dot_rabitq_kernels})
            if (kernels != nullptr && kernels->name == name) compare_codes(*kernels), ++n_sets;
        for (const PqKernels* kernels : {avx512_pq_kernels, avx2_pq_kernels, neon_pq_kernels})
            if (kernels != nullptr && kernels->name == name) compare_quantizers(*kernels), ++n_sets;
        if (n_sets == 0) {
            std::fprintf(stderr, "kernels_agree: no kernels \"%s\" were built\n", name.c_str());
            return 1;
        }
        std::printf("kernels_agree: %s: %d sets as the portable ones\n", name.c_str(), n_sets);
    }
    for (const char* level : {"portable", "neon", "avx2", "avx512", "amx"})
        if (const BlockKernels* const known = kernels_named(level)) compare_rows(*known), compare_dots(*known), compare_filters(*known);
    if (!expected.empty() && expected != chosen) {
        std::fprintf(stderr, "kernels_agree: this CPU gets the kernels %s for codes; expected %s\n", chosen.c_str(),
                     expected.c_str());
        return 1;
    }
    if (digest() != kDigest) {
        std::fprintf(stderr,
                     "kernels_agree: the answers of the portable kernels have the digest %#llx; expected %#llx\n",
                     static_cast<unsigned long long>(digest()), static_cast<unsigned long long>(kDigest));
        return 1;
    }
    std::printf("kernels_agree: ok\n");
    return 0;
}
