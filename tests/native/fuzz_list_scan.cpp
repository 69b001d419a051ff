// Fuzz target of the host scan: tables, extents, probes, filters and queries out of bytes, most of them nearly right.
//
// Whatever comes in, a scan answers or throws std::invalid_argument or std::out_of_range. Where it answers, every id is
// one of the probed lists and allowed, answers are in order, each row is reported once, and helpers change nothing.
//
// With libFuzzer: the target alone. Otherwise a driver:
//   fuzz_list_scan [--seconds S] [--seed N] [--callers C] [--check] [FILE...]
// --callers: as many threads scan at the same time, on one scanner and one pool. --check: the fixed checks only.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <numeric>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "scan/list_scan.h"
#include "scan/scan_items.h"

using namespace hybridindex;

namespace {

int callers = 1;

#define REQUIRE(condition)                                                             \
    do {                                                                               \
        if (!(condition)) {                                                            \
            std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
            std::abort();                                                              \
        }                                                                              \
    } while (false)

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
        static constexpr const char* kNames[] = {"portable", "avx2", "avx512", "amx"};
        kernels = kernels_named(kNames[in.byte() % 4]);
        if (kernels == nullptr) kernels = portable_kernels;
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

Answer answer(const Case& made, ListScanner& scanner, ThreadPool& pool) {
    ScanTask task = made.task;
    Answer out{room<float>(task.n * task.k), room<std::int64_t>(task.n * task.k)};
    task.distances = out.distances.get(), task.ids = out.ids.get();
    std::vector<int> reported(static_cast<std::size_t>(task.n), 0);
    if (made.reports)
        task.on_done = [&](const std::vector<std::int32_t>& rows) {
            REQUIRE(!rows.empty());
            for (const std::int32_t row : rows) {
                REQUIRE(row >= 0 && row < task.n);
                ++reported[static_cast<std::size_t>(row)];
            }
            if (made.throws) throw Refused{};
        };
    if (made.task.k % 3 == 0) {
        std::vector<std::int64_t> lists(static_cast<std::size_t>(made.lists.nlist));
        std::iota(lists.begin(), lists.end(), 0);
        scanner.prepare(lists.data(), made.lists.nlist);
    }
    try {
        scanner.scan(task, pool);
        if (made.reports)
            for (const int times : reported) REQUIRE(times == 1);
    } catch (const Refused&) {
        REQUIRE(made.throws);
        return {};
    }
    return out;
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
                if (!made.task.filter.active() || made.task.filter.allows(id)) there.insert(id);
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

ThreadPool& pool_of(int helpers) {
    static ThreadPool none(0), two(2);
    return helpers == 0 ? none : two;
}

void run(const Case& made) {
    std::unique_ptr<ListScanner> scanner;
    try {
        scanner = std::make_unique<ListScanner>(made.lists, made.keep_max, *made.kernels);
    } catch (const std::invalid_argument& error) {
        REQUIRE(std::strlen(error.what()) > 0);
        return;
    }
    Answer alone;
    try {
        alone = answer(made, *scanner, pool_of(0));
    } catch (const std::out_of_range&) {
        bool wrong = false;
        for (std::int64_t i = 0; i < made.task.n * made.task.p; ++i)
            wrong = wrong || made.probes[i] < -1 || made.probes[i] >= made.lists.nlist;
        REQUIRE(wrong);
        return;
    }
    if (alone.ids != nullptr) check_answer(made, alone);
    const auto helped = [&] {
        const Answer other = answer(made, *scanner, pool_of(2));
        // Where numbers overflow, the bounds that save work do too: what is left out may depend on who was first.
        if (alone.ids == nullptr || other.ids == nullptr || !made.tame) return;
        const std::size_t places = static_cast<std::size_t>(made.task.n * made.task.k);
        REQUIRE(std::memcmp(alone.ids.get(), other.ids.get(), places * sizeof(std::int64_t)) == 0);
        REQUIRE(std::equal(alone.distances.get(), alone.distances.get() + places, other.distances.get()));
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < callers; ++i) threads.emplace_back([&] {
        for (int times = 0; times < 3; ++times) helped();
    });
    helped();
    for (std::thread& thread : threads) thread.join();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    Bytes in(data, size);
    run(Case(in));
    return 0;
}

#ifndef LIBFUZZER
namespace {

// Every row of every probed list is in exactly one item, items of a query are counted, and none is much larger than
// its share.
void check_items(std::int64_t size, std::int64_t n, int threads, bool finish_early) {
    const std::int64_t dim = 64, code_size = 256;
    const std::int64_t extents[] = {0, 0, 0, size, size, 0, 5, 8, 0};
    std::vector<std::int64_t> probes;
    for (std::int64_t q = 0; q < n; ++q) probes.insert(probes.end(), {1 + q % 2, 0, 2 - q % 2});
    std::vector<std::int32_t> slot_of(3, -1), items_of_query;
    ProbedLists probed;
    group_probes(probes.data(), n, 3, extents, 3, slot_of, probed);
    REQUIRE((slot_of == std::vector<std::int32_t>(3, -1)));
    std::vector<ScanItem> items;
    make_items(probed, {extents, code_size, dim}, n, threads, finish_early, items, items_of_query);
    std::vector<std::vector<char>> seen{{}, std::vector<char>(static_cast<std::size_t>(size)), std::vector<char>(5)};
    std::int64_t hub_items = 0, largest = 0;
    for (const ScanItem& item : items) {
        const std::int64_t list = probed.lists[static_cast<std::size_t>(item.list)];
        REQUIRE(item.first % kBlockRows == 0 && item.count > 0);
        for (std::int64_t row = item.first; row < item.first + item.count; ++row)
            REQUIRE(!seen[static_cast<std::size_t>(list)].at(static_cast<std::size_t>(row))++);
        if (list != 1) continue;
        ++hub_items;
        largest = std::max<std::int64_t>(largest, item.count);
    }
    for (const auto& rows : seen) REQUIRE(std::count(rows.begin(), rows.end(), 0) == 0);
    for (const std::int32_t count : items_of_query) REQUIRE(count == static_cast<std::int32_t>(items.size()));
    if (size < 20000) return;
    if (threads > 1) REQUIRE(hub_items >= std::min<std::int64_t>(8 * threads, size * code_size / (64 << 10)));
    REQUIRE(largest <= 2 * (size / hub_items + kBlockRows));
}

void check_fixed() {
    for (const bool finish_early : {false, true})
        for (const int threads : {1, 2, 5, 64})
            for (const std::int64_t size : {1, 16, 17, 1000, 20000})
                for (const std::int64_t n : {1, 2, 64, 600}) check_items(size, n, threads, finish_early);
}

void run_random(std::uint64_t seed) {
    std::mt19937_64 random(seed);
    std::vector<std::uint8_t> bytes(256 + random() % 8192);
    for (std::uint8_t& byte : bytes) byte = static_cast<std::uint8_t>(random());
    const auto data = room<std::uint8_t>(static_cast<std::int64_t>(bytes.size()));
    std::copy(bytes.begin(), bytes.end(), data.get());
    LLVMFuzzerTestOneInput(data.get(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
    double seconds = 30;
    std::uint64_t seed = 1, last = 0;
    std::vector<std::string> files;
    for (int i = 1; i < argc; ++i) {
        const std::string name = argv[i];
        const auto value = [&] { return i + 1 < argc ? std::string(argv[++i]) : std::string("0"); };
        if (name == "--seconds") seconds = std::stod(value());
        else if (name == "--seed") seed = std::stoull(value()), last = seed + 1;
        else if (name == "--callers") callers = std::stoi(value());
        else if (name == "--check") seconds = 0;
        else files.push_back(name);
    }
    for (const std::string& file : files) {
        std::ifstream in(file, std::ios::binary);
        const std::vector<char> bytes{std::istreambuf_iterator<char>(in), {}};
        LLVMFuzzerTestOneInput(reinterpret_cast<const std::uint8_t*>(bytes.data()), bytes.size());
    }
    if (!files.empty()) return 0;
    check_fixed();
    const auto start = std::chrono::steady_clock::now();
    std::uint64_t runs = 0;
    const auto over = [&] {
        const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - start;
        return last != 0 ? seed >= last : spent.count() > seconds;
    };
    // A crash is repeated with --seed; FUZZ_VERBOSE=1 says which.
    for (; !over(); ++seed, ++runs) {
        if (std::getenv("FUZZ_VERBOSE") != nullptr)
            std::fprintf(stderr, "seed %llu\n", static_cast<unsigned long long>(seed));
        try {
            run_random(seed);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "seed %llu: %s\n", static_cast<unsigned long long>(seed), error.what());
            return 1;
        }
    }
    std::printf("fuzz_list_scan: %llu inputs, %d callers, kernels %s: ok\n", static_cast<unsigned long long>(runs),
                callers, best_kernels().name);
    return 0;
}
#endif
