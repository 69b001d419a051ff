// Fuzz target of the host scans, of rows, of codes and of chosen rows: tables, extents, probes, filters and queries out of
// bytes, most of them nearly right.
//
// Whatever comes in, a scan answers or throws std::invalid_argument or std::out_of_range. Where it answers, every id is
// one of the probed lists and allowed, answers are in order, each row is reported once, and helpers change nothing.
// Coarse quantization finds each list once, in order; a query gets the same alone.
//
// fuzz_driver.cpp runs it, or libFuzzer.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "coarse/coarse_quantizer.h"
#include "fuzz.h"
#include "rabitq/code_scan.h"
#include "scan/list_scan.h"
#include "scan/row_reranker.h"

using namespace hybridindex;

int callers = 1;

namespace {

// Numbers out of bytes; zeros at their end.
class Bytes {
public:
    Bytes(const std::uint8_t* data, std::size_t size) : at_(data), end_(data + size) {}

    std::uint8_t byte() { return at_ < end_ ? *at_++ : std::uint8_t{0}; }

    std::uint64_t word() {
        std::uint64_t value = 0;
        for (int i = 0; i < 8; ++i) value = value << 8 | byte();
        return value;
    }

    // 0 .. n - 1
    std::int64_t below(std::int64_t n) { return static_cast<std::int64_t>((byte() << 8 | byte()) % n); }

    bool one_in(int n) { return byte() % n == n - 1; }

    // Small whole numbers: distances are exact whatever the order of their sums.
    float small() { return static_cast<float>(byte() % 17) - 8; }

    // Anything that 64 bits can be, edges above all.
    std::int64_t wild() {
        switch (byte() % 6) {
            case 0: return static_cast<std::int64_t>(word());
            case 1: return INT64_MAX - byte();
            case 2: return INT64_MIN + byte();
            case 3: return std::int64_t{1} << byte() % 63;
            case 4: return -static_cast<std::int64_t>(byte());
            default: return byte();
        }
    }

private:
    const std::uint8_t *at_, *end_;
};

// Exactly as much memory as asked for, so that the sanitizer sees the first byte beyond.
template <typename T>
std::unique_ptr<T[]> room(std::int64_t n) {
    return std::unique_ptr<T[]>(new T[static_cast<std::size_t>(n)]());
}

const BlockKernels& kernels_of(Bytes& in) {
    static constexpr const char* kNames[] = {"portable", "avx2", "avx512", "amx"};
    const BlockKernels* const kernels = kernels_named(kNames[in.byte() % 4]);
    return kernels == nullptr ? *portable_kernels : *kernels;
}

struct Case {
    ListTable lists{};
    ScanTask task{};
    bool keep_max = false;
    const BlockKernels* kernels = nullptr;
    bool tame = true;    // numbers whose distances are exact
    bool throws = false;  // from on_done
    bool reports = false;
    std::unique_ptr<std::uint8_t[]> data, bitmap;
    std::unique_ptr<std::int64_t[]> extents, probes, sorted;
    std::unique_ptr<float[]> scale, offset, centroids, queries;

    explicit Case(Bytes& in) {
        kernels = &kernels_of(in);
        keep_max = in.byte() & 1;
        tame = !in.one_in(4);
        make_lists(in);
        make_task(in);
    }

    void make_lists(Bytes& in) {
        static constexpr std::int64_t kDims[] = {1, 2, 3, 15, 16, 17, 33, 63, 64, 65, 128};
        lists.codes.code = static_cast<Code>(in.byte() % 4);
        lists.codes.dim = kDims[in.byte() % std::size(kDims)];
        lists.codes.code_size = lists.codes.dim * element_size(lists.codes.code);
        lists.nlist = in.below(9);
        extents = room<std::int64_t>(lists.nlist * 3);
        std::int64_t end = 0;
        for (std::int64_t i = 0; i < lists.nlist; ++i) {
            const std::int64_t size = in.one_in(6) ? in.below(600) : in.below(40);
            const std::int64_t capacity = (size + in.below(9) + 7) / 8 * 8;
            end += in.below(3) * 8;
            extents[3 * i] = size, extents[3 * i + 1] = capacity, extents[3 * i + 2] = end;
            end += capacity * (lists.codes.code_size + 8);
        }
        lists.nbytes = end;
        data = room<std::uint8_t>(end);
        for (std::int64_t i = 0; i < lists.nlist; ++i) fill_list(in, i);
        lists.base = data.get();
        if (lists.codes.code == Code::u8) {
            scale = room<float>(lists.codes.dim), offset = room<float>(lists.codes.dim);
            for (std::int64_t d = 0; d < lists.codes.dim; ++d) {
                scale[d] = tame ? 0.25f : number(in);
                offset[d] = tame ? in.small() : number(in);
            }
        }
        if (in.one_in(4)) {
            centroids = room<float>(lists.nlist * lists.codes.dim);
            for (std::int64_t d = 0; d < lists.nlist * lists.codes.dim; ++d) centroids[d] = in.small();
        }
        lists.codes.scale = scale.get(), lists.codes.offset = offset.get(), lists.centroids = centroids.get();
        // The faults.
        if (lists.nlist > 0 && in.one_in(3))
            for (int faults = 1 + in.byte() % 3; faults > 0; --faults) {
                std::int64_t& at = extents[in.below(lists.nlist * 3)];
                at = in.one_in(2) ? in.wild() : std::clamp<std::int64_t>(at, 0, 1 << 30) + in.below(17) - 8;
            }
        if (lists.nbytes > 0 && in.one_in(8)) lists.nbytes -= 1 + in.below(std::min<std::int64_t>(lists.nbytes, 64));
        if (lists.nbytes > 8 && in.one_in(32)) ++lists.base, --lists.nbytes;
        if (in.one_in(32)) lists.codes.code_size += in.below(9) - 4;
        lists.extents = extents.get();
    }

    float number(Bytes& in) {
        const std::uint32_t bits = static_cast<std::uint32_t>(in.word());
        float value;
        std::memcpy(&value, &bits, 4);
        return value;
    }

    void fill_list(Bytes& in, std::int64_t list) {
        std::uint8_t* at = data.get() + extents[3 * list + 2];
        const std::int64_t size = extents[3 * list], capacity = extents[3 * list + 1];
        std::minstd_rand values(static_cast<unsigned>(in.below(65536)) + 1);
        for (std::int64_t i = 0; i < size * lists.codes.dim; ++i) {
            const float value = static_cast<float>(static_cast<int>(values() >> 8) % 9 - 4);
            std::uint32_t bits;
            std::memcpy(&bits, &value, 4);
            if (!tame) bits = static_cast<std::uint32_t>(values()) * 3;
            const std::uint16_t high = static_cast<std::uint16_t>(bits >> 16);
            // 0, 1, 2 and 4 as halves, or whatever comes.
            static constexpr std::uint16_t kHalves[] = {0, 0x3c00, 0x4000, 0x4400};
            const std::uint16_t half = tame ? kHalves[high & 3] : high;
            switch (lists.codes.code) {
                case Code::f32: std::memcpy(at + i * 4, &bits, 4); break;
                case Code::bf16: std::memcpy(at + i * 2, &high, 2); break;
                case Code::f16: std::memcpy(at + i * 2, &half, 2); break;
                case Code::u8: at[i] = static_cast<std::uint8_t>(values() >> 7) % (tame ? 64 : 256); break;
            }
        }
        for (std::int64_t i = 0; i < size; ++i) {
            const std::int64_t id = in.one_in(64) ? in.wild() : list * 1000 + i;
            std::memcpy(at + capacity * lists.codes.code_size + i * 8, &id, 8);
        }
    }

    // A bit for each row, where the sizes make sense: else there is no scan.
    void make_mask(Bytes& in) {
        sorted = room<std::int64_t>(lists.nlist + 1);
        sorted[0] = 0;
        for (std::int64_t list = 0; list < lists.nlist; ++list) {
            const std::int64_t size = extents[3 * list];
            if (size < 0 || size > (1 << 16)) return;
            sorted[list + 1] = sorted[list] + size;
        }
        const std::int64_t words = (sorted[lists.nlist] + RowMask::kWordBits - 1) / RowMask::kWordBits;
        bitmap = room<std::uint8_t>(words * 8);
        for (std::int64_t i = 0; i < words * 8; ++i) bitmap[i] = static_cast<std::uint8_t>(in.byte() * 31 + i);
        task.filter.rows = {bitmap.get(), words * RowMask::kWordBits, sorted.get(), lists.nlist};
    }

    void make_task(Bytes& in) {
        task.n = in.one_in(6) ? 200 + in.below(110) : in.below(24);
        task.p = in.below(5);
        task.k = in.one_in(8) ? 1 + in.below(500) : 1 + in.below(12);
        queries = room<float>(task.n * lists.codes.dim);
        for (std::int64_t i = 0; i < task.n * lists.codes.dim; ++i)
            queries[i] = tame || !in.one_in(8) ? static_cast<float>(i * 7 % 11) - 5 : number(in);
        probes = room<std::int64_t>(task.n * task.p);
        const bool faulty = in.one_in(6);
        for (std::int64_t i = 0; i < task.n * task.p; ++i)
            probes[i] = !faulty || !in.one_in(16) ? in.below(lists.nlist + 1) - 1
                        : in.one_in(2)            ? lists.nlist + in.below(2)
                                                  : in.wild();
        task.queries = queries.get(), task.probes = probes.get();
        switch (in.byte() % 4) {
            case 1:
                task.filter.n_bits = in.below(1200) * 8;
                bitmap = room<std::uint8_t>(task.filter.n_bits / 8);
                for (std::int64_t i = 0; i < task.filter.n_bits / 8; ++i)
                    bitmap[i] = static_cast<std::uint8_t>(in.byte() * 31 + i);
                task.filter.bitmap = bitmap.get();
                break;
            case 2:
                task.filter.n_sorted = in.below(200);
                sorted = room<std::int64_t>(task.filter.n_sorted);
                for (std::int64_t i = 0; i < task.filter.n_sorted; ++i)
                    sorted[i] = in.one_in(16) ? in.wild() : in.below(9000);
                std::sort(sorted.get(), sorted.get() + task.filter.n_sorted);
                task.filter.sorted = sorted.get();
                break;
            case 3: make_mask(in); break;
            default: break;
        }
        reports = in.byte() & 1;
        throws = reports && in.one_in(8);
    }
};

struct Refused {};

struct Answer {
    std::unique_ptr<float[]> distances;
    std::unique_ptr<std::int64_t[]> ids;
};

// How a scan is asked: with reports, which throw, and whether helpers change nothing of what it says.
struct Asked {
    bool reports, throws, same;
};

// What one call of scan(task) says; nothing where a report threw.
template <typename Task, typename Scan>
Answer answer(Task task, const Asked& asked, const Scan& scan) {
    Answer out{room<float>(task.n * task.k), room<std::int64_t>(task.n * task.k)};
    task.distances = out.distances.get(), task.ids = out.ids.get();
    std::vector<int> reported(static_cast<std::size_t>(task.n), 0);
    if (asked.reports)
        task.on_done = [&](const std::vector<std::int32_t>& rows) {
            REQUIRE(!rows.empty());
            for (const std::int32_t row : rows) {
                REQUIRE(row >= 0 && row < task.n);
                ++reported[static_cast<std::size_t>(row)];
            }
            if (asked.throws) throw Refused{};
        };
    try {
        scan(task);
        if (asked.reports)
            for (const int times : reported) REQUIRE(times == 1);
    } catch (const Refused&) {
        REQUIRE(asked.throws);
        return {};
    }
    return out;
}

// What scan(task, pool) says alone; it says the same with helpers, to as many callers as there are.
template <typename Task, typename Scan>
Answer answer_to_all(const Task& task, const Asked& asked, const Scan& scan) {
    // New ones: a pool on a busy machine is asked for less.
    ThreadPool none(0), two(2);
    Answer alone = answer(task, asked, [&](const Task& one) { scan(one, none); });
    const auto helped = [&] {
        const Answer other = answer(task, asked, [&](const Task& one) { scan(one, two); });
        if (alone.ids == nullptr || other.ids == nullptr || !asked.same) return;
        const std::size_t places = static_cast<std::size_t>(task.n * task.k);
        REQUIRE(std::memcmp(alone.ids.get(), other.ids.get(), places * sizeof(std::int64_t)) == 0);
        REQUIRE(std::equal(alone.distances.get(), alone.distances.get() + places, other.distances.get()));
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < callers; ++i) threads.emplace_back([&] {
        for (int times = 0; times < 3; ++times) helped();
    });
    helped();
    for (std::thread& thread : threads) thread.join();
    return alone;
}

// Whether a number of (n, p) is outside [-1, end).
bool any_outside(const std::int64_t* numbers, std::int64_t n, std::int64_t end) {
    return std::any_of(numbers, numbers + n, [end](std::int64_t number) { return number < -1 || number >= end; });
}

void check_answer(const Case& made, const Answer& got) {
    const std::int64_t k = made.task.k;
    for (std::int64_t q = 0; q < made.task.n; ++q) {
        std::multiset<std::int64_t> there;
        for (std::int64_t rank = 0; rank < made.task.p; ++rank) {
            const std::int64_t list = made.probes[q * made.task.p + rank];
            if (list < 0) continue;
            const std::int64_t* extent = made.extents.get() + 3 * list;
            for (std::int64_t i = 0; i < extent[0]; ++i) {
                std::int64_t id;
                std::memcpy(&id, made.lists.base + extent[2] + extent[1] * made.lists.codes.code_size + i * 8, 8);
                if (!made.task.filter.active() || made.task.filter.wanted(list, i, &id, 1) != 0) there.insert(id);
            }
        }
        const std::int64_t expected = std::min(k, static_cast<std::int64_t>(there.size()));
        const float* distances = got.distances.get() + q * k;
        const std::int64_t* ids = got.ids.get() + q * k;
        const float nothing = made.keep_max ? -INFINITY : INFINITY;
        std::int64_t found = 0;
        for (; found < k && distances[found] != nothing; ++found) {
            REQUIRE(!std::isnan(distances[found]));
            const auto at = there.find(ids[found]);
            REQUIRE(at != there.end());
            there.erase(at);
            if (found == 0) continue;
            const float before = distances[found - 1], here = distances[found];
            REQUIRE(made.keep_max ? before >= here : before <= here);
            REQUIRE(before != here || ids[found - 1] <= ids[found]);
        }
        if (made.tame) REQUIRE(found == expected);
        for (; found < k; ++found) REQUIRE(ids[found] == -1 && distances[found] == nothing);
    }
}

void run(const Case& made) {
    std::unique_ptr<ListScanner> scanner;
    try {
        scanner = std::make_unique<ListScanner>(made.lists, made.keep_max, *made.kernels);
    } catch (const std::invalid_argument& error) {
        REQUIRE(std::strlen(error.what()) > 0);
        return;
    }
    // Where numbers overflow, the bounds that save work do too: what is left out may depend on who was first.
    try {
        const Answer got =
            answer_to_all(made.task, {made.reports, made.throws, made.tame}, [&](const ScanTask& task, ThreadPool& pool) {
                if (task.k % 3 == 0) {
                    std::vector<std::int64_t> lists(static_cast<std::size_t>(made.lists.nlist));
                    std::iota(lists.begin(), lists.end(), 0);
                    scanner->prepare(lists.data(), made.lists.nlist);
                }
                scanner->scan(task, pool);
            });
        if (got.ids != nullptr) check_answer(made, got);
    } catch (const std::out_of_range&) {
        REQUIRE(any_outside(made.probes.get(), made.task.n * made.task.p, made.lists.nlist));
    }
}

// Answers are in order, and what is in them are rows of these sizes.
void check_positions(const Answer& got, const AnswerTask& task, const std::int64_t* sizes) {
    for (std::int64_t q = 0; q < task.n; ++q) {
        const float* const estimates = got.distances.get() + q * task.k;
        const std::int64_t* const positions = got.ids.get() + q * task.k;
        std::int64_t found = 0;
        for (; found < task.k && positions[found] >= 0; ++found) {
            REQUIRE(!std::isnan(estimates[found]) && estimates[found] < INFINITY);
            REQUIRE((positions[found] & 0xffffffff) < sizes[positions[found] >> 32]);
            if (found == 0) continue;
            const float before = estimates[found - 1], here = estimates[found];
            REQUIRE(before < here || (before == here && positions[found - 1] <= positions[found]));
        }
        for (; found < task.k; ++found) REQUIRE(positions[found] == -1 && estimates[found] == INFINITY);
    }
}

// Codes of any bytes.
void run_codes(Bytes& in) {
    const BlockKernels& blocks = kernels_of(in);
    static constexpr int kBits[] = {1, 2, 4};
    static constexpr std::int64_t kDims[] = {1, 31, 32, 33, 100};
    std::minstd_rand values(static_cast<unsigned>(in.below(65536)) + 1);
    const std::int64_t nlist = in.below(9), dim = kDims[in.byte() % std::size(kDims)], dims = (dim + 31) / 32 * 32;
    const auto signs = room<float>(2 * dims), squares = room<float>(nlist);
    for (std::int64_t i = 0; i < 2 * dims; ++i) signs[i] = values() % 2 != 0 ? 1.0f : -1.0f;
    for (std::int64_t i = 0; i < nlist; ++i) squares[i] = static_cast<float>(in.byte() % 3);
    CodeTable table{};
    table.format = {kBits[in.byte() % 3], dim, 0.25f, 0.5f, in.one_in(2), {signs.get(), 2, dims}};
    const auto sizes = room<std::int64_t>(nlist);
    for (std::int64_t i = 0; i < nlist; ++i) {
        sizes[i] = in.one_in(4) ? in.below(400) : in.below(80);
        table.nbytes += (sizes[i] + kCodedRows - 1) / kCodedRows * table.format.block_bytes();
    }
    const auto data = room<std::uint8_t>(table.nbytes);
    for (std::int64_t i = 0; i < table.nbytes; ++i) data[i] = static_cast<std::uint8_t>(values() >> 7);
    if (table.nbytes > 0 && in.one_in(8)) --table.nbytes;
    if (nlist > 0 && in.one_in(8)) sizes[in.below(nlist)] = in.wild();
    table.base = data.get(), table.sizes = sizes.get(), table.nlist = nlist, table.centre_squares = squares.get();

    CodeTask task{};
    task.n = in.one_in(4) ? 200 + in.below(110) : in.below(24), task.p = in.below(5);
    task.k = in.one_in(4) ? 1 + in.below(5000) : 1 + in.below(90);
    const bool reports = in.one_in(2), throws = reports && in.one_in(8), faulty = in.one_in(6);
    const auto queries = room<float>(task.n * dim), products = room<float>(task.n * task.p);
    const auto probes = room<std::int64_t>(task.n * task.p);
    for (std::int64_t i = 0; i < task.n * dim; ++i) queries[i] = static_cast<float>(values() % 17) - 8;
    for (std::int64_t i = 0; i < task.n * task.p; ++i) {
        products[i] = values() % 64 == 0 ? -INFINITY : static_cast<float>(values() % 17) - 8;
        probes[i] = faulty && values() % 64 == 0 ? in.wild() : static_cast<std::int64_t>(values() % (nlist + 1)) - 1;
    }
    task.queries = queries.get(), task.probes = probes.get(), task.centre_products = products.get();
    try {
        CodeScanner scanner(table, blocks, rabitq_kernels_for(blocks));
        const Answer got = answer_to_all(task, {reports, throws, true},
                                         [&](const CodeTask& one, ThreadPool& pool) { scanner.scan(one, pool); });
        if (got.ids != nullptr) check_positions(got, task, sizes.get());
    } catch (const std::invalid_argument& error) {
        REQUIRE(std::strlen(error.what()) > 0);
    } catch (const std::out_of_range&) {
        REQUIRE(any_outside(probes.get(), task.n * task.p, nlist));
    }
}

// Rows of the case's lists, where these can be read.
void run_rerank(std::minstd_rand& values, const Case& made) {
    RerankTask task{};
    task.n = made.task.n, task.k = made.task.k, task.queries = made.task.queries;
    task.p = values() % (task.n < 24 && values() % 2 == 0 ? 4000 : 60);
    const auto positions = room<std::int64_t>(task.n * task.p);
    const bool faulty = values() % 6 == 0;
    const auto size_of = [&](std::int64_t list) { return made.extents[3 * list]; };
    for (std::int64_t i = 0; i < task.n * task.p; ++i) {
        const std::int64_t list = made.lists.nlist == 0 ? 0 : values() % made.lists.nlist;
        const bool there = made.lists.nlist > 0 && size_of(list) > 0 && values() % 8 != 0;
        positions[i] = there ? list << 32 | values() % size_of(list) : -1;
        if (faulty && values() % 1000 == 0) positions[i] = static_cast<std::int64_t>(values() * values() * values()) - 2;
    }
    task.positions = positions.get();
    try {
        RowReranker reranker(made.lists, made.keep_max, *made.kernels);
        answer_to_all(task, {made.reports, made.throws, true},
                      [&](const RerankTask& one, ThreadPool& pool) { reranker.rerank(one, pool); });
    } catch (const std::invalid_argument& error) {
        REQUIRE(std::strlen(error.what()) > 0);
    } catch (const std::out_of_range&) {
        bool wrong = false;
        for (std::int64_t i = 0; i < task.n * task.p; ++i)
            wrong = wrong || (positions[i] != -1 && (positions[i] < 0 || positions[i] >> 32 >= made.lists.nlist ||
                                                     (positions[i] & 0xffffffff) >= size_of(positions[i] >> 32)));
        REQUIRE(wrong);
    }
}

void run_coarse(Bytes& in, const BlockKernels& kernels) {
    const bool keep_max = in.byte() & 1, tame = !in.one_in(4);
    const std::int64_t nlist = 1 + in.below(in.one_in(4) ? 3000 : 100), n = in.below(90);
    // So large here and there that one query and two are compared with rounded centroids first.
    const std::int64_t dim = 1 + in.below(in.one_in(4) ? 300 : 40);
    const std::int64_t p = 1 + in.below(in.one_in(2) ? nlist : std::min<std::int64_t>(nlist, 30));
    std::minstd_rand values(static_cast<unsigned>(in.below(65536)) + 1);
    const auto fill = [&](std::int64_t size) {
        auto numbers = room<float>(size);
        for (std::int64_t i = 0; i < size; ++i) {
            const std::uint32_t bits = static_cast<std::uint32_t>(values()) * 3;
            numbers[i] = static_cast<float>(bits >> 8 & 7) - 3;
            if (!tame && (bits & 31) == 0) std::memcpy(&numbers[i], &bits, 4);
        }
        return numbers;
    };
    const auto centroids = fill(nlist * dim), queries = fill(n * dim);
    CoarseQuantizer quantizer(centroids.get(), nlist, dim, keep_max, kernels);
    ThreadPool none(0), two(2);
    const auto check = [&] {
        const auto lists = room<std::int64_t>(n * p), list = room<std::int64_t>(2 * p);
        const auto distances = room<float>(n * p), distance = room<float>(2 * p);
        quantizer.quantize(queries.get(), n, p, lists.get(), distances.get(), two);
        for (std::int64_t q = 0; q < n; ++q) {
            std::set<std::int64_t> seen;
            const std::int64_t* const found = lists.get() + q * p;
            const float* const far = distances.get() + q * p;
            std::int64_t there = 0;
            for (; there < p && found[there] >= 0; ++there) {
                REQUIRE(found[there] < nlist && seen.insert(found[there]).second && !std::isnan(far[there]));
                if (there == 0) continue;
                const float before = far[there - 1], here = far[there];
                REQUIRE(before == here ? found[there - 1] < found[there] : keep_max ? before > here : before < here);
            }
            REQUIRE(!tame || there == p);
            for (; there < p; ++there) REQUIRE(found[there] == -1);
            if (q % 8 != 0) continue;
            const std::int64_t some = std::min<std::int64_t>(1 + q / 8 % 2, n - q);
            quantizer.quantize(queries.get() + q * dim, some, p, list.get(), distance.get(), none);
            REQUIRE(std::equal(found, found + some * p, list.get()));
            REQUIRE(std::memcmp(far, distance.get(), static_cast<std::size_t>(some * p) * 4) == 0);
        }
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < callers; ++i) threads.emplace_back(check);
    check();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes in(data, size);
    // First what takes few bytes: there may be none left behind a case.
    run_codes(in);
    std::minstd_rand values(static_cast<unsigned>(in.below(65536)) + 1);
    const Case made(in);
    run(made);
    run_rerank(values, made);
    run_coarse(in, *made.kernels);
    return 0;
}
